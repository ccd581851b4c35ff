"""Folders of a tiny Qwen2.5-VL and a tiny SAM2."""

import pytest

from tests.policies.tiny_points import tiny_policy, write_qwen, write_sam


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def sam(tmp_path_factory):
    return write_sam(tmp_path_factory.mktemp("sam"))


@pytest.fixture(scope="module")
def points(qwen, sam):
    """A policy with a LoRA that does something, one for each file of tests."""
    return tiny_policy(qwen, sam)
