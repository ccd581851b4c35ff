"""Records that data, policies and tasks hand to each other.

Letters: B samples, G generations, N = B*G rows (row i*G+j answers sample i), T tokens, C LLM width.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from rl_train.points.parser import PointPrompt

if TYPE_CHECKING:  # for annotations: policies import this module, and rewards need no transformers
    from rl_train.policies.base import Features
    from sa2va_hf.batches import Prompts

T = TypeVar("T")


@dataclass
class Batch:
    """B samples of a region dataset, and what the policy's model needs of them."""

    index: list[int]  # position of each sample in the dataset (of the stand-in, for a damaged one)
    masks: list[torch.Tensor]  # (H, W) bool, at the image's own size
    captions: list[str]
    image_ids: list[str]
    damaged: list[str]  # "image_id: reason" of each sample that another one stands in for
    inputs: Any  # made by the policy's `Preprocessor.collate`; only that policy reads it
    # (K, H, W) bool masks of the K other regions of each image, with --distractors
    distractors: list[torch.Tensor] | None = None
    # Boxes and points of each sample as its data set states them, see `points.published`; None of
    # data sets of masks alone
    solutions: list[str | None] | None = None
    # Of samples with a question: it, its true answer, and further columns by name, B entries each
    questions: list[str | None] | None = None
    answers: list[str | None] | None = None
    columns: dict[str, list[Any]] = field(default_factory=dict)

    # (K, H, W) bool masks of the regions that each caption names, whose union is its mask; K is 0
    # if it names none. None of data sets whose captions name one region each
    objects: list[torch.Tensor] | None = None
    # Captions and masks (k, H, W) bool of other regions of each image, for examples of several
    # turns; None where a sample is one turn
    companion_captions: list[list[str]] | None = None
    companion_masks: list[torch.Tensor] | None = None

    def __len__(self):
        return len(self.index)

    @property
    def has_masks(self) -> bool:
        """False of data sets of boxes and points, in which all masks are empty."""
        return self.objects is not None or any(mask.any() for mask in self.masks)

    @property
    def regions(self) -> list[torch.Tensor]:
        """Masks (K, H, W) bool of the regions that each caption names, one by one."""
        return [mask[None] for mask in self.masks] if self.objects is None else self.objects

    @property
    def no_target(self) -> list[bool]:
        """True for each caption that names nothing in its image, whose true mask is empty."""
        if self.objects is None:
            return [False] * len(self)
        return [len(masks) == 0 for masks in self.objects]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Size (H, W) of each image."""
        return [tuple(mask.shape) for mask in self.masks]


class Preprocessor(Protocol):
    """Preprocessing of samples into a model's inputs; its copies run in the loader's workers.

    A sample is dict(image PIL RGB, mask (H, W) bool ndarray, caption, category, image_id), with
    "stored_image", the image as its file holds it, where `image` has another shape, "solution",
    "question" and "answer", and "columns" {name: value}.
    """

    def check(self, sample: dict[str, Any]):
        """Raise DamagedSample if the sample does not fit the model."""

    def prepare(self, sample: dict[str, Any]) -> Any:
        """Make the model's inputs of one sample: the costly work."""

    def collate(self, prepared: list[Any]) -> Any:
        """Join the prepared samples into the model's inputs of a batch."""


