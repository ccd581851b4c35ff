"""Folders of a tiny Qwen2.5-VL, a tiny Qwen3-VL and a tiny SAM2."""

import pytest

from tests.policies.tiny_points import WRITERS, tiny_policy, write_sam


@pytest.fixture(scope="session")
def qwens(tmp_path_factory):
    """{model_type: folder}."""
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


@pytest.fixture(scope="session")
def qwen(qwens):
    return qwens["qwen2_5_vl"]


@pytest.fixture(scope="session")
def sam(tmp_path_factory):
    return write_sam(tmp_path_factory.mktemp("sam"))


@pytest.fixture(scope="module")
def points(qwen, sam):
    """A policy with a LoRA that does something, one for each file of tests."""
    return tiny_policy(qwen, sam)
