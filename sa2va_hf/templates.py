"""Chat templates and the encoding rule of Sa2VA's supervised training.

Source: `hf/models/templates.py` and `datasets/encode_fn.py` (`video_lisa_encode_fn`) in
`projects/llava_sam2` of the original repository.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


IGNORE_INDEX = -100
IMG_CONTEXT_TOKEN = "<IMG_CONTEXT>"
IMAGE_STRINGS = ("<img>", IMG_CONTEXT_TOKEN, "</img>")  # before an image, its token, behind it
SPECIAL_TOKENS = (IMG_CONTEXT_TOKEN, "[SEG]", "<img>", "</img>", "<vp>", "</vp>")

PROMPT_TEMPLATE = {
    "phi3_chat": dict(
        SYSTEM="<|system|>\n{system}<|end|>\n",
        INSTRUCTION="<|user|>\n{input}<|end|>\n<|assistant|>\n",
        SUFFIX="<|end|>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<|end|>"],
    ),
    "internlm2_chat": dict(
        SYSTEM="<|im_start|>system\n{system}<|im_end|>\n",
        INSTRUCTION="<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n",
        SUFFIX="<|im_end|>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<|im_end|>"],
    ),
    "qwen_chat": dict(
        SYSTEM="<|im_start|>system\n{system}<|im_end|>\n",
        INSTRUCTION="<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n",
        SUFFIX="<|im_end|>",
        SUFFIX_AS_EOS=True,
        SEP="\n",
        STOP_WORDS=["<|im_end|>", "<|endoftext|>"],
    ),
    "vicuna": dict(
        SYSTEM="A chat between a curious user and an artificial intelligence assistant. The "
        "assistant gives helpful, detailed, and polite answers to the user's questions. "
        "{system}\n ",
        INSTRUCTION="USER: {input} ASSISTANT:",
        SEP="\n",
    ),
}


def token_ids(
    tokenizer: "PreTrainedTokenizerBase", vocab_size: int, tokens: tuple[str, ...] = SPECIAL_TOKENS
) -> dict[str, int]:
    """Return the id of each of `tokens`, which are special ones.

    Raises:
        ValueError: one of them is not a single token, or lies beyond the model's vocabulary.
    """
    ids = {}
    for token in tokens:
        piece = tokenizer.encode(token, add_special_tokens=False)
        if len(piece) != 1:
            raise ValueError(
                f"the tokenizer in {tokenizer.name_or_path!r} has no single token {token} "
                f"(it encodes as {piece}): it is not a Sa2VA tokenizer"
            )
        ids[token] = piece[0]
    if max(ids.values()) >= vocab_size:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path!r} has ids beyond the model's "
            f"vocabulary of {vocab_size}"
        )
    return ids


def image_string(num_tiles: int, tokens_per_tile: int) -> str:
    """Return the tokens of one image, or one frame, in a prompt."""
    return "<img>" + "<IMG_CONTEXT>" * (num_tiles * tokens_per_tile) + "</img>"


def region_string(cells: list[int]) -> str:
    """Return the header of regions of `cells[i]` tokens; "are" for one region too, as trained."""
    regions = ", ".join(
        f"region{i + 1}<vp>" + "<IMG_CONTEXT>" * k + "</vp>" for i, k in enumerate(cells)
    )
    return f"\nThere are {len(cells)} part regions in the picture: {regions}.\n"


def chat_template(name: str) -> dict:
    """Return the template `name`; raise ValueError naming the known ones."""
    if name not in PROMPT_TEMPLATE:
        raise ValueError(
            f"config.json: template {name!r} is unknown; known: {', '.join(PROMPT_TEMPLATE)}"
        )
    return PROMPT_TEMPLATE[name]


def template_map(example: dict, template: dict) -> dict:
    """Return `example` with INSTRUCTION, SUFFIX and SEP around each turn, as in training.

    Args:
        example: {"conversation": [{"input": str, "output": str}, ..]}; not modified.
    """
    # Where the suffix is the template's EOS, no EOS token follows it.
    suffix = template.get("SUFFIX", "")
    turns = [
        dict(
            turn,
            input=template["INSTRUCTION"].replace("{input}", turn.get("input", "")),
            output=turn.get("output", "") + suffix,
            need_eos_token=not template.get("SUFFIX_AS_EOS", False),
            sep=template.get("SEP", ""),
        )
        for turn in example["conversation"]
    ]
    return dict(example, conversation=turns)


def video_lisa_encode_fn(
    example: dict,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    input_ids_with_output: bool = True,
    **kwargs: Any,
) -> dict:
    """Return ids and labels of a conversation, as Sa2VA's supervised training encodes it.

    Each piece is encoded apart, without special tokens of the tokenizer's own. Inputs, separators
    and the BOS carry no loss; outputs do, unless the turn says `output_with_loss: False`; an EOS,
    with loss like its output, follows where the turn's `need_eos_token` is true (never under a
    template whose suffix is its EOS, such as phi3_chat).

    Args:
        example: {"conversation": [turn, ..]}, each turn with "input", "output" and optionally
            "need_eos_token" (True), "sep" (""), "output_with_loss" (True): what `template_map`
            returns.
        max_length: ids beyond it are cut off on the right.
        kwargs: ignored, as in the original (`with_image_token` and the like).
        input_ids_with_output: False returns the prompt alone, allowed for one turn.

    Returns:
        {"input_ids": list[int], "labels": list[int]} of equal length, labels -100 without loss.

    Raises:
        ValueError: several turns with `input_ids_with_output=False`.
    """
    turns = example["conversation"]
    if len(turns) > 1 and not input_ids_with_output:
        raise ValueError("a conversation of several turns needs input_ids_with_output=True")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids, labels = [], []
    bos_due = True  # at the beginning, and after each EOS
    for turn in turns:
        if bos_due:
            ids += bos
            labels += [IGNORE_INDEX] * len(bos)
        piece = encode(turn["input"])
        ids += piece
        labels += [IGNORE_INDEX] * len(piece)
        if input_ids_with_output:
            piece, with_loss = encode(turn["output"]), turn.get("output_with_loss", True)
            ids += piece
            labels += piece if with_loss else [IGNORE_INDEX] * len(piece)
            bos_due = turn.get("need_eos_token", True)
            if bos_due:
                ids.append(tokenizer.eos_token_id)
                labels.append(tokenizer.eos_token_id if with_loss else IGNORE_INDEX)
            piece = encode(turn.get("sep", "")) if turn.get("sep") else []
            ids += piece
            labels += [IGNORE_INDEX] * len(piece)
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}
