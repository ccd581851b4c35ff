"""Qwen2.5-VL as a policy whose answers are boxes and points, of which SAM2 makes masks.

What trains is a LoRA on the language model alone. So the features of an image are made once, and
serve all rows, tasks and roles.

Letters: B images, P prompts, G samples each, N = P*G rows, n scored rows, L prompt length, T
tokens, C LLM width.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from rl_train.config import PolicyConfig
from rl_train.engine import Answers, Completions, Engine, StopText
from rl_train.finite import Watch
from rl_train.policies import lora, sam_points
from rl_train.policies.qwen_inputs import QUESTION, QwenInputs, patches, prompt_positions
from rl_train.policies.qwen_loading import (
    PointModel,
    Seen,
    TextModel,
    image_sizes,
    load_qwen,
    load_sam,
)
from rl_train.types import Batch, Rollout
from sa2va_hf.batches import Prompts, pad_left
from sa2va_hf.loading import stored_dtype
from sa2va_hf.tokenizer import load_tokenizer
from sa2va_hf.transfer import send

TRAINABLE = {"lora": r"^vlm\.model\.language_model\..*\.lora_[AB]\."}
# By where they are: the vision encoder's MLP has linears of the same names.
LINEARS = rf".*language_model\..*\.({'|'.join(lora.PROJECTIONS)})"
# The chat template, around an image and behind it a question.
BEFORE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
BEFORE += "<|vision_start|>"
BETWEEN, BEHIND = "<|vision_end|>", "<|im_end|>\n<|im_start|>assistant\n"
ENDS = ["<|im_end|>", "<|endoftext|>"]


@dataclass
class PointImages:
    """Features of B images, nothing behind which but the language model's LoRA trains."""

    vision: list[torch.Tensor]  # (tokens, C) of each
    grids: list[tuple[int, int]]  # (rows, columns) of its tokens
    seen_sizes: list[tuple[int, int]]  # (H', W') as Qwen2.5-VL sees it
    sam: list[torch.Tensor]  # `sam_points.sam_features`
    sizes: list[tuple[int, int]]  # (H, W) of the original


