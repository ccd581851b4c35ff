"""Captions as they come in datasets, made safe to stand in a prompt."""

import re

SPECIAL_TOKENS = tuple(
    "<img> </img> <IMG_CONTEXT> [SEG] <p> </p> <vp> </vp> <quad> </quad> <ref> </ref> <box> </box> "
    "<|endoftext|> <|im_start|> <|im_end|> <|system|> <|user|> <|assistant|> <|end|>".split()
)


def clean_caption(text: str) -> str:
    """`text` on one line, without dataset markers (`<image>`, `<Prompt0>`) and special tokens.

    These in upper and lower case: inside a caption such a token would count as an image feature, a
    segmentation request or the end of the turn. Everything else stays as it is, quotes and braces
    too. The result may be empty.
    """
    marker = "|".join([r"<image>", r"<Prompt\d*>"] + [re.escape(token) for token in SPECIAL_TOKENS])

    def gap(match: re.Match) -> str:
        following = match.string[match.end() : match.end() + 1]
        return "" if following and following in ".,;:!?" else " "  # "a dog [SEG]." -> "a dog."

    return " ".join(
        re.sub(rf"(?: ?(?:{marker}))+ ?", gap, " ".join(text.split()), flags=re.IGNORECASE).split()
    )


def is_blank(text: str | None) -> bool:
    """Whether `clean_caption` leaves nothing of `text`."""
    return not text or not text.strip() or (text.lstrip()[0] in "<[" and not clean_caption(text))


def phrase(caption: str) -> str:
    """`caption` as {x} of a segmentation prompt: lower case, without final stop or special tokens.

    A sampled caption may hold special-token strings; as text of a prompt they would become image or
    [SEG] tokens.
    """
    text = clean_caption(caption.lower())
    return text[:-1] if text.endswith(".") else text
