"""Clean captions of data sets, so that they are safe in a prompt."""

import functools
import re

SPECIAL_TOKENS = tuple(
    "<img> </img> <IMG_CONTEXT> [SEG] <p> </p> <vp> </vp> <quad> </quad> <ref> </ref> <box> </box> "
    "<|endoftext|> <|im_start|> <|im_end|> <|system|> <|user|> <|assistant|> <|end|> "
    "<tool_call> </tool_call>".split()
)
# Also everything in the form of Qwen's special tokens.
MARKERS = [r"<image>", r"<Prompt\d*>", r"<\|\w*\|>", *map(re.escape, SPECIAL_TOKENS)]
MARKER = re.compile(rf"(?: ?(?:{'|'.join(MARKERS)}))+ ?", re.IGNORECASE)

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character, which JSON and pickles can hold
BLANK, NOT_UNICODE = "blank caption", "caption that is no Unicode text"


def clean_caption(text: str) -> str:
    """Put `text` on one line, without control characters, markers and special tokens.

    Markers of data sets (`<image>`, `<Prompt0>`) and special tokens go in upper and lower case:
    inside a caption such a token would count as an image feature, a segmentation request or the end
    of the turn. Everything else stays as it is, quotes and braces too. The result may be empty.
    """

    def gap(match: re.Match) -> str:
        following = match.string[match.end() : match.end() + 1]
        return "" if following and following in ".,;:!?" else " "  # "a dog [SEG]." -> "a dog."

    line = CONTROL.sub("", " ".join(text.split()))  # first: they might stand inside a token
    return " ".join(MARKER.sub(gap, line).split())


def caption_fault(text: str | float | bool | list | dict | None) -> str | None:
    """Return the reason why `text` cannot be a caption, or None."""
    if not isinstance(text, str):
        return BLANK
    if SURROGATE.search(text):
        return NOT_UNICODE
    return None if clean_caption(text) else BLANK


@functools.lru_cache(maxsize=4096)  # called several times for each caption
def phrase(caption: str) -> str:
    """Turn a caption into {x} of a segmentation prompt.

    It is in lower case, without final full stop and special tokens. A sampled caption may hold
    special-token strings; as text of a prompt they would become image or [SEG] tokens.
    """
    text = clean_caption(caption.lower())
    return text[:-1] if text.endswith(".") else text