class QwenPointsPolicy:
    """Qwen2.5-VL with a LoRA, its tokenizer and prompts, and a SAM2 beside it.

    Args:
        seen: how images reach the model; config: its LoRA, temperature (of sampling and scoring
            alike) and checkpointing are used.
    """

    family = "qwen2_5_vl"
    encoders_train = False
    shards = None

    def __init__(self, model: PointModel, tokenizer, seen: Seen, config: PolicyConfig):
        self.model, self.tokenizer, self.seen = model, tokenizer, seen
        vlm = model.vlm
        self.stop = StopText(tokenizer, ENDS, vlm.config.text_config.vocab_size)
        self.pad_id, self.image_token = tokenizer.pad_token_id, vlm.config.image_token_id
        self.head, self.middle, self.tail = map(self.encode_text, (BEFORE, BETWEEN, BEHIND))
        size = (config.lora_r, config.lora_alpha, config.lora_dropout)
        self.peft = lora.attach_lora(vlm, *size, targets=LINEARS)
        self.trainable = lora.freeze_all_but(model, TRAINABLE)
        self.groups = lora.group_of_each(self.trainable, TRAINABLE)
        model.eval()
        self.watch = Watch()
        self.engine = Engine(
            TextModel(vlm.model.language_model, vlm.lm_head),
            pad_id=self.pad_id,
            temperature=config.temperature,
            gradient_checkpointing=config.gradient_checkpointing,
        )

    @property
    def device(self) -> torch.device:
        return self.model.vlm.lm_head.weight.device

    @property
    def context(self) -> int:
        """Tokens that the language model takes."""
        return self.model.vlm.config.text_config.max_position_embeddings

    def group_of(self, name: str) -> str:
        return self.groups[name]

    def autocast(self):
        return lora.autocast(self.model.vlm.lm_head.weight.dtype, self.device)

    def picture(self, batch: Batch, sample: int) -> Image.Image:
        return Image.fromarray(batch.inputs.sam_pixels[sample].permute(1, 2, 0).numpy())

    def save_merged(self, folder, dtype: torch.dtype | None = None):
        """Write Qwen2.5-VL with the LoRA merged in, in `dtype` or that of its own folder.

        As transformers loads and publishes it, without SAM2. The policy is then of no use.
        """
        self.engine.release()  # weights that it has taken over cannot be merged and saved
        vlm = self.peft.merge_and_unload()
        vlm.to(dtype or stored_dtype(Path(vlm.name_or_path))).save_pretrained(folder)

    def inputs(self, max_new_tokens: int, max_caption_length: int | None = None) -> QwenInputs:
        """What prepares and collates samples; refuses those that leave no room for an answer."""
        sam_size = self.model.sam.prompt_encoder.input_image_size
        limits = (self.context, max_new_tokens, max_caption_length)
        return QwenInputs(self.seen.sizes, sam_size, self.tokenizer, *limits)

    def encode_text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def encode(self, batch: Batch) -> PointImages:
        """Features of a batch's images, for Qwen2.5-VL and for SAM2."""
        pixels, seen = batch.inputs.pixels, self.seen
        how = (seen.sizes, seen.mean, seen.std, seen.frames)
        values = torch.cat([patches(one.to(self.device), *how) for one in pixels])
        seen_sizes = [tuple(one.shape[1:]) for one in pixels]
        grids = torch.tensor([[1, h, w] for h, w in seen_sizes]) // torch.tensor(
            [1, seen.sizes.patch, seen.sizes.patch]
        )
        found = self.model.vlm.get_image_features(values, grids.to(self.device))
        sam = sam_points.sam_features(self.model.sam, batch.inputs.sam_pixels.to(self.device))
        unit = seen.sizes.factor
        tokens = [(h // unit, w // unit) for h, w in seen_sizes]
        return PointImages(list(found.pooler_output), tokens, seen_sizes, sam, batch.sizes)

    def point_prompts(self, images: PointImages, image: list[int], questions: list[str]) -> Prompts:
        """Prompts of questions[p], which are all that the user says, behind image[p]."""
        ids = []
        for i, question in zip(image, questions, strict=True):
            rows, columns = images.grids[i]
            seen = [self.image_token] * (rows * columns)
            asked = self.encode_text(question)
            ids.append([*self.head, *seen, *self.middle, *asked, *self.tail])
        return Prompts(ids, list(image), None)

    def embed(self, images: PointImages, prompts: Prompts, num_tokens: int = 0):
        """(embeds (P, L, C), attention mask (P, L), positions (3, P, L)), padded on the left.

        Embeddings on the policy's device, the others on the CPU.

        Raises:
            ValueError: a prompt and `num_tokens` behind it exceed the model's context.
        """
        ids, mask = pad_left(prompts.ids, self.pad_id)
        if ids.shape[1] + num_tokens > self.context:
            raise ValueError(
                f"a prompt of {ids.shape[1]} tokens, {num_tokens} behind it, does not fit the "
                f"context of {self.context}: lower --image_side or --max_image_tokens"
            )
        grids = [images.grids[i] for i in prompts.image]
        placed = prompt_positions(prompts.ids, grids, self.image_token)
        slots = (ids == self.image_token).flatten().nonzero()[:, 0]
        ids, slots = (send(t, self.device) for t in (ids, slots))
        embeds = self.model.vlm.get_input_embeddings()(ids)
        vision = torch.cat([images.vision[i] for i in prompts.image]).to(embeds.dtype)
        embeds = embeds.flatten(0, 1).index_copy(0, slots, vision).view(embeds.shape)
        return embeds, mask, placed

    @torch.no_grad()
    def complete(
        self, images: PointImages, prompts: Prompts, num_generations, max_new_tokens, uniforms=None
    ) -> tuple[Completions, list[str]]:
        """(G completions of each prompt, their N texts), by uniforms (N, T) or else greedily."""
        with self.autocast():
            embeds, mask, placed = self.embed(images, prompts, max_new_tokens)
            sizes = dict(num_generations=num_generations, max_new_tokens=max_new_tokens)
            how = dict(stop=self.stop, uniforms=uniforms, position_ids=placed)
            completions = self.engine.generate(embeds, mask, **sizes, **how)
        self.watch("log-probs of sampled answers", completions.logp)
        rows = zip(completions.ids, completions.valid)
        return completions, [self.completion_text(ids[valid].tolist()) for ids, valid in rows]

    def completion_text(self, ids: list[int]) -> str:
        """Decoded completion, cut where it ends."""
        text = self.tokenizer.decode(ids)
        for end in ENDS:
            text = text.split(end, 1)[0]
        return text.strip()

    def sample(
        self, batch, features: PointImages, prompts, num_generations, max_new_tokens, uniforms=None
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
        self, images: PointImages, prompts: Prompts, ids, valid, entropy_gradient=False
    ) -> Answers:
        """As `score`, of tokens ids (n, T), of which valid (n, T) are the answers, to n prompts."""
        prompts, prompt = prompts.distinct()
        with self.autocast():
            embeds, mask, placed = self.embed(images, prompts, ids.shape[1])
            inputs = (embeds, mask, torch.tensor(prompt), ids, valid, placed)
            return self.engine.score(*inputs, entropy_gradient)

    def point_masks(
        self, images: PointImages, image: list[int], answers, passes: int = 1, confidence=None
    ):
        """((H, W) bool mask of answers[k] in image[k], the same without its negative points).

        Of `points.answers.Answer` in pixels of the original images: see `sam_points.point_masks`.
        """
        of_images = (images.sam, images.sizes)
        asked = (image, answers, passes, confidence)
        return sam_points.point_masks(self.model.sam, *of_images, *asked)


def build_policy(config: PolicyConfig, max_new_tokens: int, device) -> QwenPointsPolicy:
    """The policy of the two folders that `config` names, with a fresh LoRA.

    Raises:
        ValueError: a folder is not such a model, or an image leaves no room for an answer; names
            the flag.
    """
    path, dtype = config.model_path, getattr(torch, config.dtype)
    if config.sam_path is None:
        raise ValueError(
            f"--model_path {path}: Qwen2.5-VL draws no mask, give a SAM2 as --sam_path"
        )
    seen, tokenizer = image_sizes(path, config), load_tokenizer(path)
    vlm = load_qwen(path, dtype)
    known = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    if known != vlm.config.image_token_id:
        raise ValueError(
            f"--model_path {path}: <|image_pad|> is token {known} of its tokenizer and "
            f"{vlm.config.image_token_id} of its config.json"
        )
    model = PointModel(vlm, load_sam(config.sam_path, dtype)).to(device)
    policy = QwenPointsPolicy(model, tokenizer, seen, config)
    if policy.inputs(max_new_tokens).longest_phrase < 1:
        raise ValueError(
            f"--max_completion_length {max_new_tokens}: with {seen.sizes.max_tokens} tokens of an "
            f"image and {QUESTION} of a question it does not fit the model's context of "
            f"{policy.context}"
        )
    return policy
