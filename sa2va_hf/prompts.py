"""Every prompt of the project, as strings of Sa2VA's supervised training, and their token ids.

Supervised training, rollouts, teacher, evaluation and the demo's warm start all come through here.
"""

import functools
import re
from typing import TYPE_CHECKING

from .templates import IMAGE_STRINGS, chat_template, region_string

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DESCRIBE = "Please generate a detailed description for the given image region."
# Ways to point at a region that is drawn on the image, or named by its box.
DESCRIBE_DRAWN = {
    "outline": "Please generate a detailed description for the image region outlined in red.",
    "box": "Please generate a detailed description for the image region in the red box.",
    "coordinates": "Please generate a detailed description for the image region in the box {box}.",
}
SEGMENT = "Please segment {x} in this image."
_WORDINGS = (
    "Can you segment the {x} in this image?",
    "Please segment {x} in this image.",
    "What is {x} in this image? Please respond with segmentation mask.",
    "What is {x} in this image? Please output segmentation mask.",
    "Could you provide a segmentation mask for the {x} in this image?",
    "Please identify and segment the {x} in this image.",
    "Where is the {x} in this picture? Please respond with a segmentation mask.",
    "Can you highlight the {x} in this image with a segmentation mask?",
)
SEGMENT_WORDINGS = (
    *_WORDINGS,
    *(wording[:-1] for wording in _WORDINGS),
)  # each with and without its final mark
SEGMENT_ANSWERS = (
    "It is [SEG].",
    "Sure, [SEG].",
    "Sure, it is [SEG].",
    "Sure, the segmentation result is [SEG].",
    "[SEG].",
)
FORCED_ANSWER = SEGMENT_ANSWERS[1]
# Of a phrase that names nothing; the original's training has no such phrases.
NO_TARGET_ANSWER = "There is no such object in the image."
# A caption of the image with a mask for each phrase: "<p> A dog </p> [SEG] sits on ..".
GROUNDED_CAPTION = (
    "Could you please give me a brief description of the image? Please respond with interleaved "
    "segmentation masks for the corresponding parts of the answer."
)
# A segmentation question whose answer thinks first.
THINK_FIRST = (
    "Please segment {x} in this image. Output the thinking process in <think> </think> tags, and "
    "then the answer with the segmentation mask."
)


@functools.lru_cache(maxsize=2**12)
def _encode(tokenizer, text: str) -> list[int]:
    """Return the ids of a text. Regions' sizes are not in it, so few texts recur often."""
    return tokenizer.encode(text, add_special_tokens=False)


class PromptBuilder:
    """Builds prompt ids for one tokenizer and template.

    Args:
        tokenizer: Sa2VA's tokenizer; template: name from the checkpoint's config; tokens_per_tile:
            256 for 448 px.
        image_strings: before an image, its token, and behind it.
        region_prompt: "tokens", or one of DESCRIBE_DRAWN.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: str,
        tokens_per_tile: int,
        image_strings: tuple[str, str, str] = IMAGE_STRINGS,
        region_prompt: str = "tokens",
    ):
        self.image_strings, self.region_prompt = image_strings, region_prompt
        self.image_token = image_strings[1]
        self.image_run = re.compile(f"(?:{re.escape(self.image_token)})+")
        self.tokenizer, self.tokens_per_tile = tokenizer, tokens_per_tile
        self.template = chat_template(template)
        self.stop_texts = self.template.get("STOP_WORDS", [])
        # Line breaks inside a stop text do not count: see `sa2va_hf.prediction.StopWords`.
        ends = ["[\r\n]*".join(map(re.escape, text)) for text in self.stop_texts]
        ends += [re.escape(tokenizer.eos_token)] if tokenizer.eos_token else []
        self.ends = [re.compile(end) for end in ends]
        # What the tokenizer puts in front of a text: `<s>` of InternLM2's, nothing of Qwen2's.
        self.bos = tokenizer.encode("")
        self.context_id, seg_id = tokenizer.convert_tokens_to_ids([self.image_token, "[SEG]"])
        answer = tokenizer.encode(FORCED_ANSWER, add_special_tokens=False)
        # Up to [SEG]: its hidden state needs no token after it.
        self.forced_answer = answer[: answer.index(seg_id) + 1]

    def question(self, question: str, num_tiles: int, cells: list[int] | None = None) -> str:
        """Return the user's turn: image, regions of cells[i] tokens or a newline, question."""
        regions = "\n" if cells is None else region_string(cells)
        before, token, behind = self.image_strings
        image = before + token * (num_tiles * self.tokens_per_tile) + behind
        return image + regions + question

    def text(self, question: str, num_tiles: int, cells: list[int] | None = None) -> str:
        """Return `question` in the chat template, ready for the answer."""
        return self.template["INSTRUCTION"].replace(
            "{input}", self.question(question, num_tiles, cells)
        )

    def ids(self, question: str, num_tiles: int, cells: list[int] | None = None) -> list[int]:
        """Return the ids of `text`.

        The many equal tokens of image and regions are inserted after encoding, which saves nearly
        all of its time.
        """
        text = self.text(question, num_tiles, cells)
        # One token stands for each run while the text is encoded.
        lengths = iter([len(run) // len(self.image_token) for run in self.image_run.findall(text)])
        ids = self.bos + _encode(self.tokenizer, self.image_run.sub(self.image_token, text))
        runs = ([i] * next(lengths) if i == self.context_id else [i] for i in ids)
        return [i for run in runs for i in run]

    def describe(self, num_tiles: int, num_cells: int) -> list[int]:
        """Return prompt ids that ask for a caption of one region of `num_cells` grid cells."""
        return self.ids(DESCRIBE, num_tiles, [num_cells])

    def describe_drawn(self, num_tiles: int, box: str = "") -> list[int]:
        """Return prompt ids that ask for a caption of the region that `region_prompt` points at.

        Args:
            box: the region's, in words, for "coordinates".
        """
        return self.ids(DESCRIBE_DRAWN[self.region_prompt].replace("{box}", box), num_tiles)

    def segment(self, phrase: str, num_tiles: int, wording: str = SEGMENT) -> list[int]:
        """Return prompt ids that ask for the mask of `phrase` (lower case, no special tokens)."""
        return self.ids(wording.replace("{x}", phrase), num_tiles)

    def next_turn(self, phrase: str, wording: str) -> list[int]:
        """Return the ids of a further question, which follow those of an answer."""
        text = self.template["INSTRUCTION"].replace("{input}", wording.replace("{x}", phrase))
        pieces = (self.template.get("SEP", ""), text)  # encoded apart, as in the training
        return [i for piece in pieces for i in _encode(self.tokenizer, piece)]

    def answer(self, caption: str) -> list[int]:
        """Return the ids of `caption` as an answer, with its end as in the supervised training."""
        ids = self.tokenizer.encode(
            caption + self.template.get("SUFFIX", ""), add_special_tokens=False
        )
        return ids if self.template.get("SUFFIX_AS_EOS") else [*ids, self.tokenizer.eos_token_id]

    def completion_text(self, ids: list[int]) -> str:
        """Decode a completion and cut it at the stop text."""
        text = self.tokenizer.decode(ids)
        for end in self.ends:
            text = end.split(text, 1)[0]
        return text.strip()
