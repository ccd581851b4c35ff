"""The model as an RL policy: what trains, how images and prompts become inputs, how completions are scored.

Letters: B images, P prompts (each about one image), N = P*G rows, L prompt length, T completion tokens, C LLM width,
D prompt-embedding width, M [SEG] tokens in all rows.
"""

import contextlib
import logging
import re
import warnings
from bisect import bisect
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from rl_train.engine import logprob
from rl_train.engine.packing import fed
from rl_train.engine.tokens import StopText
from rl_train.policies.sa2va_prompts import PromptBuilder
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Allow-list of what may train, by group. Of the mask decoder only what the mask path reaches: token 0's hypernetwork,
# the IoU head and the object-score head never receive a gradient, nor do the prompt encoder's other embeddings.
TRAINABLE = {
    "lora": r"^language_model\..*\.lora_[AB]\.",
    "mlp1": r"^mlp1\.",
    "text_hidden_fcs": r"^text_hidden_fcs\.",
    "sam2": r"^grounding_encoder\.(mask_decoder\.(?!output_hypernetworks_mlps\.0\.|iou_prediction_head\.|pred_obj_score_head\.)"
    r"|prompt_encoder\.(not_a_point_embed|no_mask_embed)\.)",
}
# Modules kept in float32 under a bf16 base, because they train or stand between trained ones.
FLOAT32_MODULES = (
    "mlp1",
    "text_hidden_fcs",
    "grounding_encoder.mask_decoder",
    "grounding_encoder.prompt_encoder",
    "grounding_encoder.shared_image_embedding",
)


@dataclass
class Images:
    """Features of B images, computed once and shared by all rows, roles and inner iterations; before what trains."""

    vision: torch.Tensor  # (t, tokens, 4 * ViT width), before mlp1
    tiles: list[int]  # tiles of each image
    sam: list[torch.Tensor]  # SAM2 pyramid, before conv_s0 and conv_s1
    sizes: list[tuple[int, int]]  # (H, W) of each image


@dataclass
class Prompts:
    ids: list[list[int]]  # P prompts, ragged
    image: list[int]  # the image each is about
    grids: list[torch.Tensor] | None  # (1, g, g) bool region of each, or None

    def repeat(self, n: int) -> "Prompts":
        return self.select([p for p in range(len(self.ids)) for _ in range(n)])

    def select(self, rows) -> "Prompts":
        return Prompts(
            [self.ids[r] for r in rows],
            [self.image[r] for r in rows],
            None if self.grids is None else [self.grids[r] for r in rows],
        )

    def followed_by(self, answers: list[list[int]]) -> "Prompts":
        """Each with the ids of an answer behind it."""
        return Prompts(
            [ids + answer for ids, answer in zip(self.ids, answers, strict=True)],
            self.image,
            self.grids,
        )

    def distinct(self) -> tuple["Prompts", list[int]]:
        """(the prompts without those that repeat the one before, the index among them of each of these)."""

        def repeats(row):
            return (
                row > 0
                and self.ids[row] == self.ids[row - 1]
                and self.image[row] == self.image[row - 1]
                and (self.grids is None or torch.equal(self.grids[row], self.grids[row - 1]))
            )

        first = [row for row in range(len(self.ids)) if not repeats(row)]
        return self.select(first), [bisect(first, row) - 1 for row in range(len(self.ids))]


@dataclass
class Scores:
    """What one forward says of n rows."""

    logp: torch.Tensor  # (n, T)
    entropy: torch.Tensor  # (n, T), detached
    latent_mean: torch.Tensor  # (M, D) mean of the prompt embedding at each [SEG], row-major


