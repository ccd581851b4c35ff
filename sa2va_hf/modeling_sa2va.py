"""Sa2VA: a vision-language model, and SAM2 behind a `[SEG]` token.

Composed of transformers' own modules. This file has what all families share: SAM2, the layers
that make its prompt of the hidden state at `[SEG]`, and the files, in the layout of the original
checkpoints. The families join image and text tokens (`internvl`, `qwen_vl`).

Letters: B sequences, L their length, V vocabulary, C LLM width, P prompts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers.initialization import no_init_weights

from . import checkpoint_keys, loading, weights
from .configuration_sa2va import Sa2VAConfig
from .hub import model_folder
from .mask_decoder import decode_candidates, decoder_features
from .prediction import MAX_NEW_TOKENS, predict_forward
from .processing_sa2va import normalise_sam_pixels, one_piece
from .sam3 import build_sam, gate, image_features
from .templates import token_ids
from .tokenizer import load_tokenizer
from .weights import default_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sa2VAModel(nn.Module):
    """Sa2VA of native modules; `grounding_encoder` is SAM2 or SAM3.

    `Sa2VAModel(config)` and `Sa2VAModel.from_pretrained(folder)` return the class of the
    configuration's family (`families.FAMILIES`).

    The ids of the image token and of `[SEG]` come from a tokenizer: `bind_tokenizer`, else the one
    in the folder that the model was loaded from. `img_context_id` and `seg_id` may also be set by
    hand, under the original's names too (`img_context_token_id`, `seg_token_idx`).
    """

    image_token: ClassVar[str]  # stands in a prompt for each token of an image
    special_tokens: ClassVar[tuple[str, ...]]  # single tokens of the family's tokenizers
    image_strings: ClassVar[tuple[str, str, str]]  # before an image, its token, behind it
    # Ways to ask about a region, the default first
    region_prompts: ClassVar[tuple[str, ...]]
    box_text: ClassVar[str]  # a box as the base writes it: left, top, right, bottom
    relative_boxes: ClassVar[bool]  # the base's boxes are in thousandths, else in seen pixels
    # Names of two tensors in the state dict
    embed_tokens_key: ClassVar[str]
    lm_head_key: ClassVar[str]
    # The causal language model, with .model, .lm_head and .config as transformers' own
    language_model: Any

    def __new__(cls, config: Sa2VAConfig | None = None) -> "Sa2VAModel":
        if cls is Sa2VAModel:
            from .families import family_of  # the table names subclasses of this class

            cls = family_of(config.raw).model
        return super().__new__(cls)

    def __init__(self, config: Sa2VAConfig):
        super().__init__()
        self.config = config
        self.build(config)
        width = config.llm.hidden_size
        self.grounding_encoder = build_sam(config.sam2)
        self.text_hidden_fcs = nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, config.prompt_size),
            nn.Dropout(0.0),
        )
        self.img_context_id = self.seg_id = self.tokenizer = self.folder = None
        self.max_new_tokens = MAX_NEW_TOKENS  # of predict_forward
        # The one of two tied tensors that files leave out.
        self.unwritten = self.lm_head_key if config.tied else None
        self.eval()

    def build(self, config: Sa2VAConfig):
        """Add the modules of vision and language."""
        raise NotImplementedError

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
        return self.text_hidden_fcs[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_input_embeddings().weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.get_input_embeddings()

    def bind_tokenizer(self, tokenizer: "PreTrainedTokenizerBase"):
        """Take the ids of the image token and `[SEG]` from a tokenizer, and keep it.

        Raises:
            ValueError: a token of Sa2VA's is not a single one there, or lies beyond the vocabulary.
        """
        ids = token_ids(tokenizer, self.config.llm.vocab_size, self.special_tokens)
        self.img_context_id, self.seg_id = ids[self.image_token], ids["[SEG]"]
        self.tokenizer = tokenizer

    def require_tokenizer(self):
        """Bind the tokenizer of the model's folder if no ids are set; without one, ValueError."""
        if self.img_context_id is not None:
            return
        if self.folder is None or not (self.folder / "tokenizer_config.json").is_file():
            raise ValueError(
                f"the id of {self.image_token} is not known: call bind_tokenizer with Sa2VA's "
                "tokenizer first"
            )
        self.bind_tokenizer(load_tokenizer(self.folder))

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
        return image_features(self.grounding_encoder, sam_pixels.to(dtype))

    def decode_masks(
        self, features: list[torch.Tensor], image: torch.Tensor, prompts: torch.Tensor
    ) -> torch.Tensor:
        """Return float32 mask logits (P, 256, 256) of language prompts.

        Of three candidates it is the one with the highest predicted IoU. The object score gates
        the mask of SAM3 alone. If config.json has `one_piece_masks`, logits without a gradient are
        those of one connected piece (`one_piece`); what trains the decoder are whole masks.

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
        masks, iou, _, score = decode_candidates(sam, levels[:2], levels[2], prompts)
        best = masks[torch.arange(len(masks), device=masks.device), iou.argmax(-1)].float()
        logits = gate(sam, best, score)
        cut = self.config.one_piece_masks and not torch.is_grad_enabled()
        return one_piece(logits) if cut else logits

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

    predict_forward = predict_forward

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
        seg_state: str | None = None,
        **others: Any,
    ) -> "Sa2VAModel":
        """Load the model in the folder `path`: `blank`, then `load_weights`; see there.

        Args:
            path: a folder, or a name on the hub, from which it is downloaded into the hub's cache.
            dtype, torch_dtype: of the weights; default float32, "auto" what config.json says, else
                the files. device, device_map: one device; default the CPU.
            seg_state: "before_norm" or "after_norm": which last hidden state of a Qwen-VL at [SEG]
                prompts SAM2; default as config.json says, or by its transformers_version.
            others: what else transformers knows and means the same model, such as
                `low_cpu_mem_usage`; no remote code runs whatever `trust_remote_code` says.

        Raises:
            ValueError: also one of `others` that would change the model, such as `load_in_8bit`.
        """
        dtype, device = loading.resolve(path, dtype, device, torch_dtype, device_map, others)
        path = model_folder(loading.CALL, path)
        model = cls.blank(path, dtype, seg_state)
        model.load_weights(path)
        return model.to(device)

    @classmethod
    def blank(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        seg_state: str | None = None,
    ) -> "Sa2VAModel":
        """Build the model of the folder `path` by its config.json alone; weights are not filled in.

        Raises:
            ValueError: no config.json, or one that describes another kind of model; names the file.
        """
        # Initial weights would be overwritten: drawing them is skipped.
        with default_dtype(dtype), no_init_weights():
            changes = dict(seg_state=seg_state) if seg_state else {}
            model = cls(Sa2VAConfig.from_pretrained(path, **changes))
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
            state[self.lm_head_key] = state[self.lm_head_key].clone()
        original = checkpoint_keys.to_original(state, self.config.llm, self.config.has_sam3)
        state = {key: tensor.detach().to("cpu", dtype) for key, tensor in original.items()}
        Path(path).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, path, max_shard_size=max_shard_size, metadata={"format": "pt"})
        self.config.save_pretrained(path, dtype or self.dtype)
        for file in Path(path).glob("model*.safetensors"):  # which safetensors makes 0600
            file.chmod((Path(path) / "config.json").stat().st_mode)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return position ids (B, L) that count attended tokens, whatever side the padding is on."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
