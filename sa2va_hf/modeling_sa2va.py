"""Sa2VA: InternVL vision encoder, projector, LLM, and SAM2 behind a `[SEG]` token.

Composed of transformers' own modules; this file holds what they lack: the splice of image and region tokens, the
prompt embedding at `[SEG]`, the path through SAM2's mask decoder, and the original checkpoint layout.

Letters: B sequences, L their length, V vocabulary, C LLM width, t tiles, P prompts, n regions, H W image height, width.
"""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import nn
from transformers import AutoTokenizer, InternVLVisionModel, Qwen2ForCausalLM, Sam2VideoModel
from transformers.initialization import no_init_weights

from . import checkpoint_keys
from .configuration_sa2va import Sa2VAConfig
from .prediction import MAX_NEW_TOKENS, predict_forward
from .processing_sa2va import normalise_sam_pixels

IMG_CONTEXT_TOKEN, SEG_TOKEN = "<IMG_CONTEXT>", "[SEG]"
EMBED_TOKENS, LM_HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


class Sa2VAModel(nn.Module):
    """Sa2VA with native modules: `vision_model`, `mlp1`, `language_model`, `grounding_encoder` (SAM2), `text_hidden_fcs`.

    The `<IMG_CONTEXT>` and `[SEG]` ids come from a tokenizer: `bind_tokenizer`, else the one in the folder that the model was
    loaded from. `img_context_id` and `seg_id` may also be set by hand, under the original's names too
    (`img_context_token_id`, `seg_token_idx`).
    """

    def __init__(self, config: Sa2VAConfig):
        super().__init__()
        self.config = config
        vit, width = (
            config.vision.hidden_size * int(1 / config.downsample_ratio) ** 2,
            config.llm.hidden_size,
        )
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
        self.unwritten = (
            LM_HEAD if config.tied else None
        )  # the one of two tied tensors that files leave out
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

    def bind_tokenizer(self, tokenizer):
        """Look up `<IMG_CONTEXT>` and `[SEG]`. Raises ValueError if the tokenizer does not hold one as a single token."""
        ids = {}
        for token in (IMG_CONTEXT_TOKEN, SEG_TOKEN, "<img>", "</img>", "<vp>", "</vp>"):
            piece = tokenizer.encode(token, add_special_tokens=False)
            if len(piece) != 1:
                raise ValueError(
                    f"the tokenizer in {tokenizer.name_or_path!r} has no single token {token} "
                    f"(it encodes as {piece}): it is not a Sa2VA tokenizer"
                )
            ids[token] = piece[0]
        if max(ids.values()) >= self.config.llm.vocab_size:
            raise ValueError(
                f"the tokenizer in {tokenizer.name_or_path!r} has ids beyond the model's vocabulary of "
                f"{self.config.llm.vocab_size}"
            )
        self.img_context_id, self.seg_id, self.tokenizer = (
            ids[IMG_CONTEXT_TOKEN],
            ids[SEG_TOKEN],
            tokenizer,
        )

    def require_tokenizer(self):
        """Bind the tokenizer of the model's own folder if no ids are set. Raises ValueError if there is none."""
        if (
            self.img_context_id is None
            and self.folder is not None
            and (self.folder / "tokenizer_config.json").is_file()
        ):
            self.bind_tokenizer(AutoTokenizer.from_pretrained(self.folder))
        if self.img_context_id is None:
            raise ValueError(
                f"the id of {IMG_CONTEXT_TOKEN} is not known: call bind_tokenizer with Sa2VA's tokenizer first"
            )

    # Vision and language

    def vision_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(t, 3, S, S) -> (t, tokens, 4 * ViT width): patches after pixel shuffle and before `mlp1`, row-major."""
        x = self.vision_model(
            pixel_values.to(self.vision_model.embeddings.cls_token.dtype)
        ).last_hidden_state[:, 1:]
        side = int(x.shape[1] ** 0.5)
        x = x.view(
            x.shape[0], side // 2, 2, side // 2, 2, x.shape[-1]
        )  # (t, rows, r, columns, c, D)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(x.shape[0], (side // 2) ** 2, -1)

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(t, 3, 448, 448) normalised pixels -> (t, 256, C) image tokens in the LLM's space."""
        return self.mlp1(self.vision_features(pixel_values))

    def embed(
        self, input_ids, image_features, prompt_masks=None, vp_overall_mask=None
    ) -> torch.Tensor:
        """Token embeddings with image and region features at the `<IMG_CONTEXT>` positions.

        Args:
            input_ids: (B, L).
            image_features: (t, tokens, C), all tiles of all samples in batch order, or None for text alone.
            prompt_masks: list over the flagged tiles of (n, 16, 16) bool regions.
            vp_overall_mask: (t,) bool, the tile of each sample that its regions refer to (its last tile).

        Returns:
            (B, L, C).

        Raises:
            ValueError: the number of `<IMG_CONTEXT>` ids differs from the number of features (the original prints a
                line and then computes without any image, or repeats features); no tokenizer is known.
        """
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if image_features is None:
            return embeds
        self.require_tokenizer()
        pieces, flagged = [], 0
        flags = (
            [False] * len(image_features) if vp_overall_mask is None else vp_overall_mask.tolist()
        )
        if len(flags) != len(image_features):
            raise ValueError(
                f"vp_overall_mask has {len(flags)} entries for {len(image_features)} tiles"
            )
        if sum(flags) != len(prompt_masks if prompt_masks is not None else []):
            raise ValueError(
                f"{len(prompt_masks or [])} prompt_masks for {sum(flags)} flagged tiles"
            )
        for tile, flag in zip(image_features, flags):
            pieces.append(tile)
            if flag:
                cells = prompt_masks[flagged].to(tile.device).bool().flatten(1)  # (n, 256)
                pieces += [tile[region] for region in cells]
                flagged += 1
        features = torch.cat(pieces)
        slots = input_ids == self.img_context_id
        if int(slots.sum()) != len(features):
            raise ValueError(
                f"the prompts hold {int(slots.sum())} {IMG_CONTEXT_TOKEN} tokens, the tiles and regions give "
                f"{len(features)} features"
            )
        return embeds.masked_scatter(slots[..., None], features.to(embeds.dtype))

    def forward(
        self,
        input_ids,
        attention_mask,
        pixel_values=None,
        prompt_masks=None,
        vp_overall_mask=None,
        position_ids=None,
        *,
        image_features=None,
        keep_logits=None,
    ):
        """Logits and last hidden states of full sequences.

        Args:
            input_ids, attention_mask: (B, L), padded on either side.
            pixel_values: (t, 3, 448, 448) tiles of all samples in batch order.
            prompt_masks, vp_overall_mask: see `embed`.
            position_ids: (B, L); default counts the attended tokens.
            image_features: (t, tokens, C) from `extract_feature`, instead of pixel_values.
            keep_logits: slice of positions to compute logits for; default all.

        Returns:
            .logits (B, kept, V); .hidden_states, a tuple whose last entry is (B, L, C) after the final RMSNorm.
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
        kept = hidden if keep_logits is None else hidden[:, keep_logits]
        return SimpleNamespace(logits=self.language_model.lm_head(kept), hidden_states=(hidden,))

    # SAM2

    def sam_features(self, sam_pixels: torch.Tensor) -> list[torch.Tensor]:
        """Pyramid of SAM2's image encoder, before the mask decoder's trainable `conv_s0`, `conv_s1`.

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
        """Mask logits of language prompts, as the original's `inject_language_embd` on a first frame.

        `no_mem_embed` is added to the coarsest level; of mask tokens 1..3 the one with the highest predicted IoU. The
        object score does not gate the mask.

        Args:
            features: `sam_features` of B images; image: (P,) long, the image of each prompt; prompts: (P, 256).

        Returns:
            (P, 256, 256) float32.
        """
        fine, middle, coarse = self.decoder_features(features)
        masks, iou, _, _ = self.decode_candidates(
            [fine[image], middle[image]], coarse[image], prompts
        )
        return masks[torch.arange(len(masks), device=masks.device), iou.argmax(-1)].float()

    def decoder_features(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
        """`sam_features` as the mask decoder takes them without memory: [(B, 32, 256, 256), (B, 64, 128, 128), (B, 256, 64, 64)]."""
        sam = self.grounding_encoder
        dtype = sam.mask_decoder.mask_tokens.weight.dtype
        fine, middle, coarse = (f.to(dtype) for f in features)
        return [
            sam.mask_decoder.conv_s0(fine),
            sam.mask_decoder.conv_s1(middle),
            coarse + sam.no_memory_embedding.to(dtype).view(1, -1, 1, 1),
        ]

    def decode_candidates(
        self,
        high_res: list[torch.Tensor],
        coarse: torch.Tensor,
        prompts: torch.Tensor | None = None,
    ):
        """The mask decoder's three candidates under the sparse prompt [not_a_point, not_a_point, language], dense `no_mask_embed`.

        Args:
            high_res, coarse: `decoder_features` of the image of each of P prompts; prompts: (P, 256), or None for a
                tracked frame, which has no language token.

        Returns:
            mask logits (P, 3, 256, 256), predicted IoU (P, 3), output tokens (P, 3, 256), object score logit (P, 1).
        """
        sam, n, dtype = self.grounding_encoder, len(coarse), coarse.dtype
        points = torch.zeros(n, 1, 1, 2, device=coarse.device, dtype=dtype)
        labels = -torch.ones(n, 1, 1, dtype=torch.int32, device=coarse.device)
        sparse, dense = sam.prompt_encoder(
            input_points=points, input_labels=labels, input_boxes=None, input_masks=None
        )
        sparse = sparse.to(dtype)
        if prompts is not None:
            sparse = torch.cat([sparse, prompts[:, None, None].to(dtype)], dim=2)  # (P, 1, 3, 256)
        masks, iou, tokens, score = sam.mask_decoder(
            image_embeddings=coarse,
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense.to(dtype),
            image_positional_embeddings=sam.get_image_wide_positional_embeddings()
            .to(dtype)
            .expand(n, -1, -1, -1),
            multimask_output=True,
            high_resolution_features=high_res,
        )
        return masks[:, 0], iou[:, 0], tokens[:, 0], score[:, 0]

    def mask_logits(self, sam_pixels: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """(n, 3, 1024, 1024) uint8 images and one (n, 256) prompt each -> (n, 256, 256) mask logits."""
        image = torch.arange(len(prompts), device=prompts.device)
        return self.decode_masks(self.sam_features(sam_pixels), image, prompts)

    def preparing_for_generation(
        self, tokenizer, max_new_tokens: int = MAX_NEW_TOKENS, torch_dtype=None
    ):
        """Set the tokenizer and the longest answer of `predict_forward`; torch_dtype is ignored, the model keeps its own."""
        self.bind_tokenizer(tokenizer)
        self.max_new_tokens = max_new_tokens

    def predict_forward(
        self,
        image=None,
        video=None,
        text=None,
        past_text="",
        mask_prompts=None,
        tokenizer=None,
        processor=None,
        *,
        rounded_normalisation=False,
    ) -> dict:
        """The answer to `text` and the masks of its [SEG] tokens: see `sa2va_hf.prediction.predict_forward`."""
        return predict_forward(
            self, image, video, text, past_text, mask_prompts, tokenizer, rounded_normalisation
        )

    # Checkpoints

    @classmethod
    def from_pretrained(
        cls, path, dtype: torch.dtype = torch.float32, device="cpu"
    ) -> "Sa2VAModel":
        """The model in the folder `path`, strictly loaded: `blank`, then `load_weights`; see there."""
        model = cls.blank(path, dtype)
        model.load_weights(path)
        return model.to(device)

    @classmethod
    def blank(cls, path, dtype: torch.dtype = torch.float32) -> "Sa2VAModel":
        """A model by the config.json of the folder `path`, its weights not filled in yet.

        Raises:
            ValueError: no config.json, or one that describes another kind of model; names the file.
        """
        with _default_dtype(dtype), no_init_weights():
            model = cls(Sa2VAConfig.from_pretrained(path))
        model.folder = Path(path)
        return model

    @torch.no_grad()
    def load_weights(self, path, write=torch.Tensor.copy_):
        """Fill every weight from a folder in the original layout (safetensors, with an index if
        there are several), strictly.

        Where the config ties embed_tokens and lm_head, the file may hold either or both; two that
        differ stay untied.

        Args:
            write: write(tensor, value) puts a whole value into a tensor of this model. One that
                keeps only a part of it lets several processes share a model that none could hold.

        Raises:
            ValueError: no checkpoint there, a LoRA adapter instead of a model, missing or
                unexpected keys, a shape that does not fit the config, or an unreadable file; the
                message names the file.
        """
        files, source = checkpoint_keys.find_keys(Path(path)), {}
        llm, tied = self.language_model, self.config.tied
        if tied and EMBED_TOKENS in files and LM_HEAD in files:
            self.unwritten = None
            llm.lm_head.weight = nn.Parameter(torch.empty_like(llm.lm_head.weight))
        elif tied and (EMBED_TOKENS in files or LM_HEAD in files):
            there, absent = sorted((EMBED_TOKENS, LM_HEAD), key=lambda key: key not in files)
            files[absent], source, self.unwritten = files[there], {absent: there}, absent
        state = self.state_dict()
        checkpoint_keys.check_keys(path, files, checkpoint_keys.original_shapes(state))
        with contextlib.ExitStack() as stack:
            readers = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in set(files.values())
            }

            def read(key):
                return readers[files[key]].get_tensor(source.get(key, key))

            for name, tensor in state.items():
                write(tensor, checkpoint_keys.native_tensor(name, read))
        if tied and torch.equal(llm.lm_head.weight, llm.model.embed_tokens.weight):
            llm.lm_head.weight = llm.model.embed_tokens.weight

    def save_pretrained(self, path, dtype: torch.dtype | None = None, max_shard_size: str = "5GB"):
        """Write `path` in the original layout: safetensors (sharded with an index above max_shard_size) and config.json.

        Of tied embed_tokens and lm_head those are written that the loaded file had; without one, embed_tokens alone.

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
            state[LM_HEAD] = state[LM_HEAD].clone()
        state = {
            k: v.detach().to("cpu", dtype) for k, v in checkpoint_keys.to_original(state).items()
        }
        Path(path).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, path, max_shard_size=max_shard_size, metadata={"format": "pt"})
        self.config.save_pretrained(path)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, L) position ids that count attended tokens, whatever side the padding is on."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
