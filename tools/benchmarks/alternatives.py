"""Other ways to do the same step, as stand-ins for parts of it: what is not named here is the project's own code.

Each of `naive`, `trl` and `static` is a `with` block in which `Work.step` goes the other way; it yields a Counter {phase: seconds} to be
added to the laps, for work that is measured in part and for phases that the project's loop does not have.

Letters: P prompts, G samples each, N = P*G rows, n rows of a forward, L prompt length, T completion tokens, A answer tokens, C width.
"""

import contextlib
import time
from collections import Counter
from unittest.mock import patch

import torch
from rl_train.rollout import describe, row_masks

from rl_train import grpo, objective, train
from rl_train.engine import Completions
from rl_train.engine.packing import fed
from rl_train.policies.sa2va import Images, Prompts, Scores
from rl_train.tasks import caption_mask_caption, mask_caption_mask
from sa2va_hf.modeling_sa2va import positions
from tools.benchmarks.common import synchronize
from tools.benchmarks.work import Work


@contextlib.contextmanager
def naive(work: Work, num_samples: int):
    """Earlier attempts: `generate` with num_return_sequences, the teacher one sample at a time with its own vision and SAM2 encode and an
    answer of its own, logits of the whole sequence, vision per row.

    Args:
        num_samples: what the teacher does of its N samples; its seconds are scaled to all.
    """
    extra = Counter()
    rows = PerRow(work, all_logits=True)
    one_by_one = [
        (mask_caption_mask, "segment", partly(rows.segment, work, num_samples, extra, "teacher1")),
        (caption_mask_caption, "describe", partly(describe, work, num_samples, extra, "teacher2")),
    ]
    with replaced(
        (work.policy.engine, "generate", huggingface(work)), *rows.replacements(), *one_by_one
    ):
        yield extra


@contextlib.contextmanager
def trl(work: Work, all_logits: bool):
    """As TRL: batched `generate`, old and reference log-probs by a full forward each with the vision encoder, the teacher in batches,
    which answers for itself and encodes the image of every row.

    Args:
        all_logits: of the whole sequence, which TRL computes for a model without `logits_to_keep`; else of the completions.
    """
    extra = Counter()
    rows, sample = PerRow(work, all_logits), train.sample

    def sample_and_score(policy, *inputs):
        found = sample(policy, *inputs)
        synchronize(policy.device)
        start = time.perf_counter()
        found.logp = train.score_all(policy, found, work.args.micro_batch_size)[0]
        synchronize(policy.device)
        seconds, loop = time.perf_counter() - start, "2" if found.has_mask else "1"
        extra[f"old{loop}"] += seconds
        extra[f"rollout{loop}"] -= seconds
        return found

    with replaced(
        (work.policy.engine, "generate", huggingface(work)),
        *rows.replacements(),
        (train, "sample", sample_and_score),
        (mask_caption_mask, "segment", rows.segment),
    ):
        yield extra


@contextlib.contextmanager
def static(work: Work):
    """The project's loop on `generate` with a static cache, which transformers compiles on a GPU."""
    torch._dynamo.config.cache_size_limit = 64
    with replaced(
        (work.policy.engine, "generate", huggingface(work, cache_implementation="static"))
    ):
        yield Counter()


@contextlib.contextmanager
def replaced(*replacements):
    """Replace (owner, name, function)s. Every one must be called, or what was measured is not what its name says."""
    calls = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, function in replacements:
            stack.enter_context(patch.object(owner, name, counted((owner, name), function)))
        yield
    unused = [name for owner, name, _ in replacements if not calls[owner, name]]
    assert not unused, (
        f"the step does not call {', '.join(unused)} any more: the stand-ins have to follow it"
    )


def partly(function, work: Work, num_samples: int, extra: Counter, phase: str):
    """`function` of lists of N, called with the first num_samples one at a time; the others get their results, and the phase their time."""

    def call(policy, *inputs):
        total = max(len(value) for value in inputs if isinstance(value, list))
        lists = [isinstance(value, list) and len(value) == total for value in inputs]
        found, taken = [], min(num_samples, total)
        synchronize(policy.device)
        start = time.perf_counter()
        for row in range(taken):
            found += function(
                policy,
                *[
                    value[row : row + 1] if is_list else value
                    for value, is_list in zip(inputs, lists)
                ],
            )
        synchronize(policy.device)
        extra[phase] += (total / taken - 1) * (time.perf_counter() - start)
        return [found[row % taken] for row in range(total)]

    return call


