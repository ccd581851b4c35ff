"""Sa2VA: InternVL vision encoder, projector, LLM, and SAM2 behind a `[SEG]` token.

Composed of transformers' own modules; this file joins them: image and region tokens go into the
LLM's embeddings, the hidden state at `[SEG]` prompts SAM2's mask decoder. Files have the layout of
the original checkpoints.

Letters: B sequences, L their length, V vocabulary, C LLM width, t tiles, P prompts, n regions.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import InternVLVisionModel, Qwen2ForCausalLM, Sam2VideoModel
from transformers.initialization import no_init_weights

from . import checkpoint_keys, loading, weights
from .configuration_sa2va import Sa2VAConfig
from .hub import model_folder
from .mask_decoder import decode_candidates, decoder_features
from .prediction import MAX_NEW_TOKENS, generate, predict_forward
from .processing_sa2va import normalise_sam_pixels
from .templates import IMG_CONTEXT_TOKEN, token_ids
from .to_device import to_device
from .tokenizer import load_tokenizer
from .visual_tokens import context_features, pixel_shuffle
from .weights import LM_HEAD, default_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sa2VAModel(nn.Module):
    """Sa2VA of native modules; `mlp1` projects image tokens, `grounding_encoder` is SAM2.

    The `<IMG_CONTEXT>` and `[SEG]` ids come from a tokenizer: `bind_tokenizer`, else the one in the
    folder that the model was loaded from. `img_context_id` and `seg_id` may also be set by hand,
    under the original's names too (`img_context_token_id`, `seg_token_idx`).
    """

    def __init__(self, config: Sa2VAConfig):
        super().__init__()
        self.config = config
        # Pixel shuffle joins 2 x 2 patches, so a token is four times as wide as a patch.
        vit = config.vision.hidden_size * int(1 / config.downsample_ratio) ** 2
        width = config.llm.hidden_size
        self.vision_model = InternVLVisionModel(config.vision)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(vit), nn.Linear(vit, width), nn.GELU(), nn.Linear(width, width)
        )
        self.language_model = Qwen2ForCausalLM(config.llm)
        if config.tied:
            self.language_model.lm_head.weight = self.language_model.model.embed_tokens.weight
        self.grounding_encoder = Sam2VideoModel(config.sam2)
        # One Gaussian matrix in the original, held by two native modules.
        self.grounding_encoder.prompt_encoder.shared_embedding = (
            self.grounding_encoder.shared_image_embedding
        )
        self.text_hidden_fcs = nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, config.prompt_size),
            nn.Dropout(0.0),
        )
        self.img_context_id = self.seg_id = self.tokenizer = self.folder = None
        self.max_new_tokens = MAX_NEW_TOKENS  # of predict_forward
        # The one of two tied tensors that files leave out.
        self.unwritten = LM_HEAD if config.tied else None
        self.eval()

    @property
    def img_context_token_id(self) -> int | None:
        return self.img_context_id

    @img_context_token_id.setter
    def img_context_token_id(self, token_id: int):
        self.img_context_id = token_id

    @property
    def seg_token_idx(self) -> int | None:
        return self.seg_id

    @seg_token_idx.setter
    def seg_token_idx(self, token_id: int):
        self.seg_id = token_id

    @property
    def device(self) -> torch.device:
        return self.mlp1[1].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.get_input_embeddings()

    def bind_tokenizer(self, tokenizer: "PreTrainedTokenizerBase"):
        """Take the ids of `<IMG_CONTEXT>` and `[SEG]` from a tokenizer, and keep it.

        Raises:
            ValueError: a token of Sa2VA's is not a single one there, or lies beyond the vocabulary.
        """
        ids = token_ids(tokenizer, self.config.llm.vocab_size)
        self.img_context_id, self.seg_id = ids[IMG_CONTEXT_TOKEN], ids["[SEG]"]
        self.tokenizer = tokenizer

    def require_tokenizer(self):
        """Bind the tokenizer of the model's folder if no ids are set; without one, ValueError."""
        if self.img_context_id is not None:
            return
        if self.folder is None or not (self.folder / "tokenizer_config.json").is_file():
            raise ValueError(
                f"the id of {IMG_CONTEXT_TOKEN} is not known: call bind_tokenizer with Sa2VA's "
                "tokenizer first"
            )
        self.bind_tokenizer(load_tokenizer(self.folder))

    # Vision and language

    def vision_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return features (t, tokens, 4 * ViT width) of tiles, after pixel shuffle, before `mlp1`.

        Args:
            pixel_values: (t, 3, S, S), normalised. Tokens are row-major.
        """
        dtype = self.vision_model.embeddings.cls_token.dtype
        # Patch tokens (t, 1024, ViT width) for 448 px; the class token is dropped.
        x = self.vision_model(pixel_values.to(dtype)).last_hidden_state[:, 1:]
        return pixel_shuffle(x)

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return image tokens (t, 256, C) for the LLM of normalised tiles (t, 3, 448, 448)."""
        return self.mlp1(self.vision_features(pixel_values))

    def embed(
        self,
        input_ids: torch.Tensor,
        image_features: torch.Tensor,
        prompt_masks: list[torch.Tensor] | None = None,
        vp_overall_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return token embeddings (B, L, C), with image and region features at `<IMG_CONTEXT>`.

        Args:
            input_ids: (B, L). If they, and prompt_masks, are on the CPU, nothing waits for the GPU.
            image_features: (t, tokens, C), all tiles of all samples in batch order, or None for
                text alone.
            prompt_masks: list over the flagged tiles of (n, 16, 16) bool regions.
            vp_overall_mask: (t,) bool, the tile of each sample (its last) that regions refer to.

        Raises:
            ValueError: the number of `<IMG_CONTEXT>` ids differs from the number of features (the
                original prints a line and then computes without any image, or repeats features);
                no tokenizer is known.
        """
        ids = to_device(input_ids, self.device)
        embeds = self.language_model.get_input_embeddings()(ids)  # (B, L, C)
        if image_features is None:
            return embeds
        self.require_tokenizer()
        features = context_features(image_features, prompt_masks, vp_overall_mask)
        # Slots of the whole batch in order, as `features` are: (slots,), (slots, C).
        slots = (input_ids == self.img_context_id).flatten().nonzero()[:, 0]
        if len(slots) != len(features):
            raise ValueError(
                f"the prompts hold {len(slots)} {IMG_CONTEXT_TOKEN} tokens, the tiles and "
                f"regions give {len(features)} features"
            )
        slots, flat = to_device(slots, self.device), embeds.flatten(0, 1)
        # Not in place: autograd follows features and embeddings.
        return flat.index_copy(0, slots, features.to(embeds.dtype)).view(embeds.shape)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        prompt_masks: list[torch.Tensor] | None = None,
        vp_overall_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        image_features: torch.Tensor | None = None,
    ):
        """Return logits and last hidden states of full sequences.

        Args:
            input_ids, attention_mask: (B, L), padded on either side.
            pixel_values: (t, 3, 448, 448) tiles of all samples in batch order.
            prompt_masks, vp_overall_mask: see `embed`.
            position_ids: (B, L); default counts the attended tokens.
            image_features: (t, tokens, C) from `extract_feature`, instead of pixel_values.

        Returns:
            .logits (B, L, V); .hidden_states, a tuple of one: (B, L, C) after the final RMSNorm.
        """
        if pixel_values is not None:
            image_features = self.extract_feature(pixel_values)
        embeds = self.embed(input_ids, image_features, prompt_masks, vp_overall_mask)
        if position_ids is None:
            position_ids = positions(attention_mask)
        hidden = self.language_model.model(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return SimpleNamespace(logits=self.language_model.lm_head(hidden), hidden_states=(hidden,))

    # SAM2

    def sam_features(self, sam_pixels: torch.Tensor) -> list[torch.Tensor]:
        """Return the feature pyramid of SAM2's image encoder, before the decoder's convolutions.

        Args:
            sam_pixels: (B, 3, 1024, 1024) uint8, or float that is already normalised.

        Returns:
            [(B, 256, 256, 256), (B, 256, 128, 128), (B, 256, 64, 64)].
        """
        if sam_pixels.dtype == torch.uint8:
            sam_pixels = normalise_sam_pixels(sam_pixels)
        dtype = self.grounding_encoder.no_memory_embedding.dtype
        return list(self.grounding_encoder.vision_encoder(sam_pixels.to(dtype)).fpn_hidden_states)

    def decode_masks(
        self, features: list[torch.Tensor], image: torch.Tensor, prompts: torch.Tensor
    ) -> torch.Tensor:
        """Return float32 mask logits (P, 256, 256) of language prompts.

        Of three candidates it is the one with the highest predicted IoU. The object score does not
        gate the mask.

        Args:
            features: `sam_features` of B images.
            image: (P,) long, the image of each prompt.
            prompts: (P, 256).

        Source: `inject_language_embd` of the original, on a first frame.
        """
        sam = self.grounding_encoder
        # An image's features for each of its prompts: (P, ..).
        levels = [level[image] for level in decoder_features(sam, features)]
        # (P, 3, 256, 256), (P, 3)
        masks, iou, _, _ = decode_candidates(sam, levels[:2], levels[2], prompts)
        return masks[torch.arange(len(masks), device=masks.device), iou.argmax(-1)].float()

    def mask_logits(self, sam_pixels: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Return mask logits (n, 256, 256) of prompts (n, 256) in images (n, 3, 1024, 1024)."""
        image = torch.arange(len(prompts), device=prompts.device)
        return self.decode_masks(self.sam_features(sam_pixels), image, prompts)

    def preparing_for_generation(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_new_tokens: int = MAX_NEW_TOKENS,
        torch_dtype: torch.dtype | str | None = None,
    ):
        """Set tokenizer and longest answer of `predict_forward`; torch_dtype is ignored."""
        self.bind_tokenizer(tokenizer)
        self.max_new_tokens = max_new_tokens

    generate, predict_forward = generate, predict_forward

    # Checkpoints

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        *,
        torch_dtype: torch.dtype | str | None = None,
        device_map: str | dict | None = None,
        **others: Any,
    ) -> "Sa2VAModel":
        """Load the model in the folder `path`: `blank`, then `load_weights`; see there.

        Args:
            path: a folder, or a name on the hub, from which it is downloaded into the hub's cache.
            dtype, torch_dtype: of the weights; default float32, "auto" what config.json says, else
                the files. device, device_map: one device; default the CPU.
            others: what else transformers knows and means the same model, such as
                `low_cpu_mem_usage`; no remote code runs whatever `trust_remote_code` says.

        Raises:
            ValueError: also one of `others` that would change the model, such as `load_in_8bit`.
        """
        dtype, device = loading.resolve(path, dtype, device, torch_dtype, device_map, others)
        path = model_folder(loading.CALL, path)
        model = cls.blank(path, dtype)
        model.load_weights(path)
        return model.to(device)

    @classmethod
    def blank(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "Sa2VAModel":
        """Build the model of the folder `path` by its config.json alone; weights are not filled in.

        Raises:
            ValueError: no config.json, or one that describes another kind of model; names the file.
        """
        # Initial weights would be overwritten: drawing them is skipped.
        with default_dtype(dtype), no_init_weights():
            model = cls(Sa2VAConfig.from_pretrained(path))
        model.folder = Path(path)
        return model

    @torch.no_grad()
    def load_weights(
        self,
        path: str | Path,
        write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ):
        """Fill every weight from the folder `path`: safetensors in the original layout, strictly.

        Where the config ties embed_tokens and lm_head, the file may hold either or both; two that
        differ stay untied.

        Args:
            write: write(tensor, value) puts a whole value into a tensor of this model. One that
                keeps only a part of it lets several processes share a model that none could hold.

        Raises:
            ValueError: the folder or a file in it is not such a checkpoint; names the file.
        """
        weights.load(self, Path(path), write)

    def save_pretrained(
        self, path: str | Path, dtype: torch.dtype | None = None, max_shard_size: str = "5GB"
    ):
        """Write the folder `path` in the original layout: safetensors and config.json.

        Of tied embed_tokens and lm_head those are written that the loaded file had; without one,
        embed_tokens alone.

        Raises:
            ValueError: a LoRA is still attached; `tools/export.py` merges it first.
        """
        state = self.state_dict()
        if any("lora_" in key for key in state):
            raise ValueError(
                "the model carries a LoRA adapter: merge it first (python -m tools.export)"
            )
        if self.unwritten:
            del state[self.unwritten]
        elif self.language_model.lm_head.weight is self.language_model.model.embed_tokens.weight:
            # Of two names of one storage only one would be written.
            state[LM_HEAD] = state[LM_HEAD].clone()
        state = {
            k: v.detach().to("cpu", dtype) for k, v in checkpoint_keys.to_original(state).items()
        }
        Path(path).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, path, max_shard_size=max_shard_size, metadata={"format": "pt"})
        self.config.save_pretrained(path, dtype or self.dtype)
        for file in Path(path).glob("model*.safetensors"):  # which safetensors makes 0600
            file.chmod((Path(path) / "config.json").stat().st_mode)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return position ids (B, L) that count attended tokens, whatever side the padding is on."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
