"""Interface of a policy: every member that the loops, tasks and tools use, and shared methods."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from peft import PeftModel
from PIL import Image
from transformers import PreTrainedTokenizerBase

from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.errors import DamagedSample
from rl_train.data.text import MARKER
from rl_train.distributed.fsdp import ShardedLayers
from rl_train.engine import Completions, Engine, ScoreOutput, StopText
from rl_train.rollout import Batch, Preprocessor, Rollout
from rl_train.utils.nan_check import NanWatcher
from sa2va_hf.batches import Prompts


class Features(Protocol):
    """Features of B images; each model family has its own record."""

    sizes: list[tuple[int, int]]  # (H, W) of each original image


class Policy(Protocol):
    """Model that answers prompts, with its tokenizer and LoRA. Model families subclass this.

    Methods with a body are shared. A family defines the others and the prompts of its own tasks.
    Letters: B images, P prompts, G samples each, N = P*G rows, n scored rows, T tokens.
    """

    family: str  # name in `registry.FAMILIES`
    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    engine: Engine  # samples and scores with the language model
    peft: PeftModel | None  # the language model with its LoRA; None without one
    stop: StopText | None  # text that ends an answer; None: only the length ends it
    pad_id: int
    base_dtype: torch.dtype
    trainable: dict[str, torch.nn.Parameter]  # float32, by the model's own names
    group_of: dict[str, str]  # {name of a trainable: its group}, by which gradient norms are logged
    encoders_train: bool = False  # True if `encode` has a gradient
    sharded_vision: ShardedLayers | None = None  # blocks of the vision encoder, with --fsdp
    nan_watcher: NanWatcher  # names of the outputs, in any role, that had a NaN or infinity

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def summary(self) -> str:
        """Return what the model is, in one line; "" if its folder's type says all."""
        return ""

    def preprocessor(
        self, max_new_tokens: int, max_prompt_length: int | None = None
    ) -> Preprocessor:
        """Return the object that checks, prepares and collates samples in the loader's workers."""

    def encode(self, batch: Batch) -> Features:
        """Return features of a batch's images, shared by rows, tasks and roles."""

    def embed(
        self, features: Features, prompts: Prompts, num_tokens: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (embeds (P, L, C), attention mask (P, L), positions (A, P, L) or None).

        Prompts are padded on the left. A: axes of the rotary position.

        Without positions, tokens are counted from the first unpadded one. Raises ValueError if a
        prompt and `num_tokens` behind it exceed the model's context.
        """

    def complete(
        self,
        features: Features,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[Completions, list[str]]:
        """Return (G completions of each prompt, their N texts).

        Args:
            uniforms: (N, T) in [0, 1) by which tokens are sampled; None: greedy.
        """

    def save_merged(self, folder: Path, dtype: torch.dtype | None = None):
        """Write the base with the LoRA merged in, in its published layout; ends its use."""

    def autocast(self) -> torch.autocast:
        """Return autocast to bfloat16 if the base is bfloat16; trainables are float32."""
        enabled = self.base_dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def picture(self, batch: Batch, sample: int) -> Image.Image:
        """Return the image of one sample, for people to look at."""
        return Image.fromarray(batch.inputs.sam_pixels[sample].permute(1, 2, 0).numpy())

    def sample(
        self,
        batch: Batch,
        features: Features,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ) -> Rollout:
        """Return a rollout of G answers to each prompt, by `uniforms` (N, T) or greedy."""
        completions, texts = self.complete(
            features, prompts, num_generations, max_new_tokens, uniforms
        )
        # Row i*G+j answers prompt i, as the engine returns its completions.
        rows = prompts.repeat(num_generations)
        return Rollout(batch, features, rows, texts, num_generations, **vars(completions))

    def score(self, rollout: Rollout, rows: slice = slice(None)) -> ScoreOutput:
        """Score n rows' sampled tokens by a full forward: .logp (n, T) with gradient and .entropy.

        The forward sees the image features, which stand in for pixel_values where no vision encoder
        trains, and the prompts with their prompt masks (Sa2VA's regions).

        Neighbouring rows of one prompt share its forward.
        """
        prompts = rollout.prompts.select(range(len(rollout))[rows])
        return self.score_answers(rollout.features, prompts, rollout.ids[rows], rollout.valid[rows])

    def shard_base(self):
        """Keep this rank's shard of the frozen layers from now on (--fsdp). A collective."""

    def unshard_base(self, vision: bool = False):
        """Gather the LLM's layers for what follows without gradient: see `distributed.fsdp`.

        With --fsdp a collective, else nothing happens.

        Args:
            vision: gather the vision encoder too, so that ranks may `encode` different numbers of
                times. Else each `encode` gathers its blocks, block by block.
        """
        if self.sharded_vision is not None:
            self.engine.unshard()
            self.sharded_vision.unshard() if vision else self.sharded_vision.reshard()

    def reshard_base(self):
        """Free what `unshard_base` gathered, before a forward with gradient."""
        if self.sharded_vision is not None:
            self.engine.reshard()
            self.sharded_vision.reshard()

    def score_answers(
        self,
        features: Features,
        prompts: Prompts,
        ids: torch.Tensor,
        valid: torch.Tensor,
    ) -> ScoreOutput:
        """Score answers as `score` does: tokens ids (n, T) where valid (n, T), to n prompts."""
        if torch.is_grad_enabled():
            self.reshard_base()
        prompts, prompt_index = prompts.distinct()  # rows of one prompt share its forward
        with self.autocast():
            embeds, mask, positions = self.embed(features, prompts, ids.shape[1])
            return self.engine.score(
                embeds,
                mask,
                torch.tensor(prompt_index),
                ids,
                valid,
                position_ids=positions,
            )


def check_caption(
    sample: dict,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    max_tokens: int,
    texts: Sequence[str],
):
    """Raise DamagedSample if a sample's caption is too long, or no plain text.

    A special token in it could end the turn, or stand for an image.

    Args:
        num_tokens: text tokens that the caption takes; max_tokens: that it may take.
        texts: the caption as it stands in prompts and answers.
    """
    if num_tokens > max_tokens:
        raise DamagedSample(
            sample["image_id"],
            f"caption of {len(sample['caption'])} characters: {num_tokens} text tokens exceed the "
            f"{max_tokens} that --max_prompt_length and the model's context allow",
        )
    added_tokens = tokenizer.added_tokens_decoder
    # A word that somebody added to the vocabulary is text like any other.
    special_tokens = {
        i: token
        for i, token in added_tokens.items()
        if token.special or MARKER.fullmatch(token.content)
    }
    for text in texts:
        for i in tokenizer.encode(text, add_special_tokens=False):
            if i in special_tokens:
                fault = f"caption with the special token {special_tokens[i]}"
                raise DamagedSample(sample["image_id"], fault)


def check_aspect(sample: dict, max_aspect: int):
    """Raise DamagedSample if an image's longer side is over max_aspect times its shorter one."""
    width, height = sample["image"].size
    if max(width, height) > max_aspect * min(width, height):
        fault = f"image of {width}x{height} pixels, narrower than 1 to {max_aspect}"
        raise DamagedSample(sample["image_id"], fault)


SAM2_CITATION = """@article{ravi2024sam2,
  title = {{SAM} 2: Segment Anything in Images and Videos},
  author = {Ravi, Nikhila and Gabeur, Valentin and Hu, Yuan-Ting and Hu, Ronghang and others},
  journal = {arXiv preprint arXiv:2408.00714},
  year = {2024}
}
"""


@dataclass(frozen=True)
class ModelSpec:
    """A family of models. A new family is one such record in its policy's file.

    Attributes:
        name: name by which tasks ask for the family.
        model_types: values of model_type in the config.json of its folders.
        check: check(config) raises ValueError for flags or folders of other models, by their
            config.json alone.
        build: (config, groups, max_new_tokens, device) -> the policy.
        rl_patterns: {group: regex} of the weights that reinforcement learning may train.
        group_patterns: {group: regex} of all weights that --trainable_modules may name.
        gradient_via: {group: the group of `rl_patterns` that a task must list for gradients to
            reach it}, for groups that are not in `rl_patterns`.
        citation: BibTeX entries of the models that it is made of.
        card_loading: text of the model card that says how an exported folder (FOLDER) is loaded,
            with and without this package; QUESTION stands for an example question.
        library: `library_name` in the card: the library that loads the folder alone.
        absent_groups: (folder) -> groups of `group_patterns` of which its model has no weights.
        example_question: ({flag: value} of the run, its base) -> a question as in training.
    """

    name: str
    model_types: tuple[str, ...]
    check: Callable[[PolicyConfig], None]
    build: Callable[..., Policy]
    rl_patterns: dict[str, str]
    group_patterns: dict[str, str]
    gradient_via: dict[str, str]
    citation: str
    card_loading: str
    library: str
    example_question: Callable[[dict, Path], str]
    absent_groups: Callable[[str], set[str]] = lambda folder: set()
