"""InternLM2's tokenizer from `tokenizer.model` against sentencepiece, and wrong folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import import_protobuf

from rl_train.engine import StopText
from sa2va_hf.prediction import StopWords
from sa2va_hf.prompts import PromptBuilder
from sa2va_hf.templates import token_ids
from sa2va_hf.tokenizer import load_tokenizer

FOLDER = Path(__file__).parent / "internlm2_tokenizer"
IDS = json.loads((FOLDER / "ids.json").read_text())


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    return tmp_path / "model"


def change_model(folder, **normalizer):
    """Write tokenizer.model with other settings of its normalizer."""
    proto = import_protobuf().ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    for name, value in normalizer.items():
        setattr(proto.normalizer_spec, name, value)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    return proto


@pytest.mark.parametrize("settings", [{}, *(row[0] for row in IDS[9::9])], ids=str)
def test_ids_are_those_of_sentencepiece(folder, settings):
    change_model(folder, **settings)
    tokenizer = load_tokenizer(folder)
    rows = [row for row in IDS if row[0] == settings]
    assert len(rows) == 9
    for _, text, ids in rows:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        if not settings:
            assert tokenizer.decode(ids) == "<s>" + text


def test_special_tokens(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.padding_side == "left" and len(tokenizer) == 534
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]) == [3, 4]
    assert token_ids(tokenizer, 534)["[SEG]"] == 529
    with pytest.raises(ValueError, match="ids beyond the model's vocabulary of 529"):
        token_ids(tokenizer, 529)
    assert tokenizer.decode([1, 529, 3], skip_special_tokens=True) == ""
    again = tokenizer.save_pretrained(folder.parent / "again")
    assert again and load_tokenizer(folder.parent / "again").encode("a [SEG]")[0] == 1


def test_prompts_begin_with_bos(folder):
    tokenizer = load_tokenizer(folder)
    prompts = PromptBuilder(tokenizer, "internlm2_chat", tokens_per_tile=4)
    for ids, text in (
        (prompts.describe(1, 3), prompts.text("Please generate", 1, [3])),
        (prompts.segment("the red box", 1), prompts.text("Please segment the red box", 1)),
    ):
        assert ids[0] == 1 and 1 not in ids[1:]
        assert tokenizer.decode(ids[1:]).startswith(
            text.removesuffix("<|im_end|>\n<|im_start|>")[:60]
        )
    assert prompts.segment("the red box", 1) == tokenizer.encode(
        prompts.text("Please segment the red box in this image.", 1)
    )
    answer = prompts.answer("It is [SEG].")
    assert answer[-1] == 3 and 1 not in answer
    assert prompts.completion_text([*answer, 9]) == "It is [SEG]."


def test_answers_stop_as_their_text_does(folder):
    """The table of the engine and the decoded text, token by token."""
    tokenizer = load_tokenizer(folder)
    words = ["<|im_end|>", "is it"]
    stop, by_text = StopText(tokenizer, words, 540), StopWords(tokenizer, words)
    rng = np.random.default_rng(0)
    texts = ["It is it", "is\nit", "a<|im_end|>", "x<0x0A>", "is[SEG] it", "is\n it is  it is it"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids += rng.integers(3, 520, 3).tolist()
        state = np.int64(0)
        for n, token in enumerate(ids, 1):
            state = stop.table[token, state].item()
            assert (state >= stop.first_stop_state) == bool(
                by_text(np.array([ids[:n]]), None)[0]
            ), ids[:n]
            if state >= stop.first_stop_state:
                break


def test_a_damaged_model_is_refused(folder):
    (folder / "tokenizer.model").write_bytes(b"no protobuf")
    with pytest.raises(ValueError, match="tokenizer.model is damaged: it is no model of sentenc"):
        load_tokenizer(folder)


def test_a_unigram_model_is_refused(folder):
    proto = change_model(folder)
    proto.trainer_spec.model_type = 1
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="tokenizer.model is not a BPE model"):
        load_tokenizer(folder)


def test_an_added_token_of_another_id_is_refused(folder):
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["added_tokens_decoder"]["525"]
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="</ref> has id 526, but the next free one .* is 525"):
        load_tokenizer(folder)


def test_without_its_model_the_tokenizer_is_refused(folder):
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=f"--model_path {folder}: "):
        load_tokenizer(folder)


def test_added_tokens_of_an_older_folder(folder):
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    added = fields.pop("added_tokens_decoder")
    file.write_text(json.dumps(fields))
    tokens = {token["content"]: int(i) for i, token in added.items()}
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    for _, text, ids in IDS[:9]:
        assert load_tokenizer(folder).encode(text) == ids
