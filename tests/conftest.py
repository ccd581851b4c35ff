"""Fixtures of many tests: the demo model with a small LoRA, and drawn scenes as a batch."""

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch
from nltk.corpus import wordnet
from tqdm import tqdm

from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.loader import Batches
from rl_train.engine.quantize import CHOICES
from rl_train.policies.sa2va import TRAINABLE, Sa2VAPolicy
from rl_train.policies.sa2va_inputs import Sa2VAPreprocessor
from rl_train.rollout import Batch
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.prompts import PromptBuilder
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import draw_data
from tools.demo.make_demo import SHIPPED_CHECKPOINT
from tools.demo.scenes import make_scene

# Before any fixture of any scope: sums of floats depend on the number of threads.
torch.set_num_threads(1)
tqdm.monitor_interval = 0  # no thread that a fork could find with a lock in its hand

LIBC, PYTEST_PID = ctypes.CDLL(None), os.getpid()
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def end_with_pytest():
    """Have the kernel end a fork of this process with it.

    A fork (a loader's worker) holds the pipe to pytest-xdist open. If it outlives a test that was
    ended by faulthandler_timeout, xdist waits for it and never learns of the end.
    """
    if os.getppid() == PYTEST_PID:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reopen_wordnet():
    """Let a fork open WordNet's files anew: two processes would share one place in each file."""
    vars(wordnet).get("_data_file_map", {}).clear()  # empty as long as NLTK has read nothing


os.register_at_fork(after_in_child=end_with_pytest)
os.register_at_fork(after_in_child=reopen_wordnet)


def pytest_unconfigure(config):
    """Say where the process stands, and end it with status 1, if it does not exit by itself.

    Not in a worker of pytest-xdist, which waits for the others after its last test: one that ends
    meanwhile is taken for a crash, replaced, and the replacement is waited for without end.
    """
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(120, exit=True)


@pytest.fixture(autouse=True)
def no_bar_outlives_its_test():
    """Close the progress bars of runs that a test made fail, which else print after the summary."""
    yield
    for bar in list(getattr(tqdm, "_instances", [])):
        bar.close()


@pytest.fixture(scope="session")
def policy():
    """Factory of float32 policies from the demo checkpoint, with a fresh LoRA of rank 4.

    Its B is 0, so that outputs are the base model's.
    """

    def build(
        groups=tuple(TRAINABLE),
        temperature=1.0,
        max_tiles=1,
        dtype=torch.float32,
        seed=0,
        gradient_checkpointing=False,
    ) -> Sa2VAPolicy:
        torch.manual_seed(seed)
        model = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT, dtype=dtype)
        config = PolicyConfig(
            model_path=str(SHIPPED_CHECKPOINT),
            lora_r=4,
            lora_alpha=8,
            temperature=temperature,
            gradient_checkpointing=gradient_checkpointing,
        )
        processor = Sa2VAProcessor(model.config, max_tiles)
        return Sa2VAPolicy(model, processor, load_tokenizer(SHIPPED_CHECKPOINT), config, groups)

    return build


@pytest.fixture(scope="session")
def scenes() -> list[dict]:
    """Four regions of four scenes, as the readers of `rl_train.data` return them."""
    samples = []
    for i in (0, 5, 8, 21):  # regions of 2, 3, 6 and 1 cells; the third image is 320 x 240
        scene = make_scene(0, 7, i)
        target = max(scene.objects, key=lambda o: o.mask.sum())
        samples.append(
            dict(
                image=scene.image,
                mask=target.mask,
                caption=target.caption,
                category="",
                image_id=f"scene{i}",
            )
        )
    return samples


@pytest.fixture(scope="session")
def prepare():
    """Function of samples and a processor: one Batch of all of them."""

    def build(samples: list[dict], processor: Sa2VAProcessor) -> Batch:
        config = processor.config
        prompts = PromptBuilder(
            load_tokenizer(SHIPPED_CHECKPOINT), config.template, config.tokens_per_tile
        )
        inputs = Sa2VAPreprocessor(processor, prompts, config.llm.max_position_embeddings, 0)
        return Batches(samples, inputs)[list(range(len(samples)))]

    return build


@pytest.fixture(scope="session")
def batch(scenes, prepare) -> Batch:
    """The four scenes, one tile each."""
    return prepare(scenes, Sa2VAProcessor(Sa2VAConfig.from_pretrained(SHIPPED_CHECKPOINT), 1))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The folder of scenes on which short runs train; who changes it draws their own."""
    return draw_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def model(policy) -> Sa2VAPolicy:
    """A policy with all groups and a fresh LoRA, one for each file of tests."""
    return policy()


@pytest.fixture(scope="module")
def images(model, batch):
    """Features of the four scenes."""
    return model.encode(batch)


@pytest.fixture(params=CHOICES)
def choice(request) -> str:
    """A value of --quantize_base."""
    if request.param == "4bit":
        pytest.importorskip("bitsandbytes", reason="it is not installed (extra: quantize)")
    return request.param
