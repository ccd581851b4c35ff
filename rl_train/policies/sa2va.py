"""Sa2VA as a policy: what trains, what it is given, how its answers are sampled and scored.

Letters: B images, P prompts, G samples each, N = P*G rows, M [SEG] in them, L prompt length, T
tokens, C LLM width, D prompt-embedding width.
"""

import contextlib
from functools import partial

import torch
from PIL import Image
from torch.utils.checkpoint import checkpoint

from rl_train.config import PolicyConfig
from rl_train.data.text import phrase
from rl_train.engine import Answers, Completions, Engine, StopText
from rl_train.engine.packing import fed
from rl_train.finite import Watch
from rl_train.policies import lora
from rl_train.policies.sa2va_inputs import Sa2VAInputs
from rl_train.types import Batch, Rollout
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, batches
from sa2va_hf.batches import Images, Prompts, pad_left, shared_prefix_lengths
from sa2va_hf.loading import stored_dtype
from sa2va_hf.prediction import MASKS_AT_ONCE
from sa2va_hf.processing_sa2va import normalise_sam_pixels, normalise_tiles
from sa2va_hf.prompts import SEGMENT, PromptBuilder
from sa2va_hf.tokenizer import load_tokenizer
from sa2va_hf.transfer import send

# What may train, by group. Of the mask decoder only what the mask path reaches: token 0's
# hypernetwork, the heads of IoU and object score, and other embeddings receive no gradient.
TRAINABLE = {
    "lora": r"^language_model\..*\.lora_[AB]\.",
    "mlp1": r"^mlp1\.",
    "text_hidden_fcs": r"^text_hidden_fcs\.",
    "sam2": r"^grounding_encoder\.(mask_decoder\.(?!output_hypernetworks_mlps\.0\.|"
    r"iou_prediction_head\.|pred_obj_score_head\.)"
    r"|prompt_encoder\.(not_a_point_embed|no_mask_embed)\.)",
}
# And in supervised training. The hypernetworks alone leave which object a mask lies on.
GROUPS = TRAINABLE | {
    "hypernetworks": r"^grounding_encoder\.mask_decoder\.output_hypernetworks_mlps\.[123]\.",
    "embeddings": r"^language_model\.(.*\.)?(embed_tokens|lm_head)\.",
    "language_model": r"^language_model\.model\.(layers|norm)\.",
    "vision": r"^vision_model\.",
    "sam2_encoder": r"^grounding_encoder\.(vision_encoder\.|no_memory_embedding$)",
}
# The group in TRAINABLE by which a task names the way that also leads to one of the others.
BESIDE = dict(embeddings="lora", language_model="lora", vision="mlp1", sam2_encoder="sam2")
ENCODERS = {"vision", "sam2_encoder"}  # before which nothing can be computed once for many steps
SHARED = {"vision", "language_model"}  # what --shard_base cuts (see `sharding`)
# Modules kept in float32 under a bf16 base, because they train or stand between trained ones.
SAM2_MODULES = ("mask_decoder", "prompt_encoder", "shared_image_embedding")
FLOAT32_MODULES = ["mlp1", "text_hidden_fcs", *(f"grounding_encoder.{m}" for m in SAM2_MODULES)]


