"""A folder without a tokenizer is named."""

import pytest

from sa2va_hf.tokenizer import load_tokenizer


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"--model_path {tmp_path}"):
        load_tokenizer(tmp_path)