class Policy:
    """Sa2VA with a LoRA, its tokenizer, its prompts, and the dictionary of what trains.

    Args:
        model: `Sa2VAModel`, frozen base; processor: `Sa2VAProcessor`; tokenizer: Sa2VA's.
        lora: `peft.LoraConfig`.
        groups: which of TRAINABLE train.
        temperature: of sampling and scoring alike.
        shards: the `sharding.Shards` that the model was loaded with, if any.
    """

    def __init__(
        self,
        model,
        processor,
        tokenizer,
        lora: LoraConfig,
        groups=tuple(TRAINABLE),
        temperature=1.0,
        gradient_checkpointing=False,
        shards=None,
    ):
        self.model, self.processor, self.tokenizer, self.temperature = (
            model,
            processor,
            tokenizer,
            temperature,
        )
        self.shards = shards
        model.bind_tokenizer(tokenizer)
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        self.stop = StopText(tokenizer, self.prompts.stop_texts, model.config.llm.vocab_size)
        self.pad_id = tokenizer.pad_token_id
        with warnings.catch_warnings():  # peft 0.21 asks by a name that transformers gives up
            warnings.filterwarnings(
                "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
            )
            self.peft = get_peft_model(
                model.language_model, lora
            )  # injects into model.language_model in place
        for name in FLOAT32_MODULES:
            model.get_submodule(name).float()
        self.trainable = self._freeze_all_but(groups)
        model.eval()
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            logprob.prepare_checkpointing(model.language_model)

    @property
    def device(self):
        return self.model.device

    def _freeze_all_but(self, groups) -> dict[str, torch.nn.Parameter]:
        unknown = set(groups) - set(TRAINABLE)
        assert not unknown, f"unknown trainable groups {unknown}"
        pattern = re.compile("|".join(TRAINABLE[g] for g in groups))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(bool(pattern.search(name)))
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        assert all(any(re.search(TRAINABLE[g], n) for n in trainable) for g in groups), (
            "a trainable group is empty"
        )
        return trainable

    def group_of(self, name: str) -> str:
        return next(g for g, pattern in TRAINABLE.items() if re.search(pattern, name))

    def parameter_table(self) -> str:
        """Trainable and total counts by part, for the start of the log."""
        counts = {}
        for name, parameter in self.model.named_parameters():
            part = (
                self.group_of(name) if name in self.trainable else f"{name.split('.')[0]} (frozen)"
            )
            counts[part] = counts.get(part, 0) + parameter.numel()
        trains = sum(p.numel() for p in self.trainable.values())
        rows = [f"  {part:32s} {count:>15,d}" for part, count in sorted(counts.items())]
        return "\n".join(
            [*rows, f"  {'trainable':32s} {trains:>15,d} of {sum(counts.values()):,d}"]
        )

    def autocast(self):
        """bf16 autocast if the frozen base is bf16, so that fp32 trainables compute in bf16 as they would in training."""
        if self.model.language_model.lm_head.weight.dtype != torch.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def join(self):
        """With a sharded base, help other ranks until all are here; called before any other collective (see `sharding`)."""
        if self.shards:
            self.shards.join()

    # Inputs

    @torch.no_grad()
    def encode_images(
        self, pixel_values: list[torch.Tensor], sam_pixels: torch.Tensor, sizes
    ) -> Images:
        """Vision and SAM2 features of B images: pixel_values list of (t, 3, S, S), sam_pixels (B, 3, 1024, 1024) uint8.

        Without autocast, as the original's inference in bfloat16: all of it is frozen in one dtype, and layer norms that go to float32 and
        back cost a sixth of the time for features .43 % off float32's instead of .50 % (H200, demo model).
        """
        vision = self.model.vision_features(torch.cat(pixel_values).to(self.device))
        sam = self.model.sam_features(sam_pixels.to(self.device))
        return Images(vision, [len(p) for p in pixel_values], sam, list(sizes))

    def describe_prompts(
        self, images: Images, image: list[int], grids: list[torch.Tensor]
    ) -> Prompts:
        """Prompts that ask for a caption of region grids[p] (g, g) bool of image[p]."""
        ids = [
            self.prompts.describe(images.tiles[i], int(grid.sum())) for i, grid in zip(image, grids)
        ]
        return Prompts(ids, list(image), [grid[None] for grid in grids])

    def segment_prompts(self, images: Images, image: list[int], captions: list[str]) -> Prompts:
        """Prompts that ask for the mask of captions[p] in image[p]."""
        return Prompts(
            [self.prompts.segment(c, images.tiles[i]) for i, c in zip(image, captions)],
            list(image),
            None,
        )

    def embed(self, images: Images, prompts: Prompts, num_tokens: int = 0):
        """Left-padded embeddings of prompts, with image and region features.

        Args:
            num_tokens: what will follow a prompt; checked against the model's context.

        Returns:
            embeds (P, L, C), attention mask (P, L).
        """
        ids, mask = pad_left(prompts.ids, self.pad_id)
        ids, mask = ids.to(self.device), mask.to(self.device)
        limit = self.model.config.llm.max_position_embeddings
        if ids.shape[1] + num_tokens > limit:
            longest = max(prompts.ids, key=len)
            of_image = longest.count(self.model.img_context_id)
            of_text = len(longest) - of_image
            raise ValueError(
                f"a prompt of {of_image} tokens of image and region and {of_text} of text, with {num_tokens} behind it, does "
                f"not fit the context of {limit}: {'lower --max_tiles' if of_image > of_text else 'its caption is too long'}"
            )
        # Project each image once, then repeat its features for the rows that share it.
        used = sorted(set(prompts.image))
        starts = torch.tensor([0, *images.tiles]).cumsum(0).tolist()
        features = self.model.mlp1(
            torch.cat([images.vision[starts[i] : starts[i + 1]] for i in used])
        )
        features = dict(zip(used, features.split([images.tiles[i] for i in used])))
        flags = None
        if prompts.grids is not None:
            flags = torch.tensor(
                [t + 1 == images.tiles[i] for i in prompts.image for t in range(images.tiles[i])]
            )
        return self.model.embed(
            ids, torch.cat([features[i] for i in prompts.image]), prompts.grids, flags
        ), mask

    def same(self, images: Images, prompts: Prompts) -> list[int]:
        """How many leading tokens each prompt has in common with the one before it: if that is about the same image, up to its end."""

        def end(prompt):
            ids, length = (
                prompts.ids[prompt],
                images.tiles[prompts.image[prompt]] * self.model.config.tokens_per_tile,
            )
            at = ids.index(self.model.img_context_id) + length
            return (
                at
                if prompt
                and prompts.image[prompt] == prompts.image[prompt - 1]
                and ids[:at] == prompts.ids[prompt - 1][:at]
                else 0
            )

        return [end(prompt) for prompt in range(len(prompts.ids))]

    # Scoring

    def score(
        self, images: Images, prompts: Prompts, ids: torch.Tensor, valid: torch.Tensor
    ) -> Scores:
        """Log-probs of completions by a full forward over image, regions, prompt and completion; carries gradient.

        Neighbouring rows of one prompt share its forward. Log-probs and entropies of tokens that are not valid are 0.

        Args:
            prompts: n rows; ids, valid: (n, T) sampled tokens and which of them are the answer, from the first on.
        """
        prompts, prompt = prompts.distinct()
        with self.autocast():
            embeds, mask = self.embed(images, prompts, ids.shape[1])
            answers = logprob.score_answers(
                self.model.language_model,
                embeds,
                mask,
                torch.tensor(prompt, device=self.device),
                ids,
                valid,
                pad_id=self.pad_id,
                temperature=self.temperature,
                gradient_checkpointing=self.gradient_checkpointing,
            )
            latent_mean = self.model.text_hidden_fcs(
                answers.hidden_of(self.seg_tokens(ids, valid))
            )  # (M, D)
        return Scores(answers.logp, answers.entropy, latent_mean.float())

    @torch.no_grad()
    def read(self, images: Images, prompts: Prompts, num_last: int = 1) -> torch.Tensor:
        """(P, num_last, C) hidden states at the end of each prompt. Neighbours about one image share what they begin with."""
        with self.autocast():
            embeds, mask = self.embed(images, prompts)
            return logprob.read(
                self.model.language_model, embeds, mask, self.same(images, prompts), num_last
            )

    @torch.no_grad()
    def mean_logp(self, images: Images, prompts: Prompts, answers: list[list[int]]) -> torch.Tensor:
        """(P,) mean log-prob of the tokens of answers[p] to each prompt: what `score` says, by one forward of `read`."""
        ids, mask = (t.to(self.device) for t in pad_left(answers, self.pad_id))  # (P, T)
        valid = mask.bool()
        hidden = self.read(images, prompts.followed_by(answers), ids.shape[1] + 1)[
            :, :-1
        ]  # before each token
        logp = logprob.frozen_logps(
            self.model.language_model, hidden[valid], ids[valid], self.temperature
        )
        return torch.zeros_like(ids, dtype=torch.float32).masked_scatter(valid, logp).sum(
            1
        ) / valid.sum(1)

    def seg_tokens(self, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """(n, T) bool: [SEG] tokens that were fed back as input.

        A [SEG] that is the very last token of a row has no hidden state of its own and is dropped, as in the original.
        """
        return fed(valid) & (ids == self.model.seg_id)

    def decode_masks(self, images: Images, image: list[int], prompts: torch.Tensor) -> torch.Tensor:
        """(M, 256, 256) float32 mask logits of prompt embeddings (M, D) in the images image[m]."""
        with self.autocast():
            return self.model.decode_masks(
                images.sam, torch.tensor(image, device=self.device, dtype=torch.long), prompts
            )


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, L) ids and attention mask of ragged rows, padded on the left to the longest."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def trainable_groups(args) -> tuple[str, ...]:
    """The groups that some term of this run's loss can reach; the others are not handed to the optimizer."""
    groups = ["lora", "mlp1"]
    loop2 = "caption_mask_caption" in args.tasks and args.caption_to_mask_weight > 0
    if loop2 and (args.mask_sigma != 0 or args.mask_loss_coef > 0):
        groups.append("text_hidden_fcs")
    if loop2 and args.mask_loss_coef > 0:
        groups.append("sam2")
    return tuple(groups)


