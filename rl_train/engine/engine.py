"""The one object through which a policy samples and scores: everything that makes it fast is behind it.

Letters: P prompts, G samples each, N = P*G rows, n scored rows, L prompt length, T new tokens,
C width, m tokens.
"""

from rl_train.engine import logprob, sampler
from rl_train.engine.logprob import Answers
from rl_train.engine.tokens import Completions, StopText


class Engine:
    """Samples from and scores with one decoder LLM, under softmax(logits / temperature).

    Args:
        language_model: the LLM with its LoRA attached; pad_id: fills what stands behind an answer.
        gradient_checkpointing: recompute each layer in the backward of `score`.
    """

    def __init__(self, language_model, *, pad_id, temperature=1.0, gradient_checkpointing=False):
        self.language_model, self.pad_id = language_model, pad_id
        self.temperature, self.gradient_checkpointing = temperature, gradient_checkpointing
        if gradient_checkpointing:
            logprob.prepare_checkpointing(language_model)

    def generate(
        self,
        embeds,
        attention_mask,
        *,
        num_generations,
        max_new_tokens,
        stop: StopText | None,
        uniforms=None,
        shared_prefix_lengths=None,
    ) -> Completions:
        """See `sampler.generate`."""
        return sampler.generate(
            self.language_model,
            embeds,
            attention_mask,
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            stop=stop,
            pad_id=self.pad_id,
            temperature=self.temperature,
            uniforms=uniforms,
            same=shared_prefix_lengths,
        )

    def score(self, embeds, attention_mask, prompt, ids, valid) -> Answers:
        """See `logprob.score_answers`."""
        return logprob.score_answers(
            self.language_model,
            embeds,
            attention_mask,
            prompt,
            ids,
            valid,
            pad_id=self.pad_id,
            temperature=self.temperature,
            gradient_checkpointing=self.gradient_checkpointing,
        )

    def read(self, embeds, attention_mask, *, num_last=1, shared_prefix_lengths=None):
        """(P, num_last, C) hidden states at the prompts' ends: see `logprob.read`."""
        return logprob.read(
            self.language_model, embeds, attention_mask, shared_prefix_lengths, num_last
        )

    def logps(self, hidden, ids):
        """(m,) log-probs of ids (m,) after hidden states (m, C), without gradient."""
        return logprob.frozen_logps(self.language_model, hidden, ids, self.temperature)
