"""Fixtures of the engine's tests."""

import pytest

from rl_train.engine.quantize import CHOICES


@pytest.fixture(params=CHOICES)
def choice(request):
    if request.param == "4bit":
        pytest.importorskip("bitsandbytes", reason="it is not installed (extra: quantize)")
    return request.param
