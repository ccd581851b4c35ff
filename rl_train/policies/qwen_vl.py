"""Qwen2.5-VL or Qwen3-VL as a policy that answers boxes and points, for which SAM2 draws masks.

Only a LoRA on the language model trains. So an image is encoded once for all rows, tasks and roles.

Letters: B images, P prompts, G samples each, N = P*G rows, n scored rows, L prompt length, T
tokens, C LLM width.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rl_train.config.grpo_config import PolicyConfig
from rl_train.engine import Completions, Engine, StopText
from rl_train.engine.quantize import quantize_linears
from rl_train.points.parser import STYLE_SCALES, AnswerFormat, PointPrompt
from rl_train.points.prompts import point_question
from rl_train.policies import lora, sam2_prompting
from rl_train.policies.base import SAM2_CITATION, ModelSpec, Policy
from rl_train.policies.qwen_vl_inputs import QUESTION_TOKENS, QwenPreprocessor
from rl_train.policies.qwen_vl_model import (
    VERSIONS,
    PointModel,
    Version,
    check_sam,
    image_preprocessing,
    load_qwen,
    load_sam,
    save_qwen,
    version_of,
)
from rl_train.rollout import Batch
from rl_train.utils.nan_check import NanWatcher
from sa2va_hf.batches import Prompts, pad_left
from sa2va_hf.loading import stored_dtype
from sa2va_hf.qwen_images import ImagePreprocessing, patches
from sa2va_hf.qwen_vl import image_features, text_model
from sa2va_hf.to_device import to_device
from sa2va_hf.tokenizer import load_tokenizer

TRAINABLE = {"lora": r"^vlm\.model\.language_model\..*\.lora_[AB]\."}
# Matched by path, because the vision encoder's MLP has linears of the same names.
LINEARS = rf".*language_model\..*\.({'|'.join(lora.PROJECTIONS)})"
# The chat template: the system prompt if any, CHAT_START, the image, AFTER_IMAGE, the question,
# AFTER_QUESTION.
SYSTEM_START, SYSTEM_END = "<|im_start|>system\n", "<|im_end|>\n"
CHAT_START = "<|im_start|>user\n<|vision_start|>"
AFTER_IMAGE, AFTER_QUESTION = "<|vision_end|>", "<|im_end|>\n<|im_start|>assistant\n"
STOP_TEXTS = ["<|im_end|>", "<|endoftext|>"]
QWEN_VL_CITATIONS = """@article{bai2025qwen25vl,
  title = {{Qwen2.5-VL} Technical Report},
  author = {Bai, Shuai and others},
  journal = {arXiv preprint arXiv:2502.13923},
  year = {2025}
}
@article{qwen2025qwen3vl,
  title = {{Qwen3-VL} Technical Report},
  author = {Bai, Shuai and others},
  journal = {arXiv preprint arXiv:2511.21631},
  year = {2025}
}
"""


@dataclass
class QwenImageFeatures:
    """Frozen features of B images."""

    # (tokens, W) of each: W = C, or C + K * C with features that follow the first K layers
    vision: list[torch.Tensor]
    grids: list[tuple[int, int]]  # (rows, columns) of its tokens
    seen_sizes: list[tuple[int, int]]  # (H', W') of the resized image
    sam: list[torch.Tensor]  # `sam2_prompting.sam_features`
    sizes: list[tuple[int, int]]  # (H, W) of the original


class QwenVLPolicy(Policy):
    """Qwen-VL with a LoRA, its tokenizer and prompts, and a SAM2 beside it.

    Args:
        preprocessing: sizes and normalisation of images.
        config: LoRA, temperature (of sampling and scoring alike) and checkpointing are used.
    """

    family = "qwen_vl"

    def __init__(
        self,
        model: PointModel,
        tokenizer: PreTrainedTokenizerBase,
        preprocessing: ImagePreprocessing,
        config: PolicyConfig,
    ):
        self.model, self.tokenizer, self.preprocessing = model, tokenizer, preprocessing
        vlm, version = model.vlm, VERSIONS[model.vlm.config.model_type]
        self.coordinates = version.coordinates
        self.context = vlm.config.text_config.max_position_embeddings  # tokens
        # An answer ends where the chat template's turn does.
        self.stop = StopText(tokenizer, STOP_TEXTS, vlm.config.text_config.vocab_size)
        self.base_dtype = vlm.lm_head.weight.dtype
        self.pad_id, self.image_token = tokenizer.pad_token_id, vlm.config.image_token_id
        self.chat_start = self.encode_text(chat_start(version))
        self.after_image = self.encode_text(AFTER_IMAGE)
        self.after_question = self.encode_text(AFTER_QUESTION)
        self.peft = lora.attach_lora(vlm, config.lora_r, config.lora_alpha, targets=LINEARS)
        self.trainable, self.group_of = lora.freeze_all_but(model, TRAINABLE)
        model.eval()
        self.nan_watcher = NanWatcher()
        self.engine = Engine(
            text_model(vlm),
            pad_id=self.pad_id,
            temperature=config.temperature,
            gradient_checkpointing=config.gradient_checkpointing,
        )

    def save_merged(self, folder: Path, dtype: torch.dtype | None = None):
        """Write Qwen-VL's weights with the LoRA merged in, in `dtype` or that of its own folder.

        The folder holds no SAM2. The policy is used up.
        """
        self.engine.release()  # the engine's fused weights cannot be merged and saved
        vlm = self.peft.merge_and_unload()
        base = Path(vlm.name_or_path)
        save_qwen(vlm, base, folder, dtype or stored_dtype(base))

    def preprocessor(
        self, max_new_tokens: int, max_prompt_length: int | None = None
    ) -> QwenPreprocessor:
        """Return the object that checks, prepares and collates samples in the loader's workers."""
        return QwenPreprocessor(
            preprocessing=self.preprocessing,
            sam_size=self.model.sam.prompt_encoder.input_image_size,
            tokenizer=self.tokenizer,
            context=self.context,
            max_new_tokens=max_new_tokens,
            max_prompt_length=max_prompt_length,
        )

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, in which special tokens are encoded as such."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def encode(self, batch: Batch) -> QwenImageFeatures:
        """Return Qwen-VL's and SAM2's features of a batch's images."""
        pixels, preprocessing = batch.inputs.pixels, self.preprocessing
        values = torch.cat([patches(image.to(self.device), preprocessing) for image in pixels])
        seen_sizes = [tuple(image.shape[1:]) for image in pixels]
        p, unit = preprocessing.patch, preprocessing.factor
        patch_grids = torch.tensor([(1, h // p, w // p) for h, w in seen_sizes])
        # All images in one call: (patches of all, ..) -> (tokens, C) of each.
        vision = image_features(self.model.vlm, values, patch_grids.to(self.device))
        sam = sam2_prompting.sam_features(self.model.sam, batch.inputs.sam_pixels.to(self.device))
        grids = [(h // unit, w // unit) for h, w in seen_sizes]
        split = list(vision.split([rows * columns for rows, columns in grids]))
        return QwenImageFeatures(split, grids, seen_sizes, sam, batch.sizes)

    def point_questions(
        self, features: QwenImageFeatures, image_index: list[int], questions: list[str]
    ) -> Prompts:
        """Return prompts that show image image_index[p] and then ask questions[p]."""
        ids = []
        for i, question in zip(image_index, questions, strict=True):
            rows, columns = features.grids[i]
            image_ids = [self.image_token] * (rows * columns)
            question_ids = self.encode_text(question)
            ids.append(
                [
                    *self.chat_start,
                    *image_ids,
                    *self.after_image,
                    *question_ids,
                    *self.after_question,
                ]
            )
        return Prompts(ids, list(image_index), None)

    def embed(
        self, features: QwenImageFeatures, prompts: Prompts, num_tokens: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (embeds (P, L, W), attention mask (P, L), positions (3, P, L)), left-padded.

        Embeddings are on the policy's device, the others on the CPU. See `QwenImageFeatures` for W.

        Raises:
            ValueError: a prompt and `num_tokens` behind it exceed the model's context.
        """
        ids, mask = pad_left(prompts.ids, self.pad_id)
        if ids.shape[1] + num_tokens > self.context:
            raise ValueError(
                f"a prompt of {ids.shape[1]} tokens, {num_tokens} behind it, does not fit the "
                f"context of {self.context}: lower --image_size or --max_image_tokens"
            )
        merge, is_image = self.preprocessing.merge, ids == self.image_token
        grids = [features.grids[i] for i in prompts.image_index]
        grids = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in grids])
        # Positions on three axes (time, height, width), as the model was trained: (3, P, L).
        positions, _ = self.model.vlm.model.get_rope_index(
            ids, is_image.int(), image_grid_thw=grids, attention_mask=mask
        )
        # Found on the CPU, so that nothing waits for the GPU.
        slots = is_image.flatten().nonzero()[:, 0]
        ids, slots = (to_device(t, self.device) for t in (ids, slots))
        embeds = self.engine.language_model.get_input_embeddings()(ids)
        vision = torch.cat([features.vision[i] for i in prompts.image_index]).to(embeds.dtype)
        embeds = embeds.flatten(0, 1).index_copy(0, slots, vision).view(embeds.shape)  # (P, L, C)
        return embeds, mask, positions

    @torch.no_grad()
    def complete(
        self,
        features: QwenImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[Completions, list[str]]:
        with self.autocast():
            embeds, mask, positions = self.embed(features, prompts, max_new_tokens)
            completions = self.engine.generate(
                embeds,
                mask,
                num_generations=num_generations,
                max_new_tokens=max_new_tokens,
                stop=self.stop,
                uniforms=uniforms,
                position_ids=positions,
            )
        self.nan_watcher("log-probs of sampled answers", completions.logp)
        rows = zip(completions.ids, completions.valid)
        return completions, [self.completion_text(ids[valid].tolist()) for ids, valid in rows]

    def completion_text(self, ids: list[int]) -> str:
        """Return the decoded completion up to its first stop text."""
        text = self.tokenizer.decode(ids)
        return re.split("|".join(map(re.escape, STOP_TEXTS)), text, maxsplit=1)[0].strip()

    def point_masks(
        self,
        features: QwenImageFeatures,
        image_index: list[int],
        prompts: list[PointPrompt],
        passes: int = 1,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[float, float]]]:
        """Return masks of prompts[k], in pixels of the image image_index[k], at its own size.

        See `sam2_prompting.point_masks`.
        """
        return sam2_prompting.point_masks(
            self.model.sam, features.sam, features.sizes, image_index, prompts, passes
        )

    def best_masks(
        self, features: QwenImageFeatures, image_index: list[int], groups: list[list[PointPrompt]]
    ) -> list[torch.Tensor]:
        """Return the unions of groups[k]'s masks, the best of three each, in image image_index[k].

        See `sam2_prompting.best_masks`.
        """
        return sam2_prompting.best_masks(
            self.model.sam, features.sam, features.sizes, image_index, groups
        )


def chat_start(version: Version) -> str:
    """Return the text of a conversation before its image."""
    system = version.system_prompt
    return f"{SYSTEM_START}{system}{SYSTEM_END}{CHAT_START}" if system else CHAT_START


def check_folders(config: PolicyConfig):
    """Raise ValueError if no SAM2 is given, or another model as one."""
    if config.sam_path is None:
        raise ValueError(
            f"--model_path {config.model_path}: {version_of(config.model_path).title} draws no "
            "mask, give a SAM2 as --sam_path"
        )
    check_sam(config.sam_path)


def build_policy(
    config: PolicyConfig,
    groups: Iterable[str],
    max_new_tokens: int,
    device: torch.device,
) -> QwenVLPolicy:
    """Build the policy of the two folders that `config` names, with a fresh LoRA.

    Raises:
        ValueError: a folder is not such a model, or an image leaves no room for an answer; names
            the flag.
    """
    path, dtype = config.model_path, getattr(torch, config.dtype)
    preprocessing = image_preprocessing(path, config)
    model = PointModel(load_qwen(path, dtype), load_sam(config.sam_path, dtype))
    if config.quantize_base:
        quantize_linears(text_model(model.vlm).model.layers, config.quantize_base, device)
    model.to(device)
    policy = QwenVLPolicy(model, load_tokenizer(path), preprocessing, config)
    if policy.preprocessor(max_new_tokens).max_phrase_tokens < 1:
        raise ValueError(
            f"--max_completion_length {max_new_tokens}: with {preprocessing.max_tokens} tokens of "
            f"an image and {QUESTION_TOKENS} of a question it does not fit the model's context of "
            f"{policy.context}"
        )
    return policy


def example_question(flags: dict[str, object], base: Path) -> str:
    """Return the question for a dog, in the style of a run with these flags on a base."""
    style = flags["answer_style"]
    answer_format = AnswerFormat(
        style,
        flags["negative_points"],
        flags["coordinates"] or STYLE_SCALES.get(style, version_of(base).coordinates),
        flags["max_points"],
    )
    return point_question("the dog", answer_format)


QWEN_VL = ModelSpec(
    name=QwenVLPolicy.family,
    model_types=tuple(VERSIONS),
    check=check_folders,
    build=build_policy,
    rl_patterns=TRAINABLE,
    group_patterns=TRAINABLE,
    gradient_via={},
    citation=QWEN_VL_CITATIONS + SAM2_CITATION,
    card_loading="""With transformers 4.49 or later (Qwen3-VL: 4.57):
```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="bfloat16", device_map="cuda")
processor = AutoProcessor.from_pretrained(FOLDER)
question = '''QUESTION'''
```
It answers with boxes or points; SAM2, which predicts their mask, is not in this folder. With this
package both are one model: `python -m tools.evaluate --model_path FOLDER --sam_path SAM2 ..`""",
    library="transformers",
    example_question=example_question,
)