def load_tokenizer(path):
    """The tokenizer in folder `path`, padding on the left. Raises ValueError if there is none or it has no pad token."""
    # transformers reads config.json too, does not know sa2va_chat and says so; the tokenizer does not depend on it.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--model_path {path}: no tokenizer could be loaded: {reason}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"--model_path {path}: the tokenizer has no pad token")
    return tokenizer


def check_context(config, args):
    """Raise ValueError, naming the flags, if a prompt of the most tiles and the largest region leaves no room for an answer."""
    tiles = args.max_tiles + (args.max_tiles > 1)  # and the thumbnail
    longest = (
        (tiles + 1) * config.tokens_per_tile + args.max_completion_length
    )  # the largest region has a tile's tokens
    if longest > config.llm.max_position_embeddings:
        raise ValueError(
            f"--max_tiles {args.max_tiles} with --max_completion_length {args.max_completion_length}: {longest} tokens and "
            f"the text do not fit the model's context of {config.llm.max_position_embeddings}"
        )


def build_policy(args, device, shards=None) -> Policy:
    """Policy of a run: base weights from --model_path in --dtype, a fresh LoRA, the groups that the loss can reach.

    Args:
        shards: `sharding.Shards` if the base is to be shared out over the ranks.
    """
    dtype = getattr(torch, args.dtype)
    check_context(Sa2VAConfig.from_pretrained(args.model_path), args)
    model = Sa2VAModel.blank(args.model_path, dtype)
    if shards:
        shards.split(model)
    model.load_weights(args.model_path, shards.fill if shards else torch.Tensor.copy_)
    return make_policy(args, model.to(device), load_tokenizer(args.model_path), shards)


def make_policy(args, model, tokenizer, shards=None) -> Policy:
    """Policy of a run over the base weights of `model`."""
    lora = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        bias="none",
        target_modules=LORA_TARGETS,
        task_type="CAUSAL_LM",
    )
    return Policy(
        model,
        Sa2VAProcessor(model.config, args.max_tiles),
        tokenizer,
        lora,
        trainable_groups(args),
        args.temperature,
        args.gradient_checkpointing,
        shards,
    )