def huggingface(work: Work, **how):
    """A stand-in for `Engine.generate` by transformers' own, whose rows each have their prompt's cache."""

    engine = work.policy.engine
    language_model, temperature = engine.language_model, engine.temperature

    def generate(
        embeds,
        attention_mask,
        *,
        num_generations,
        max_new_tokens,
        stop,
        uniforms=None,
        shared_prefix_lengths=None,
    ):
        drawn = uniforms is not None
        sampling = (
            dict(do_sample=True, top_k=0, top_p=1.0, temperature=temperature)
            if drawn
            else dict(do_sample=False)
        )
        with_hidden = max_new_tokens == work.answer_tokens
        out = language_model.generate(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            num_return_sequences=num_generations,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            pad_token_id=engine.pad_id,
            return_dict_in_generate=True,
            output_logits=drawn,
            output_hidden_states=with_hidden and not how,
            **sampling,
            **how,
        )
        ids, width = out.sequences, embeds.shape[-1]
        assert ids.shape == (len(embeds) * num_generations, max_new_tokens)
        logp = torch.zeros(ids.shape, device=ids.device)
        for t, logits in enumerate(out.logits if drawn else ()):
            logp[:, t] = torch.log_softmax(logits.float() / temperature, -1).gather(
                1, ids[:, t, None]
            )[:, 0]
        hidden = torch.zeros(*ids.shape, width, device=ids.device, dtype=embeds.dtype)
        valid = torch.ones_like(ids, dtype=torch.bool)
        if (
            with_hidden and how
        ):  # a compiled forward gives no hidden states: one more forward, the project's own
            prompt = torch.arange(len(embeds), device=ids.device).repeat_interleave(num_generations)
            answers = engine.score(embeds, attention_mask, prompt, ids, valid)
            hidden[:, :-1] = answers.hidden_of(fed(valid)).view(len(ids), -1, width)
        elif with_hidden:
            hidden[:, :-1] = torch.stack([step[-1][:, -1] for step in out.hidden_states[1:]], 1)
        return Completions(ids, logp, valid, ~valid[:, 0], hidden)

    return generate


def forward(language_model, embeds, mask, ids) -> torch.Tensor:
    """(n, L+T, C) last hidden states of embeddings (n, L, C) and the tokens ids (n, T) behind them."""
    embeds = torch.cat([embeds, language_model.get_input_embeddings()(ids).to(embeds.dtype)], dim=1)
    mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return language_model.model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions(mask), use_cache=False
    ).last_hidden_state


class PerRow:
    """Stand-ins that compute for every row what the project computes once: vision features, the teacher's SAM2 features, full logits."""

    def __init__(self, work: Work, all_logits: bool):
        self.work, self.all_logits, self.embed_once = work, all_logits, work.policy.embed

    def replacements(self):
        return [
            (self.work.policy, "embed", self.embed),
            (train, "token_logps", self.token_logps),
            (objective, "token_logps", self.token_logps),
        ]

    def embed(self, images: Images, prompts: Prompts, *rest):
        """`Policy.embed` after the vision encoder, on the tiles of each prompt."""
        policy, batch = self.work.policy, self.work.batch
        with (
            torch.no_grad(),
            torch.autocast(policy.device.type, enabled=False),
        ):  # as in `Policy.encode_images`
            vision = policy.model.vision_features(
                torch.cat([batch.inputs.pixel_values[i] for i in prompts.image]).to(policy.device)
            )
        each = Images(
            vision,
            [images.tiles[i] for i in prompts.image],
            images.sam,
            [images.sizes[i] for i in prompts.image],
        )
        return self.embed_once(
            each, Prompts(prompts.ids, list(range(len(prompts.ids))), prompts.grids), *rest
        )

    def token_logps(self, policy, rollout, rows: slice = slice(None)) -> Scores:
        """`objective.token_logps` by one sequence per row and its logits as one tensor."""
        prompts = rollout.prompts.select(range(len(rollout))[rows])
        ids, valid, head = (
            rollout.ids[rows],
            rollout.valid[rows],
            policy.model.language_model.lm_head,
        )
        with policy.autocast():
            embeds, mask = policy.embed(rollout.images, prompts)
            length = embeds.shape[1]
            hidden = forward(policy.model.language_model, embeds, mask, ids)
            logits = (
                head(hidden)[:, length - 1 : -1]
                if self.all_logits
                else head(hidden[:, length - 1 : -1])
            )
            latent_mean = policy.model.text_hidden_fcs(
                hidden[:, length:][policy.seg_tokens(ids, valid)]
            )
        logp = grpo.token_logps_from_logits(logits, ids, policy.temperature)
        with torch.no_grad():
            entropy = grpo.entropy_from_logits(logits, policy.temperature)
        return Scores(logp, entropy, latent_mean.float())

    @torch.no_grad()
    def segment(
        self, policy, images: Images, image: list[int], captions: list[str]
    ) -> list[torch.Tensor]:
        """`rollout.segment` with an answer that is generated, and SAM2 features for every caption."""
        with policy.autocast():
            prompts = policy.segment_prompts(images, image, captions)
            embeds, mask = policy.embed(images, prompts)
            answers = policy.engine.generate(
                embeds,
                mask,
                num_generations=1,
                max_new_tokens=self.work.answer_tokens,
                stop=policy.stop,
            )
            seg = policy.seg_tokens(answers.ids, answers.valid)
            embeddings = policy.model.text_hidden_fcs(answers.hidden[seg]).float()
            with torch.autocast(policy.device.type, enabled=False):
                sam = policy.model.sam_features(
                    self.work.batch.inputs.sam_pixels[image].to(policy.device)
                )
        each = Images(images.vision, images.tiles, sam, [images.sizes[i] for i in image])
        return row_masks(
            policy, each, list(range(len(image))), seg.nonzero()[:, 0].tolist(), embeddings
        )
