"""Sa2VA as a policy: its trainable weights, prompts, answers and masks.

Letters: B images, P prompts, G samples each, N = P*G rows, M [SEG] in them, L prompt length, T
tokens, C LLM width, D prompt-embedding width.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase

from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.text import phrase
from rl_train.distributed.fsdp import ShardedLayers, host_mesh
from rl_train.engine import Completions, DelayedCompletions, Engine, ScoreOutput, StopText
from rl_train.engine.packing import input_mask
from rl_train.engine.quantize import quantize_linears
from rl_train.policies import lora
from rl_train.policies.base import SAM2_CITATION, ModelSpec, Policy
from rl_train.policies.sa2va_inputs import Sa2VAPreprocessor
from rl_train.rollout import Batch, Rollout
from rl_train.utils.io import read_json
from rl_train.utils.nan_check import NanWatcher
from sa2va_hf import Sa2VAModel, Sa2VAProcessor, batches
from sa2va_hf.batches import ImageFeatures, Prompts, pad_left, shared_prefix_lengths
from sa2va_hf.families import MODEL_TYPE, describe, family_of
from sa2va_hf.loading import stored_dtype
from sa2va_hf.prediction import MASKS_AT_ONCE
from sa2va_hf.processing_sa2va import normalise_sam_pixels
from sa2va_hf.prompts import SEGMENT, PromptBuilder
from sa2va_hf.qwen_images import draw_region, region_box
from sa2va_hf.qwen_vl import REGION_GRID, QwenVLModel
from sa2va_hf.to_device import to_device
from sa2va_hf.tokenizer import load_tokenizer

# Logits of masks that are decoded together with gradient: 16 masks of 256 x 256.
PIXELS_WITH_GRADIENT = 16 * 256**2

# Weights that may train, by group. The mask path does not reach all of the mask decoder: token 0's
# hypernetwork, the heads of IoU and object score and other embeddings receive no gradient.
# InternVL's and Qwen-VL's names of the same parts differ.
LLM, VISION = r"language_model|model\.model\.language_model", r"vision_model|model\.model\.visual"
TRAINABLE = {
    "lora": rf"^({LLM})\..*\.lora_[AB]\.",
    "mlp1": r"^mlp1\.",
    "text_hidden_fcs": r"^text_hidden_fcs\.",
    "sam2": r"^grounding_encoder\.(mask_decoder\.(?!output_hypernetworks_mlps\.0\.|"
    r"iou_prediction_head\.|pred_obj_score_head\.)"
    r"|prompt_encoder\.(not_a_point_embed|no_mask_embed)\.)",
}
# Weights that may train in supervised training. Training the hypernetworks alone reshapes masks,
# but leaves on which object they lie.
GROUPS = TRAINABLE | {
    "hypernetworks": r"^grounding_encoder\.mask_decoder\.output_hypernetworks_mlps\.[123]\.",
    "embeddings": r"^(language_model|model)\.(.*\.)?(embed_tokens|lm_head)\.",
    "language_model": r"^(language_model\.model|model\.model\.language_model)\.(layers|norm)\.",
    "vision": rf"^({VISION})\.",
    # SAM3's fourth level is not used.
    "sam2_encoder": r"^grounding_encoder\.(vision_encoder\.(?!neck\.fpn_layers\.3\.)"
    r"|no_memory_embedding$)",
}
LINEARS = rf".*language_model\..*\.({'|'.join(lora.PROJECTIONS)})"  # of a Qwen-VL's text decoder
ENCODERS = {"vision", "sam2_encoder"}  # groups that train through `encode`
DRAWN = ("outline", "box")  # region prompts that are drawn on the image
# Modules kept in float32 under a bf16 base, because they train or stand between trained ones.
FLOAT32_MODULES = [
    "mlp1",
    "text_hidden_fcs",
    "grounding_encoder.mask_decoder",
    "grounding_encoder.prompt_encoder",
    "grounding_encoder.shared_image_embedding",
]
SA2VA_CITATION = """@article{yuan2025sa2va,
  title = {{Sa2VA}: Marrying {SAM2} with {LLaVA} for Dense Grounded Understanding of Images and
           Videos},
  author = {Yuan, Haobo and Li, Xiangtai and Zhang, Tao and Huang, Zilong and Xu, Shilin and
            Ji, Shunping and Tong, Yunhai and Qi, Lu and Feng, Jiashi and Yang, Ming-Hsuan},
  journal = {arXiv preprint arXiv:2501.04001},
  year = {2025}
}
@article{chen2024internvl25,
  title = {Expanding Performance Boundaries of Open-Source Multimodal Models with Model, Data, and
           Test-Time Scaling},
  author = {Chen, Zhe and others},
  journal = {arXiv preprint arXiv:2412.05271},
  year = {2024}
}
@article{qwen2024qwen25,
  title = {{Qwen2.5} Technical Report},
  author = {Yang, An and others},
  journal = {arXiv preprint arXiv:2412.15115},
  year = {2024}
}
"""


class Sa2VAPolicy(Policy):
    """Sa2VA with a LoRA, its tokenizer, its prompts and its trainable weights.

    Args:
        model: `Sa2VAModel`, frozen base; config: its LoRA, temperature (of sampling and scoring
            alike), checkpointing and masks of an answer are used; groups: which of GROUPS train.

    Raises:
        ValueError: "language_model" is to train with and without a LoRA.
    """

    family = "sa2va"

    def __init__(
        self,
        model: Sa2VAModel,
        processor: Sa2VAProcessor,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
        groups: Iterable[str] = tuple(TRAINABLE),
    ):
        if {"lora", "language_model"} <= set(groups):
            raise ValueError("--trainable_modules lora language_model: one of them, not both")
        self.model, self.processor, self.tokenizer = model, processor, tokenizer
        is_qwen_vl = isinstance(model, QwenVLModel)
        if is_qwen_vl:  # its projector is frozen, as in the supervised training
            groups = [group for group in groups if group != "mlp1"]
        model.bind_tokenizer(tokenizer)
        way_in_training = model.config.raw.get("region_prompt", model.region_prompts[0])
        self.region_prompt = config.region_prompt or way_in_training
        if self.region_prompt != "tokens":
            processor.grid_size = REGION_GRID  # cells as fine as a line, not as the LLM's tokens
        self.prompts = PromptBuilder(
            tokenizer,
            model.config.template,
            model.config.tokens_per_tile,
            model.image_strings,
            self.region_prompt,
        )
        # The original's inference ends an answer at these texts, not at EOS alone.
        self.stop = StopText(tokenizer, self.prompts.stop_texts, model.config.llm.vocab_size)
        self.pad_id, self.max_masks = tokenizer.pad_token_id, config.max_masks_per_answer
        self.base_dtype, patterns = model.dtype, {group: GROUPS[group] for group in groups}
        self.encoders_train = bool(ENCODERS & set(groups))
        self.peft = None
        if "lora" in groups:
            module, targets = model.language_model, lora.PROJECTIONS
            if is_qwen_vl:  # by path: the vision encoder's MLP has linears of the same names
                module, targets = model.model, LINEARS
            self.peft = lora.attach_lora(module, config.lora_r, config.lora_alpha, targets=targets)
        for name in FLOAT32_MODULES:
            if name != "mlp1" or not is_qwen_vl:
                model.get_submodule(name).float()
        self.trainable, self.group_of = lora.freeze_all_but(model, patterns)
        model.eval()
        self.nan_watcher = NanWatcher()
        self.rounded_normalisation = False  # of SAM2's pixels: see `normalise_sam_pixels`
        language_model = model.language_model
        self.engine = Engine(
            language_model,
            head_norm=language_model.head_norm if is_qwen_vl else None,
            pad_id=self.pad_id,
            temperature=config.temperature,
            gradient_checkpointing=config.gradient_checkpointing,
        )

    def shard_base(self):
        """Keep this rank's shard of the frozen layers from now on (--fsdp). A collective.

        Raises:
            ValueError: regions are drawn on images, which are then encoded anew for each prompt.
        """
        if self.region_prompt in DRAWN:
            raise ValueError(
                f"--fsdp: not with --region_prompt {self.region_prompt}, by which ranks encode "
                "images at times of their own: give --region_prompt tokens, or leave --fsdp out"
            )
        mesh, vision = host_mesh(self.device), self.model.vision_model
        self.engine.shard(mesh)
        self.sharded_vision = ShardedLayers(vision, vision.encoder.layer, mesh)
        torch.cuda.empty_cache()  # the whole layers' memory: pieces that fit nothing else

    def save_merged(self, folder: Path, dtype: torch.dtype | None = None):
        """Write the model with the LoRA merged in, in `dtype` or that of its own folder.

        The policy is used up.
        """
        self.engine.release()  # the engine's fused weights cannot be merged and saved
        if self.peft:
            self.peft.merge_and_unload()
        self.model.save_pretrained(folder, dtype or stored_dtype(self.model.folder))

    def summary(self) -> str:
        """Return what the model is, in one line."""
        return describe(self.model, self.region_prompt)

    def follow_original_inference(self):
        """Prepare images as the original's inference does, where its training differs.

        SAM2's mean and std are rounded; a Qwen-VL's images are resized twice. Prompts stay those of
        the supervised training.
        """
        self.rounded_normalisation = True
        self.processor.resize_twice = True

    def preprocessor(
        self, max_new_tokens: int, max_prompt_length: int | None = None
    ) -> Sa2VAPreprocessor:
        """Return the object that checks, prepares and collates samples in the loader's workers."""
        return Sa2VAPreprocessor(
            processor=self.processor,
            prompts=self.prompts,
            context=self.model.config.llm.max_position_embeddings,
            max_new_tokens=max_new_tokens,
            max_prompt_length=max_prompt_length,
        )

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return vision and SAM2 features of a batch's images, with gradient if an encoder trains.

        Frozen encoders run without autocast, as in the original's inference: in one dtype, and a
        sixth faster.
        """
        train, inputs = self.encoders_train, batch.inputs
        precision = self.autocast() if train else contextlib.nullcontext()
        with torch.set_grad_enabled(train and torch.is_grad_enabled()), precision:
            pixels = to_device(inputs.sam_pixels, self.device)
            # (t, tokens, 4 * ViT width), and a list of (B, 256, h, w) from SAM2.
            vision, tiles, grids = self.model.encode_images(inputs.tiles)
            pixels = normalise_sam_pixels(pixels, self.rounded_normalisation)
            sam = self.model.sam_features(pixels)
        draws = self.region_prompt in DRAWN
        return ImageFeatures(
            vision,
            tiles,
            sam,
            batch.sizes,
            inputs.prompt_masks,
            grids=grids,
            pixels=None if self.region_prompt == "tokens" else inputs.tiles,
            draw=partial(draw_region, shape=self.region_prompt) if draws else None,
        )

    def describe_prompts(
        self,
        features: ImageFeatures,
        image_index: Sequence[int],
        prompt_masks: Sequence[torch.Tensor],
    ) -> Prompts:
        """Return prompts that ask for a caption of prompt_masks[p] (g, g) bool.

        The region is in the image's tokens, drawn on the image, or named by its box.
        """
        pairs, masks = zip(image_index, prompt_masks), [mask[None] for mask in prompt_masks]
        if self.region_prompt == "tokens":
            ids = [self.prompts.describe(features.tiles[i], int(grid.sum())) for i, grid in pairs]
        elif self.region_prompt == "coordinates":
            boxes = [(features.tiles[i], self._box(features, i, grid)) for i, grid in pairs]
            ids, masks = [self.prompts.describe_drawn(*box) for box in boxes], None
        else:
            ids = [self.prompts.describe_drawn(features.tiles[i]) for i in image_index]
        return Prompts(ids, list(image_index), masks)

    def _box(self, features: ImageFeatures, i: int, grid: torch.Tensor) -> str:
        """Return the box of a region's cells (g, g) as the base model writes boxes."""
        height, width = (1000, 1000) if self.model.relative_boxes else features.pixels[i].shape[-2:]
        left, top, right, bottom = region_box(grid)
        corners = [left * width, top * height, right * width, bottom * height]
        return self.model.box_text.format(*map(round, corners))

    def segment_prompts(
        self,
        features: ImageFeatures,
        image_index: Sequence[int],
        captions: list[str],
        wordings: list[str] | None = None,
    ) -> Prompts:
        """Return prompts that ask for the mask of captions[p] in image image_index[p].

        Args:
            wordings: question of each, with {x} for the phrase; None: SEGMENT.
        """
        wordings = wordings or [SEGMENT] * len(captions)
        rows = zip(image_index, captions, wordings, strict=True)
        ids = [
            self.prompts.segment(phrase(c), features.tiles[i], wording) for i, c, wording in rows
        ]
        return Prompts(ids, list(image_index), None)

    def question_prompts(
        self,
        features: ImageFeatures,
        image_index: Sequence[int],
        questions: Sequence[str],
        prompt_masks: Sequence[torch.Tensor] | None = None,
    ) -> Prompts:
        """Return prompts that ask questions[p] about image image_index[p].

        Args:
            prompt_masks: (g, g) bool cells of the region that each question is about; None: of the
                whole image.

        Raises:
            ValueError: this model is shown regions in another way than by their tokens.
        """
        if prompt_masks is None:
            pairs = zip(image_index, questions, strict=True)
            ids = [self.prompts.ids(question, features.tiles[i]) for i, question in pairs]
            return Prompts(ids, list(image_index), None)
        if self.region_prompt != "tokens":
            raise ValueError(
                f"--region_prompt {self.region_prompt}: a question about a region needs tokens"
            )
        rows = zip(image_index, questions, prompt_masks, strict=True)
        ids = [
            self.prompts.ids(question, features.tiles[i], [int(grid.sum())])
            for i, question, grid in rows
        ]
        return Prompts(ids, list(image_index), [grid[None] for grid in prompt_masks])

    def embed(
        self, features: ImageFeatures, prompts: Prompts, num_tokens: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (embeds (P, L, C), mask (P, L), positions): see `sa2va_hf.batches.embed`."""
        return batches.embed(self.model, features, prompts, self.pad_id, num_tokens)

    @torch.no_grad()
    def complete(
        self,
        features: ImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[Completions, list[str]]:
        completions = self.generate(features, prompts, num_generations, max_new_tokens, uniforms)
        return completions, self.texts_of(completions)

    @torch.no_grad()
    def complete_later(
        self, features: ImageFeatures, prompts: Prompts, max_new_tokens: int
    ) -> Callable[[], list[str]]:
        """Return a function that returns the greedy text of each prompt, by the weights in use now.

        On a GPU they are sampled together with the next `complete`: see `Engine.generate`.
        """
        delayed = self.generate(features, prompts, 1, max_new_tokens, delay=True)
        return lambda: self.texts_of(delayed.read())

    def generate(
        self,
        features: ImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
        delay: bool = False,
    ) -> Completions | DelayedCompletions:
        """Sample by `Engine.generate`; neighbouring prompts share what they begin with."""
        with self.autocast():
            embeds, mask, positions = self.embed(features, prompts)
            return self.engine.generate(
                embeds,
                mask,
                num_generations=num_generations,
                max_new_tokens=max_new_tokens,
                stop=self.stop,
                uniforms=uniforms,
                position_ids=positions,
                shared_prefix_lengths=shared_prefix_lengths(self.model, features, prompts),
                delay=delay,
            )

    def texts_of(self, completions: Completions) -> list[str]:
        """Return the N texts, cut at the stop text; watch their log-probs for NaN."""
        self.nan_watcher("log-probs of sampled answers", completions.logp)
        rows = zip(completions.ids.tolist(), completions.valid.sum(1).tolist())
        return [self.prompts.completion_text(ids[:length]) for ids, length in rows]

    @torch.no_grad()
    def last_hidden_states(
        self, features: ImageFeatures, prompts: Prompts, num_last: int = 1
    ) -> torch.Tensor:
        """Return the last hidden states (P, num_last, C) of prompts.

        Neighbouring prompts about one image share its computation.
        """
        with self.autocast():
            embeds, mask, positions = self.embed(features, prompts)
            return self.engine.last_hidden_states(
                embeds,
                mask,
                num_last=num_last,
                position_ids=positions,
                shared_prefix_lengths=shared_prefix_lengths(self.model, features, prompts),
            )

    @torch.no_grad()
    def mean_logp(
        self, features: ImageFeatures, prompts: Prompts, answers: list[list[int]]
    ) -> torch.Tensor:
        """Return the mean log-prob (P,) of the tokens of answers[p], by one forward."""
        ids, mask = pad_left(answers, self.pad_id)  # (P, T)
        # Padding is left out before lm_head: (m,) tokens of all answers.
        slots = mask.flatten().nonzero()[:, 0]
        targets, slots = ids.flatten()[slots], to_device(slots, self.device)
        # The state before each answer token predicts it, so the last state is not used: (P, T, C).
        hidden = self.last_hidden_states(features, prompts.followed_by(answers), ids.shape[1] + 1)[
            :, :-1
        ]
        logp = self.engine.logps(hidden.flatten(0, 1)[slots], targets)
        self.nan_watcher("log-probs of given answers", logp)
        sums = logp.new_zeros(ids.numel()).index_copy(0, slots, logp).view(ids.shape).sum(1)
        return sums / to_device(mask.sum(1), self.device)

    def seg_tokens(self, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return (n, T) bool: the [SEG] tokens to decode, at most the first `max_masks` of a row.

        A row's very last token has no hidden state, as in the original. Tensors are on the CPU.
        """
        seg = input_mask(valid) & (ids == self.model.seg_id)  # (n, T)
        return seg & (seg.cumsum(1) <= self.max_masks)

    def too_many_masks(self, completed: Rollout | Completions) -> torch.Tensor:
        """Return (N,) bool: rows with more [SEG] tokens than `max_masks`."""
        seg = input_mask(completed.valid) & (completed.ids == self.model.seg_id)
        return seg.sum(1) > self.max_masks

    @torch.no_grad()
    def mask_embeddings(
        self, completed: Rollout | Completions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (row of each sampled [SEG] (M,) on the CPU, prompt embeddings (M, D) float32)."""
        seg = self.seg_tokens(completed.ids, completed.valid).nonzero()  # (M, 2)
        row, column = to_device(seg, self.device).unbind(1)
        with self.autocast():
            # States that sampling left behind: the LLM is not run again.
            embeddings = self.model.text_hidden_fcs(completed.hidden[row, column])
        return seg[:, 0], embeddings.float()

    def scored_mask_embeddings(
        self, scores: ScoreOutput, ids: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Return prompt embeddings (M, D) float32 of [SEG] in scored rows, with gradient."""
        hidden = scores.hidden_of(self.seg_tokens(ids, valid))
        with self.autocast():
            return self.model.text_hidden_fcs(hidden).float()

    def decode_masks(
        self, features: ImageFeatures, image_index: Sequence[int], embeddings: torch.Tensor
    ) -> torch.Tensor:
        """Return mask logits (M, 256, 256) float32 of prompt embeddings (M, D), m in its image.

        Computed in chunks: see `by_chunks`.
        """
        index = to_device(torch.tensor(image_index, dtype=torch.long), self.device)

        def decode(rows: slice) -> torch.Tensor:
            with self.autocast():
                return self.model.decode_masks(features.sam, index[rows], embeddings[rows])

        return self.nan_watcher("mask logits", by_chunks(decode, len(image_index), features))


def by_chunks(
    compute: Callable[[slice], torch.Tensor], num_masks: int, features: ImageFeatures
) -> torch.Tensor:
    """Concatenate compute(slice) (m, ..) over chunks of masks: see `masks_at_once`.

    The last chunk's activations are kept, since the backward begins with it. It computes the others
    again, one at a time.
    """
    at_once = masks_at_once(features)
    if num_masks <= at_once:
        return compute(slice(None))
    *chunks, last = [slice(start, start + at_once) for start in range(0, num_masks, at_once)]
    compute_first = compute
    if torch.is_grad_enabled():
        # The mask decoder uses no random numbers, so no random state is kept.
        compute_first = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([*map(compute_first, chunks), compute(last)])


def masks_at_once(features: ImageFeatures) -> int:
    """Return how many masks are decoded together.

    An answer may hold hundreds of [SEG]. Each costs the decoder some 60 MB, with gradient 100, if
    its logits are 256 x 256; and then gradients of all weights are in memory beside it.
    """
    if not torch.is_grad_enabled():
        return MASKS_AT_ONCE
    height, width = features.sam[0].shape[-2:]  # of the logits
    return min(MASKS_AT_ONCE, max(1, PIXELS_WITH_GRADIENT // (height * width)))


def check_folders(config: PolicyConfig):
    """Raise ValueError if the folder is no Sa2VA, or for flags of another family."""
    if config.sam_path:
        raise ValueError(f"--sam_path {config.sam_path}: the model in --model_path has its own")
    try:
        family = family_of(read_json(Path(config.model_path) / "config.json"))
    except ValueError as error:
        raise ValueError(f"--model_path {config.model_path}: {error}") from error
    name, ways = family.name, family.model.region_prompts
    if config.region_prompt not in (None, *ways):
        raise ValueError(
            f"--region_prompt {config.region_prompt}: a Sa2VA of {name} is asked about regions by "
            f"{' or '.join(ways)}"
        )
    if config.region_prompt in DRAWN and config.max_tiles != 1:
        raise ValueError(
            f"--region_prompt {config.region_prompt}: a region is drawn on one tile, not on those "
            f"of --max_tiles {config.max_tiles}"
        )
    if config.fsdp and name != "InternVL":
        raise ValueError(f"--fsdp: shards a Sa2VA of InternVL, and this is of {name}: leave it out")
    if config.max_tiles != 1 and name != "InternVL":
        raise ValueError(f"--max_tiles {config.max_tiles}: the image of a {name} has no tiles")


def absent_groups(folder: str) -> set[str]:
    """Return {"mlp1"} for a Sa2VA of Qwen-VL, whose projector is in the vision encoder."""
    return set() if has_tiles(folder) else {"mlp1"}


def has_tiles(folder: str | Path) -> bool:
    """Return whether the Sa2VA in a folder cuts images into tiles: that of InternVL does."""
    raw = read_json(Path(folder) / "config.json")
    return raw.get("model_type", MODEL_TYPE) == MODEL_TYPE and family_of(raw).name == "InternVL"


def build_policy(
    config: PolicyConfig,
    groups: Iterable[str],
    max_new_tokens: int,
    device: torch.device,
) -> Sa2VAPolicy:
    """Build the policy that `config` names: its base, a fresh LoRA and the groups that train.

    Raises:
        ValueError: the longest prompt leaves no room for an answer.
    """
    dtype, quantized = getattr(torch, config.dtype), config.quantize_base
    if quantized and "language_model" in (groups := list(groups)):
        raise ValueError(
            f"--trainable_modules language_model: its weights cannot train in "
            f"--quantize_base {quantized}; train lora, or leave --quantize_base out"
        )
    model = Sa2VAModel.from_pretrained(
        config.model_path,
        dtype=dtype,
        # A base that is quantised never lies on the device as a whole.
        device="cpu" if quantized else device,
    )
    if quantized:
        quantize_linears(model.language_model.model.layers, quantized, device)
        model.to(device)
    tiles = {} if isinstance(model, QwenVLModel) else dict(max_tiles=config.max_tiles)
    processor = Sa2VAProcessor(model.config, **tiles)
    policy = Sa2VAPolicy(model, processor, load_tokenizer(config.model_path), config, groups)
    num_tiles = processor.max_pieces + 1  # with a region
    longest = num_tiles * model.config.tokens_per_tile + max_new_tokens
    context = model.config.llm.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"--max_tiles {config.max_tiles} with --max_completion_length {max_new_tokens}: "
            f"{longest} tokens and the text do not fit the model's context of {context}"
        )
    return policy


SA2VA = ModelSpec(
    name=Sa2VAPolicy.family,
    model_types=("sa2va_chat",),
    check=check_folders,
    build=build_policy,
    rl_patterns=TRAINABLE,
    group_patterns=GROUPS,
    gradient_via=dict(embeddings="lora", language_model="lora", vision="mlp1", sam2_encoder="sam2"),
    citation=SA2VA_CITATION + SAM2_CITATION,
    card_loading="""With this package (`pip install` its repository):
```python
from PIL import Image
from sa2va_hf import Sa2VAModel

model = Sa2VAModel.from_pretrained(FOLDER, dtype="bfloat16", device_map="cuda")
model.require_tokenizer()
image = Image.open("photo.jpg").convert("RGB")
answer = model.predict_forward(image=image, text="<image>\\nQUESTION")
print(answer["prediction"], answer["prediction_masks"])
```
Without it, by the original's own code: copy the `*.py` files of the original Sa2VA's repository
into FOLDER, if they are not there, then
```python
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True, torch_dtype="auto").cuda().eval()
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
answer = model.predict_forward(image=image, text="<image>\\nQUESTION", tokenizer=tokenizer)
```
A Sa2VA of Qwen-VL needs `processor=AutoProcessor.from_pretrained(FOLDER)` in that call too.""",
    library="rl-sa2va",
    example_question=lambda flags, base: SEGMENT.replace("{x}", "the dog"),
    absent_groups=absent_groups,
)