@dataclass
class SampledLatents:
    """Record of the M latents that a task's action sampled, and of the masks they decode to."""

    rows: torch.Tensor  # (M,) the row of each latent, ascending, on the CPU
    masks: list[torch.Tensor]  # N (H, W) bool, the union of a row's, empty without a latent
    z: torch.Tensor  # (M, D) sampled; the mean itself where sigma is 0
    noise: torch.Tensor  # (M, D) z minus the mean it was sampled around
    logp: torch.Tensor | None  # (M,) log-density, mean over dimensions; None where sigma is 0
    confidence: list[float] = field(default_factory=list)  # N, of the masks: `mask_confidence`
    # Where masks are matched one by one: N (m, H, W) bool, those of a row's latents, and the M
    # regions (H, W) that they are matched with, None of a surplus one
    seg_masks: list[torch.Tensor] | None = None
    targets: list[torch.Tensor | None] | None = None

    def is_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (M,) bool: True for the latents of `rows` (n,)."""
        return torch.isin(self.rows, rows)

    def select(self, rows: torch.Tensor) -> "SampledLatents":
        """Return the latents of `rows` (n,), which ascend and are numbered anew."""
        kept, targets = self.is_of_rows(rows), self.targets
        if targets is not None:
            targets = [target for target, is_kept in zip(targets, kept.tolist()) if is_kept]
        return SampledLatents(
            rows=torch.searchsorted(rows, self.rows[kept]),
            masks=[self.masks[row] for row in rows],
            z=self.z[kept],
            noise=self.noise[kept],
            logp=None if self.logp is None else self.logp[kept],
            confidence=[self.confidence[row] for row in rows] if self.confidence else [],
            seg_masks=None if self.seg_masks is None else [self.seg_masks[row] for row in rows],
            targets=targets,
        )


@dataclass
class Rollout:
    """Record of N answers of a policy to the prompts of a batch, as they were sampled.

    ids, valid and stopped are on the CPU, so that layouts by them need no synchronisation.
    """

    batch: Batch
    features: "Features"  # of the batch's images by the policy, shared by all rows and roles
    prompts: "Prompts"  # N
    texts: list[str]  # N answers, cut at the stop text
    num_generations: int
    ids: torch.Tensor  # (N, T)
    logp: torch.Tensor  # (N, T) under the weights that sampled
    valid: torch.Tensor  # (N, T) bool, up to and including the token that ends the answer
    stopped: torch.Tensor  # (N,) bool, False = cut at the length limit
    # (N, T, C) last hidden state at each token as input; any numbers from a row's last token on
    hidden: torch.Tensor
    latents: SampledLatents | None = None  # sampled by the task's action beside the text

    def __len__(self):
        return len(self.texts)

    def repeat_for_rows(self, values: list[T]) -> list[T]:
        """Repeat B values, one a sample, for the N rows: entry i*G+j is values[i]."""
        return [values[row // self.num_generations] for row in range(len(self))]

    def rows_of(self, groups: list[int]) -> torch.Tensor:
        """Return the rows of some groups, ascending."""
        G = self.num_generations
        return torch.tensor([group * G + j for group in sorted(groups) for j in range(G)])

    def select(self, groups: list[int]) -> "Rollout":
        """Return the rows of some groups for an update.

        The batch stays whole, so `repeat_for_rows` does not apply to the result.
        """
        rows = self.rows_of(groups)
        return replace(
            self,
            prompts=self.prompts.select(rows.tolist()),
            texts=[self.texts[row] for row in rows],
            ids=self.ids[rows],
            logp=self.logp[rows],
            valid=self.valid[rows],
            stopped=self.stopped[rows],
            hidden=self.hidden[rows],
            latents=self.latents and self.latents.select(rows),
        )


@dataclass(frozen=True)
class RewardOutput:
    """Record of a rollout's rewards and of the masks and texts they were computed from."""

    rewards: dict[str, torch.Tensor]  # {component: (N,)}, NaN = could not be obtained
    # N (H, W) bool that were rewarded, for pictures and reward-hacking signals; `targets` itself if
    # no mask is answered
    masks: list[torch.Tensor]
    targets: list[torch.Tensor] = field(default_factory=list)  # N true regions (H, W) bool
    questions: list[str] = field(default_factory=list)  # N texts of the prompts
    replies: list[str] = field(default_factory=list)  # N texts of the teacher, if it was asked
    mask_confidence: list[float] = field(default_factory=list)  # N, of the masks, 0 if empty
    # Where answers have a format: {reason: (N,) bool} of those that could not be parsed for it
    unparsed: dict[str, torch.Tensor] = field(default_factory=dict)
    # {repair: (N,) bool} of those that could be parsed only with it
    repaired: dict[str, torch.Tensor] = field(default_factory=dict)
    # The prompt of each mask (None of an unparsed answer), and the mask without its negative points
    point_prompts: list[PointPrompt | None] = field(default_factory=list)
    masks_without_negatives: list[torch.Tensor] = field(default_factory=list)
    # Further arguments of the user's reward functions, N entries each: see `add_user_rewards`
    columns: dict[str, list[Any]] = field(default_factory=dict)
