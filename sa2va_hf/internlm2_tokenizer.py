"""InternLM2's tokenizer, made of its folder's `tokenizer.model` without the code of that folder.

That file is a BPE model of sentencepiece, which is read by protobuf and computed by `tokenizers`.

Sources: `tokenization_internlm2.py` and `InternLM2Converter` in `tokenization_internlm2_fast.py`.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

MODEL = "tokenizer.model"
BPE = 2  # trainer_spec.model_type
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # types of pieces that matter here; others are not merged
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_internlm2(folder: Path) -> bool:
    """Tell whether the tokenizer in `folder` is InternLM2's."""
    file = folder / "tokenizer_config.json"
    if not file.is_file() or not (folder / MODEL).is_file():
        return False
    return str(json.loads(file.read_text()).get("tokenizer_class")).startswith("InternLM2Tokenizer")


def load_internlm2(folder: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of `folder`, which pads on the left and begins a text with `<s>`.

    Ids are those of sentencepiece, except behind a piece that is user-defined there (such as
    `[UNUSED_TOKEN_7]`) if the file asks for a dummy prefix: text behind it begins with a space.

    Raises:
        ValueError: tokenizer.model is damaged or no BPE model, or an added token has another id
            than the file says.
    """
    file = folder / MODEL
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{file} is damaged: it is no model of sentencepiece") from error
    if proto.trainer_spec.model_type != BPE:
        raise ValueError(f"{file} is not a BPE model of sentencepiece, as InternLM2's is")
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    added = _added_tokens(folder, fields)
    tokenizer = Tokenizer(_bpe(proto, added))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        spaces.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(spaces)
    user_defined = {
        i: AddedToken(piece.piece, normalized=False)
        for i, piece in enumerate(proto.pieces)
        if piece.type == USER_DEFINED
    }
    # In the order of their ids: those behind the pieces get the next free ones.
    for i, token in sorted((user_defined | added).items()):
        tokenizer.add_tokens([token])
        if (own := tokenizer.token_to_id(token.content)) != i:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: the added token {token.content} has id {i}, "
                f"but the next free one behind {MODEL} is {own}"
            )
    names = {name: _text(fields[name]) for name in NAMES if fields.get(name)}
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>") | names
    if fields.get("add_bos_token", True):
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        name_or_path=str(folder),
        **names,
    )


def _text(token: str | dict) -> str:
    """Return the text of a token, which a file gives alone or with its properties."""
    return token["content"] if isinstance(token, dict) else token


def _added_tokens(folder: Path, fields: dict[str, Any]) -> dict[int, AddedToken]:
    """Return {id: token} of what was added to the pieces or replaces one of them."""
    if decoder := fields.get("added_tokens_decoder"):
        kinds = ("lstrip", "rstrip", "normalized", "single_word", "special")
        return {
            int(i): AddedToken(token["content"], **{k: token[k] for k in kinds if k in token})
            for i, token in decoder.items()
        }
    # Of folders that transformers before 4.34 wrote
    file = folder / "added_tokens.json"
    tokens = json.loads(file.read_text()) if file.is_file() else {}
    return {i: AddedToken(text, normalized=False, special=True) for text, i in tokens.items()}


def _bpe(proto: Any, added: dict[int, AddedToken]) -> models.BPE:
    """Return the BPE model, in which added tokens stand in the place of pieces of their ids."""
    pieces = [added[i].content if i in added else p.piece for i, p in enumerate(proto.pieces)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    symbols = {p.piece for i, p in enumerate(proto.pieces) if p.type == NORMAL and i not in added}
    # sentencepiece joins the neighbours whose whole has the highest score.
    scores = {p.piece: p.score for p in proto.pieces if p.piece in symbols}
    merges = []
    for whole in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = [(whole[:i], whole[i:]) for i in range(1, len(whole))]
        merges += [cut for cut in cuts if symbols.issuperset(cut)]
    unknown = next(p.piece for p in proto.pieces if p.type == UNKNOWN)
    return models.BPE(
        vocab,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """Return what sentencepiece does to a text before it is cut into pieces."""
    steps = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Of spaces alone: line breaks stay.
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" +"), " "),
        ]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