class Sa2VAPolicy:
    """Sa2VA with a LoRA, its tokenizer, its prompts, and the dictionary of what trains.

    Args:
        model: `Sa2VAModel`, frozen base; config: its LoRA, temperature (of sampling and scoring
            alike), checkpointing and masks of an answer are used; groups: which of GROUPS train.
        shards: `sharding.Shards` if the model is shared out over the ranks.

    Raises:
        ValueError: a group is none, or "language_model" is to train with and without a LoRA.
    """

    family = "sa2va"

    def __init__(
        self,
        model,
        processor,
        tokenizer,
        config: PolicyConfig,
        groups=tuple(TRAINABLE),
        shards=None,
    ):
        if odd := set(groups) - set(GROUPS):
            raise ValueError(f"--train {' '.join(odd)}: unknown; known: {', '.join(GROUPS)}")
        if {"lora", "language_model"} <= set(groups):
            raise ValueError("--train lora language_model: one of them, not both")
        self.model, self.processor, self.tokenizer = model, processor, tokenizer
        self.shards = shards
        model.bind_tokenizer(tokenizer)
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        self.stop = StopText(tokenizer, self.prompts.stop_texts, model.config.llm.vocab_size)
        self.pad_id, self.max_masks = tokenizer.pad_token_id, config.max_masks_per_answer
        self.base_dtype, patterns = model.dtype, {group: GROUPS[group] for group in groups}
        self.encoders_train = bool(ENCODERS & set(groups))
        self.peft = None
        if "lora" in groups:
            size = (config.lora_r, config.lora_alpha, config.lora_dropout)
            self.peft = lora.attach_lora(model.language_model, *size)
        for name in FLOAT32_MODULES:
            model.get_submodule(name).float()
        self.trainable = lora.freeze_all_but(model, patterns)
        self.groups = lora.group_of_each(self.trainable, patterns)
        model.eval()
        self.watch = Watch()
        self.rounded_normalisation = False  # of SAM2's pixels: see `normalise_sam_pixels`
        self.engine = Engine(
            model.language_model,
            pad_id=self.pad_id,
            temperature=config.temperature,
            gradient_checkpointing=config.gradient_checkpointing,
            lender=shards,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    def group_of(self, name: str) -> str:
        return self.groups[name]

    def autocast(self):
        return lora.autocast(self.base_dtype, self.device)

    def picture(self, batch: Batch, sample: int) -> Image.Image:
        return Image.fromarray(batch.inputs.sam_pixels[sample].permute(1, 2, 0).numpy())

    def save_merged(self, folder, dtype: torch.dtype | None = None):
        """Write the model with the LoRA merged in, in `dtype` or that of its own folder.

        The policy is then of no use.
        """
        self.engine.release()  # weights that it has taken over cannot be merged and saved
        if self.peft:
            self.peft.merge_and_unload()
        self.model.save_pretrained(folder, dtype or stored_dtype(self.model.folder))

    def inputs(self, max_new_tokens: int, max_caption_length: int | None = None) -> Sa2VAInputs:
        """What prepares and collates samples; refuses those that leave no room for an answer."""
        context = self.model.config.llm.max_position_embeddings
        limits = (context, max_new_tokens, max_caption_length)
        return Sa2VAInputs(self.processor, self.prompts, *limits)

    def encode(self, batch: Batch) -> Images:
        """Vision and SAM2 features of a batch's images; with gradient where an encoder trains.

        Frozen ones without autocast, as in the original's inference: in one dtype (and a sixth
        faster).
        """
        tiles, pixels = batch.inputs.tiles, batch.inputs.sam_pixels
        image = list(range(len(tiles)))
        if batch.regions_per_image > 1:
            image = first_of_equal(pixels)
        own = sorted(set(image))
        train = self.encoders_train  # else without: a forward with gradient waits for no other rank
        precision = self.autocast() if train else contextlib.nullcontext()
        with torch.set_grad_enabled(train and torch.is_grad_enabled()), precision:
            seen, shown = (
                send(t, self.device) for t in (torch.cat([tiles[i] for i in own]), pixels[own])
            )
            vision = self.model.vision_features(normalise_tiles(seen))
            shown = normalise_sam_pixels(shown, self.rounded_normalisation)
            sam = self.model.sam_features(shown)
        if len(own) < len(image):
            place = [own.index(i) for i in image]
            parts = vision.split([len(tiles[i]) for i in own])
            vision = torch.cat([parts[k] for k in place])
            at = send(torch.tensor(place), self.device)
            sam = [level[at] for level in sam]
        return Images(vision, [len(t) for t in tiles], sam, batch.sizes, batch.inputs.grids)

    def describe_prompts(self, images: Images, image: list[int], grids) -> Prompts:
        """Prompts that ask for a caption of region grids[p] (g, g) bool of image[p]."""
        asked = [(images.tiles[i], int(grid.sum())) for i, grid in zip(image, grids)]
        ids = [self.prompts.describe(num_tiles, num_cells) for num_tiles, num_cells in asked]
        return Prompts(ids, list(image), [grid[None] for grid in grids])

    def segment_prompts(
        self, images: Images, image: list[int], captions: list[str], wordings=None
    ) -> Prompts:
        """Prompts that ask for the mask of captions[p] in image[p], in wordings[p] or the usual."""
        wordings = wordings or [SEGMENT] * len(captions)
        asked = zip(image, captions, wordings, strict=True)
        ids = [self.prompts.segment(phrase(c), images.tiles[i], wording) for i, c, wording in asked]
        return Prompts(ids, list(image), None)

    def embed(self, images: Images, prompts: Prompts, num_tokens: int = 0):
        """(embeds (P, L, C), attention mask (P, L)) of prompts: see `sa2va_hf.batches.embed`."""
        return batches.embed(self.model, images, prompts, self.pad_id, num_tokens)

    @torch.no_grad()
    def complete(
        self, images: Images, prompts: Prompts, num_generations, max_new_tokens, uniforms=None
    ) -> tuple[Completions, list[str]]:
        """(G completions of each prompt, their N texts), by uniforms (N, T) or else greedily."""
        with self.autocast():
            embeds, attention = self.embed(images, prompts)
            shared = shared_prefix_lengths(self.model, images, prompts)
            sizes = dict(num_generations=num_generations, max_new_tokens=max_new_tokens)
            how = dict(stop=self.stop, uniforms=uniforms, shared_prefix_lengths=shared)
            completions = self.engine.generate(embeds, attention, **sizes, **how)
        self.watch("log-probs of sampled answers", completions.logp)
        rows = zip(completions.ids.tolist(), completions.valid.sum(1).tolist())
        return completions, [self.prompts.completion_text(ids[:length]) for ids, length in rows]

    def sample(
        self, batch, features: Images, prompts, num_generations, max_new_tokens, uniforms=None
    ) -> Rollout:
        done, texts = self.complete(features, prompts, num_generations, max_new_tokens, uniforms)
        rows = prompts.repeat(num_generations)
        return Rollout(batch, features, rows, texts, num_generations, **vars(done))

    def score(self, rollout: Rollout, rows: slice = slice(None), entropy_gradient=False) -> Answers:
        """As the protocol says; neighbouring rows of one prompt share its forward."""
        prompts = rollout.prompts.select(range(len(rollout))[rows])
        answers = rollout.ids[rows], rollout.valid[rows]
        return self.score_answers(rollout.features, prompts, *answers, entropy_gradient)

    def score_answers(
        self, images: Images, prompts: Prompts, ids, valid, entropy_gradient=False
    ) -> Answers:
        """As `score`, of tokens ids (n, T), of which valid (n, T) are the answers, to n prompts."""
        prompts, prompt = prompts.distinct()
        with self.autocast():
            embeds, mask = self.embed(images, prompts, ids.shape[1])
            inputs = (embeds, mask, torch.tensor(prompt), ids, valid)
            return self.engine.score(*inputs, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def read(self, images: Images, prompts: Prompts, num_last: int = 1) -> torch.Tensor:
        """(P, num_last, C) hidden states at each prompt's end; those of one image share work."""
        with self.autocast():
            embeds, mask = self.embed(images, prompts)
            shared = shared_prefix_lengths(self.model, images, prompts)
            return self.engine.read(embeds, mask, num_last=num_last, shared_prefix_lengths=shared)

    @torch.no_grad()
    def mean_logp(self, images: Images, prompts: Prompts, answers: list[list[int]]) -> torch.Tensor:
        """(P,) mean log-prob of the tokens of answers[p], by one forward of `read`."""
        ids, mask = pad_left(answers, self.pad_id)  # (P, T)
        at = mask.flatten().nonzero()[:, 0]
        said, at = ids.flatten()[at], send(at, self.device)
        before = self.read(images, prompts.followed_by(answers), ids.shape[1] + 1)[:, :-1]
        logp = self.engine.logps(before.flatten(0, 1)[at], said)
        self.watch("log-probs of given answers", logp)
        sums = logp.new_zeros(ids.numel()).index_copy(0, at, logp).view(ids.shape).sum(1)
        return sums / send(mask.sum(1), self.device)

    def seg_tokens(self, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """(n, T) bool: the [SEG] that are decoded, the first `max_masks` of each row.

        On the CPU, as ids and valid (n, T) are.
        """
        seg = self.said_seg(ids, valid)
        return seg & (seg.cumsum(1) <= self.max_masks)

    def capped(self, completed: Rollout | Completions) -> torch.Tensor:
        """(N,) bool: rows that say more [SEG] than are decoded."""
        return self.said_seg(completed.ids, completed.valid).sum(1) > self.max_masks

    def said_seg(self, ids, valid):
        """(n, T) bool: [SEG] tokens but a row's very last, which has no hidden state (original)."""
        return fed(valid) & (ids == self.model.seg_id)

    @torch.no_grad()
    def mask_embeddings(self, completed: Rollout | Completions):
        """(row of each [SEG] (M,), on the CPU; prompt embeddings (M, D) float32) as sampled."""
        seg = self.seg_tokens(completed.ids, completed.valid).nonzero()  # (M, 2)
        row, column = send(seg, self.device).unbind(1)
        with self.autocast():
            embeddings = self.model.text_hidden_fcs(completed.hidden[row, column])
        return seg[:, 0], embeddings.float()

    def scored_mask_embeddings(self, scores: Answers, ids, valid) -> torch.Tensor:
        """(M, D) float32 prompt embeddings of the [SEG] in scored rows (n, T); with gradient."""
        hidden = scores.hidden_of(self.seg_tokens(ids, valid))
        with self.autocast():
            return self.model.text_hidden_fcs(hidden).float()

    def decode_masks(self, images: Images, image: list[int], embeddings) -> torch.Tensor:
        """(M, 256, 256) float32 mask logits of prompt embeddings (M, D) in the images image[m].

        See `by_chunks`.
        """
        at = send(torch.tensor(image, dtype=torch.long), self.device)

        def decode(some):
            with self.autocast():
                return self.model.decode_masks(images.sam, at[some], embeddings[some])

        return self.watch("mask logits", by_chunks(decode, len(image)))


def first_of_equal(images: torch.Tensor) -> list[int]:
    """For each of (B, ..) images the first of those that are equal to it and follow each other."""
    first = [0]
    for i in range(1, len(images)):
        first.append(first[-1] if torch.equal(images[i], images[i - 1]) else i)
    return first


def by_chunks(compute, num_masks: int) -> torch.Tensor:
    """compute(slice) (m, ..) of all masks, decoded MASKS_AT_ONCE at a time, below each other.

    An answer may hold hundreds of [SEG], each of which costs the decoder some 60 MB, with gradient
    100. Of several chunks each is computed again in the backward, where it is held alone.
    """
    if num_masks <= MASKS_AT_ONCE:
        return compute(slice(None))
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    starts = range(0, num_masks, MASKS_AT_ONCE)
    return torch.cat([compute(slice(start, start + MASKS_AT_ONCE)) for start in starts])


def build_policy(config: PolicyConfig, groups, max_new_tokens: int, device, shards=None):
    """The policy that `config` names: its base, a fresh LoRA, and the groups that the loss reaches.

    Args:
        shards: `sharding.Shards` if the base is to be shared out over the ranks.

    Raises:
        ValueError: the longest prompt leaves no room for an answer, or what is to train is shared
            out; names the flags.
    """
    published, tiles = Sa2VAConfig.from_pretrained(config.model_path), config.max_tiles
    context = published.llm.max_position_embeddings
    of_image = tiles + (tiles > 1) + 1  # in tiles: with the thumbnail and the largest region
    longest = of_image * published.tokens_per_tile + max_new_tokens
    if longest > context:
        raise ValueError(
            f"--max_tiles {tiles} with --max_completion_length {max_new_tokens}: {longest} tokens "
            f"and the text do not fit the model's context of {context}"
        )
    if shards and (shared := SHARED & set(groups)):
        raise ValueError(
            f"--shard_base: not with --train {' '.join(sorted(shared))}, of which each process "
            "would keep but a part"
        )
    dtype = getattr(torch, config.dtype)
    load = shards.load if shards else Sa2VAModel.from_pretrained
    model = load(config.model_path, dtype=dtype, device=device)
    processor = Sa2VAProcessor(model.config, config.max_tiles)
    return Sa2VAPolicy(model, processor, load_tokenizer(config.model_path), config, groups, shards)
