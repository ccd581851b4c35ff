"""The recording of the original's numbers, and the model that it is of."""

import functools
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.processing_sa2va import normalise_sam_pixels
from tests.reference.subsample import LARGE, checksum, thin, unpack

REFERENCE = Path(__file__).parents[1] / "reference"
EMBEDDING = re.compile(
    r"(embed_tokens\.weight|class_embedding|position_embedding|pos_embed|pos_embed_window"
    r"|maskmem_tpos_enc|no_mem_embed|no_mem_pos_enc|no_obj_ptr|no_obj_embed_spatial"
    r"|iou_token\.weight|mask_tokens\.weight|obj_score_token\.weight"
    r"|point_embeddings\.\d+\.weight|not_a_point_embed\.weight|no_mask_embed\.weight)$"
)


def rule_weight(key, shape):
    """The float32 weight of an original key in the recording: it follows from key and shape alone.

    Standard normal numbers n, drawn from a PCG64 generator seeded by the key's CRC-32, are scaled
    by the kind of tensor: .1 + .02 n for layer scales, .5 n for embeddings, .02 n for biases,
    1 + .02 n for norm weights, n / sqrt(inputs) for linear and convolution weights.
    """
    n = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(
        tuple(shape), dtype=np.float32
    )
    f = np.float32
    if key.endswith("positional_encoding_gaussian_matrix"):
        return n
    if re.search(r"\.(ls1|ls2|g_weight)$", key):
        return f(0.1) + f(0.02) * n
    if EMBEDDING.search(key):
        return f(0.5) * n
    if key.endswith(".bias"):
        return f(0.02) * n
    return (
        f(1.0) + f(0.02) * n if len(shape) == 1 else n * f(1.0 / np.sqrt(float(np.prod(shape[1:]))))
    )


class Recording:
    """Numbers of the original model; tests/reference/README.md says how they were recorded.

    Attributes:
        facts: the recorded values that are no tensors.
    """

    def __init__(self, numbers: str, facts: str, large: int = LARGE):
        self.numbers, self.large = load_file(REFERENCE / numbers), large
        self.facts = json.loads((REFERENCE / facts).read_text())

    def __getitem__(self, key: str) -> torch.Tensor:
        """The whole tensor `key`; an error for one of which the recording holds a part."""
        assert key not in self.facts["shapes"], f"only a part of {key} is here"
        return self.numbers[key]

    def _pair(self, key, computed):
        expected = self.numbers[key]
        shape = self.facts["shapes"].get(key, list(expected.shape))
        assert list(computed.shape) == shape, key
        return thin(computed, self.large), expected

    def close(self, key: str, computed: torch.Tensor, tolerance: float = 1e-4):
        """Assert that `computed` is within tolerance of `key`, relative to its largest value."""
        computed, expected = self._pair(key, computed.float())
        deviation = ((computed - expected).abs().max() / expected.abs().max()).item()
        print(f"{key}: largest deviation {deviation:.1e} of the largest value")
        assert deviation < tolerance, key

    def equal(self, key: str, computed: torch.Tensor):
        """Assert that integers or booleans equal `key` in every element."""
        whole = computed.to(self.numbers[key].dtype)
        computed, expected = self._pair(key, whole)
        print(f"{key}: {int((computed != expected).sum())} of {expected.numel()} differ")
        assert torch.equal(computed, expected), key
        if key in self.facts["checksums"]:
            assert checksum(whole) == self.facts["checksums"][key], key


@pytest.fixture(scope="package")
def recorded() -> Recording:
    recording = Recording("numbers.safetensors", "facts.json")
    for x in "AB":
        width = recording[f"image_{x}_hwc_u8"].shape[1]
        recording.numbers[f"mask_{x}_nhw_u8"] = unpack(recording[f"mask_{x}_nhw_u8"], width)
    return recording


def fill_by_rule(state, layout):
    """Write `rule_weight` into native tensors, by the shapes {original key: shape}."""
    for name, tensor in state.items():
        tensor.copy_(
            checkpoint_keys.native_tensor(
                name, lambda key: torch.from_numpy(np.asarray(rule_weight(key, layout[key])))
            )
        )


@pytest.fixture(scope="package")
def original():
    """The recording's model: a tiny vision encoder and LLM with the full-size SAM2 (Hiera-L)."""
    layout = json.loads((REFERENCE / "tiny_layout.json").read_text())
    model = Sa2VAModel(Sa2VAConfig(**json.loads((REFERENCE / "tiny_config.json").read_text())))
    fill_by_rule(model.state_dict(), layout)
    model.img_context_id, model.seg_id = 500, 501
    return model.requires_grad_(False)


@pytest.fixture(scope="package")
def image(recorded):
    """Function of A or B: the PIL image that was recorded."""
    return lambda x: Image.fromarray(recorded[f"image_{x}_hwc_u8"].numpy())


@pytest.fixture(scope="package")
def pyramid(original, image):
    """Function of an image's name and the normalisation: its SAM2 features, computed once."""

    @functools.cache
    def build(x, rounded):
        pixels = Sa2VAProcessor(original.config).sam_image(image(x))
        return original.sam_features(normalise_sam_pixels(pixels, rounded)[None])

    return build


class CharTokenizer:
    """The recording's toy tokenizer: an id for each character, and one for each special token."""

    special = {
        "<IMG_CONTEXT>": 500,
        "[SEG]": 501,
        "<img>": 502,
        "</img>": 503,
        "<vp>": 504,
        "</vp>": 505,
        "<eos>": 2,
    }
    pad_token_id, eos_token_id, bos_token_id, name_or_path = 0, 2, None, "toy"

    def encode(self, text, add_special_tokens=True):
        pieces = re.findall("|".join(map(re.escape, self.special)) + "|.", text, re.DOTALL)
        return [self.special.get(piece, 3 + ord(piece[0]) % 480) for piece in pieces]

    def decode(self, ids, skip_special_tokens=False):
        names = {i: name for name, i in self.special.items()}
        return "".join(names.get(i, chr(i - 3) if i > 2 else "") for i in ids)


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()
