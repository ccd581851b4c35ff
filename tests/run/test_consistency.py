"""Ranks that do not begin alike are all refused, with one sentence that says who has what."""

import os
import shutil
from functools import partial

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_train import train
from rl_train.data.digest import digest
from rl_train.distributed import process_group
from rl_train.run import consistency
from tests.ranks import forked
from tests.runs import CHECKPOINT, flags, run_unmeasured, unmeasured
from tools.demo.make_demo import TRAIN, write_split

one_core = pytest.fixture(autouse=True)(unmeasured)
RUN = dict(loop2_weight=0, eval_samples=1)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of two steps by one process."""
    return run_unmeasured(data, tmp_path_factory.mktemp("whole"), save_steps=1, **RUN)


def on_its_own_machine(argv):
    os.environ["LOCAL_RANK"] = "0"
    train.main(argv)


@pytest.fixture
def refusal(data, tmp_path):
    """Function of two ranks' differing flags: the one sentence that both end with."""

    def sentence(*changes, **same):
        folders = [tmp_path / f"disk{rank}" for rank in range(2)]
        argvs = [
            flags(data, folder, **dict(RUN, batch_size=1, **same) | mine)
            for folder, mine in zip(folders, changes)
        ]
        ended = forked(tmp_path, *(partial(on_its_own_machine, argv) for argv in argvs))
        last = [output.strip().splitlines()[-1] for _, output in ended]
        assert [status for status, _ in ended] == [2, 2], ended[1][1]
        assert last[0] == last[1] and last[0].startswith("rl_train: "), last
        assert not any("Traceback" in output for _, output in ended)
        assert not any((folder / "config.json").exists() for folder in folders)
        return last[0]

    return sentence


def test_a_machine_that_is_a_checkpoint_behind(refusal, whole, tmp_path):
    shutil.copytree(whole / "checkpoint_step_2", tmp_path / "disk0" / "checkpoint_step_2")
    shutil.copytree(whole / "checkpoint_step_1", tmp_path / "disk1" / "checkpoint_step_1")
    assert refusal({}, {}, resume="auto") == (
        "rl_train: ranks do not begin alike. the checkpoint to resume from: checkpoint_step_2 on "
        "rank 0; checkpoint_step_1 on rank 1. Give all machines the same flags, model and data, "
        "and copy rank 0's latest checkpoint to the others."
    )


@pytest.mark.parametrize(
    "file, what", [("trainables", "weights of the policy"), ("ema", "weights of the teacher")]
)
def test_a_checkpoint_of_another_run_under_the_same_name(refusal, whole, tmp_path, file, what):
    for rank in range(2):
        copy = tmp_path / f"disk{rank}" / "checkpoint_step_1"
        shutil.copytree(whole / "checkpoint_step_1", copy)
    with safe_open(copy / f"{file}.safetensors", "pt") as reader:
        metadata = reader.metadata()  # the base, which is the same
    tensors = load_file(copy / f"{file}.safetensors")
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[-1] += 1e-3
    save_file(tensors, copy / f"{file}.safetensors", metadata)
    sentence = refusal({}, {}, resume="auto")
    assert sentence.startswith(f"rl_train: ranks do not begin alike. {what}: ") and (
        "copy rank 0's latest checkpoint" in sentence
    )


def test_a_checkpoint_that_one_rank_cannot_read(refusal, whole, tmp_path):
    for rank in range(2):
        copy = tmp_path / f"disk{rank}" / "checkpoint_step_1"
        shutil.copytree(whole / "checkpoint_step_1", copy)
    (copy / "ema.safetensors").write_bytes(b"cut")
    sentence = refusal({}, {}, resume="auto")
    assert f"rl_train: rank 1: {copy / 'ema.safetensors'} is missing or damaged: " in sentence


def test_flags_that_differ(refusal):
    sentence = refusal({}, dict(learning_rate=2e-4, num_workers=1))
    assert "--learning_rate: 0.0001 on rank 0; 0.0002 on rank 1. Give all" in sentence
    assert "--num_workers" not in sentence and "--output_dir" not in sentence


def test_a_folder_that_one_machine_lacks(refusal):
    assert refusal({}, dict(data_dir="/nowhere")) == (
        "rl_train: rank 1: --data_dir /nowhere: no such folder"
    )


def test_data_and_models_that_differ(refusal, tmp_path):
    write_split(tmp_path / "other", seed=1, split=TRAIN, num_scenes=20)
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")
    file = next(model.glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))
    sentence = refusal({}, dict(data_dir=tmp_path / "other", model_path=model))
    assert "pictures of the training data: " in sentence
    assert "captions of the training data: " in sentence
    assert "of the evaluation data" not in sentence
    assert "weights of --model_path and --sam_path: " in sentence


def test_a_digest_depends_on_every_bit():
    values = [[], [b"a"], [b"b"], [b"a", b"b"], [b"b", b"a"]]
    assert len({digest(value) for value in values}) == len(values)


def test_alone_nobody_has_to_agree():
    with pytest.raises(ValueError, match="^why$"), process_group.fail_together():
        raise ValueError("why")
    assert process_group.only_local_rank0("why") == "why"


def test_what_one_rank_alone_has_is_named(monkeypatch):
    """Another version of the program has such flags."""
    monkeypatch.setattr(consistency, "gather_objects", lambda _: [{"--a": 1}, {"--a": 1, "--b": 2}])
    with pytest.raises(ValueError, match="--b: None on rank 0; 2 on rank 1. Give"):
        consistency.check_same_on_all_ranks({"--a": 1})
