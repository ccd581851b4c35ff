"""Two ranks that share the base compute what two ranks with a whole base each compute, to the bit.

By the model's own modules and by the engine's matrices, though ranks sample answers of different
lengths and have different numbers of micro-batches and of samples to evaluate.
"""

import gc
import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from rl_train import cli, loss, sft, train
from rl_train.distributed import process_group
from rl_train.distributed.fsdp import ShardedLayers, held_bytes, host_mesh, ranks_of_host
from rl_train.engine import Engine, decode
from rl_train.evaluation import evaluate
from rl_train.loggers import tensorboard
from rl_train.run import start
from rl_train.run.memory_estimate import standing_memory
from tests import supervised
from tests.distributed.test_gradient_average import SAME
from tests.engine.tiny import fast as fast_path
from tests.engine.tiny import prompts, tiny_llm
from tests.ranks import forked, free_port, rank_environments, start_fork
from tests.runs import (
    complaint_of,
    distance,
    flags,
    measure,
    on_one_core,
    picture,
    rollouts,
    weights,
)

SHARDED = dict(fsdp="")
# Runs by the model's own modules; evaluations are not measured.
BY_MODULES = dict(
    whole={},
    sharded=SHARDED,
    sharded_from_whole=SHARDED | dict(resume="whole/checkpoint_step_1"),
    whole_from_sharded=dict(resume="sharded/checkpoint_step_1"),
    uneven_whole=dict(num_iterations=2, max_steps=1),
    uneven=SHARDED | dict(num_iterations=2, max_steps=1),
)
# Runs by the engine's matrices. Rank 0 alone has a sample to evaluate.
FAST = dict(
    whole=dict(merge_at_end="policy"),
    sharded=SHARDED | dict(merge_at_end="policy"),
    resampled_whole=dict(resample_equal_groups=1, kl_coef=0, max_steps=1),
    resampled=SHARDED | dict(resample_equal_groups=1, kl_coef=0, max_steps=1),
    # DDP's second forward after a backward is a collective: two updates.
    uneven_whole=dict(num_iterations=2, max_steps=1),
    uneven=SHARDED | dict(num_iterations=2, max_steps=1),
    supervised_whole={},
    supervised=SHARDED,
)
SFT = dict(batch_size=2, max_steps=2, save_steps=1, learning_rate=1e-3, seed=1)


def larger_by_rank(rows: slice, size: int, real=loss.micro_batches) -> list[slice]:
    """Cut rows for micro-batches of 2 on rank 0, of 3 on rank 1."""
    return real(rows, size + int(os.environ["RANK"]))


def work(data: Path, folder: Path, ports: list[str], runs: dict[str, dict], fast: bool):
    """Do the runs on this rank; what was seen of each goes to rank_R.json."""
    os.chdir(folder)
    start.CALIBRATION_SAMPLES, tensorboard.rollout_picture = 8, picture
    if fast:
        # Whole bases sample one role at a time too, as those in shards do: to the bit.
        decode.MAX_GROWTH = -1.0
        init = Engine.__init__

        def init_fast(engine, *args, **settings):
            init(engine, *args, **settings)
            engine.fast_on = ("cpu",)

        Engine.__init__ = init_fast
    else:
        evaluate.measure = measure
    seen, build, take_part, cut = {}, train.start_run, ShardedLayers.take_part, loss.micro_batches

    def counted(layers):
        seen[name]["taken_part"] += 1
        take_part(layers)

    def started(*args):
        run = build(*args)
        policy = run.state.policy
        seen[name] = dict(facts(policy), taken_part=0)
        seen[name]["policy"] = policy
        return run

    train.start_run, ShardedLayers.take_part = started, counted
    for name, changes in runs.items():
        os.environ["MASTER_PORT"] = ports.pop()
        if name.startswith("supervised"):
            supervised.run(data, folder / name, **SFT | changes)
        else:
            loss.micro_batches = larger_by_rank if name.startswith("uneven") else cut
            train.main(flags(data, folder / name, **SAME | changes))
        engine = seen[name].pop("policy").engine
        seen[name]["is_fast"] = engine._fused is not None
        if engine._fused and engine.sharded:
            # The last thing that ran is the checkpoint, before which all layers were freed.
            assert all(layer.copied.qkv is None for layer in engine._fused.layers)
    Path(f"rank_{os.environ['RANK']}.json").write_text(json.dumps(seen))


def facts(policy) -> dict:
    """Bytes of the matrices that --fsdp shards, on this rank and in all, and the estimate."""
    policy.reshard_base()  # the start has calibrated loop 2
    layers = policy.model.language_model.model.layers, policy.model.vision_model.encoder.layer
    frozen = [[p for p in part.parameters() if not p.requires_grad] for part in layers]
    matrices = [[p for p in part if p.ndim == 2] for part in frozen]
    return dict(
        held=[held_bytes(part) for part in matrices],
        all=[sum(p.numel() * 4 for p in part) for part in matrices],
        whole=[all(not isinstance(p, DTensor) for p in part if p.ndim < 2) for part in frozen],
        standing=standing_memory(policy),
    )


def finished(data: Path, folder: Path, runs: dict[str, dict], fast: bool) -> Path:
    """The folder in which two ranks did the runs."""
    ports = [str(free_port()) for _ in runs]
    ended = forked(folder, *[lambda: work(data, folder, ports, runs, fast)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    return folder


@pytest.fixture(scope="module")
def by_modules(data, tmp_path_factory):
    return finished(data, tmp_path_factory.mktemp("modules"), BY_MODULES, fast=False)


@pytest.fixture(scope="module")
def fast(data, tmp_path_factory):
    return finished(data, tmp_path_factory.mktemp("fast"), FAST, fast=True)


def seen_by(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"rank_{rank}.json").read_text())


def assert_equal(one: Path, other: Path, steps=(1, 2)):
    """Weights, teacher, optimizer, rollouts with their rewards, and evaluations are the same."""
    for step in steps:
        for file in ("trainables.safetensors", "ema.safetensors"):
            if (one / f"checkpoint_step_{step}" / file).exists():
                a, b = (weights(folder, step, file) for folder in (one, other))
                assert all(torch.equal(a[name], b[name]) for name in a | b), (step, file)
        states = [
            torch.load(folder / f"checkpoint_step_{step}" / "training_state.pt", weights_only=True)
            for folder in (one, other)
        ]
        moments = [state["optimizer"]["state"] for state in states]
        for number, moment in moments[0].items():
            assert all(torch.equal(moment[key], moments[1][number][key]) for key in moment)
    lines = [
        [line for line in rollouts(folder) if line["step"] + 1 in steps] for folder in (one, other)
    ]
    assert lines[0] == lines[1]
    files = [folder / "evaluation" / f"step_{steps[-1]}.json" for folder in (one, other)]
    values = [json.loads(file.read_text())["values"] for file in files]
    assert values[0] == values[1]


@pytest.mark.parametrize("name", ["sharded", "sharded_from_whole", "whole_from_sharded"])
def test_training_by_modules_is_that_of_whole_bases(by_modules, name):
    assert not seen_by(by_modules, 0)[name]["is_fast"]
    assert_equal(by_modules / "whole", by_modules / name, (1, 2) if name == "sharded" else (2,))
    assert distance(weights(by_modules / name, 2), weights(by_modules / "whole", 1)) > 1e-6


@pytest.mark.parametrize("name", ["sharded", "supervised"])
def test_training_by_matrices_is_that_of_whole_bases(fast, name):
    whole = fast / ("whole" if name == "sharded" else f"{name}_whole")
    assert seen_by(fast, 0)[name]["is_fast"]
    if name == "supervised":  # it has no rollouts
        for step in (1, 2):
            assert distance(weights(fast / name, step), weights(whole, step)) == 0
    else:
        assert_equal(whole, fast / name)
    assert distance(weights(fast / name, 2), weights(fast / name, 1)) > 1e-6


@pytest.mark.parametrize("way", ["by_modules", "fast"])
def test_ranks_with_different_numbers_of_micro_batches(way, request):
    """Of 2 loops with 3 rows each rank 0 has 4 micro-batches, rank 1 has 2, in both updates."""
    folder = request.getfixturevalue(way)
    assert_equal(folder / "uneven_whole", folder / "uneven", (1,))
    assert [seen_by(folder, rank)["uneven"]["taken_part"] for rank in range(2)] == [0, 2 * 2]
    assert seen_by(folder, 1)["sharded"]["taken_part"] == 0


def test_ranks_that_replace_different_numbers_of_groups(fast):
    assert_equal(fast / "resampled_whole", fast / "resampled", (1,))
    lines = [
        (fast / "resampled" / "rollouts" / f"rank{rank}.jsonl").read_text().count("\n")
        for rank in range(2)
    ]
    assert sum(lines) > 2 * 2 * 3, "no group was replaced"


def test_the_merged_model_has_the_whole_base(fast):
    models = [
        load_file(fast / n / "final_model" / "model.safetensors") for n in ("whole", "sharded")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0] | models[1])


@pytest.mark.parametrize("way", ["by_modules", "fast"])
def test_a_rank_holds_half_of_the_layers(way, request):
    folder = request.getfixturevalue(way)
    for rank in range(2):
        whole, sharded = (seen_by(folder, rank)[name] for name in ("whole", "sharded"))
        assert whole["held"] == whole["all"] == sharded["all"]
        assert sharded["held"] == [size / 2 for size in sharded["all"]]
        assert sharded["whole"] == [True, True]  # norms and biases
        before, after = whole["standing"], sharded["standing"]
        assert before["frozen base"] - after["part of the frozen base"] == sum(sharded["held"])
        # The engine's matrices take the place of the part; the model's own modules do not.
        lent = sharded["held"][0] if way == "fast" else 0
        assert after["LLM gathered to sample"] == sharded["all"][0] - lent


def check_hosts(folder: Path):
    """Of four ranks on two hosts each pair shares two layers, and no other rank's are read."""
    ranks = process_group.init()
    torch.manual_seed(0)
    parent = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).requires_grad_(False)
    weight = parent[0].weight.clone() + ranks.rank // 2  # hosts differ, to be told apart
    parent[0].weight.copy_(weight)
    mesh = host_mesh(ranks.device)
    assert mesh.size() == ranks_of_host() == 2
    sharded = ShardedLayers(parent, parent, mesh)
    assert len(parent[0].weight.to_local()) == (3, 2)[ranks.rank % 2] and sharded.nbytes == 4 * 30
    assert sharded.pack() is None  # rank 1's parts are padded
    sharded.unshard()
    assert sharded.is_whole and torch.equal(parent[0].weight, weight)
    # No collective: one rank alone may call it.
    if ranks.rank == 1:
        assert parent(torch.ones(1, 3)).shape == (1, 3)
    sharded.reshard()
    assert isinstance(parent[0].weight, DTensor)
    process_group.close()


def test_layers_are_shared_inside_a_host(tmp_path):
    where = rank_environments()[0] | dict(WORLD_SIZE="4")
    places = [where | dict(RANK=str(rank), LOCAL_RANK=str(rank % 2)) for rank in range(4)]
    children = [
        start_fork(tmp_path / f"output{rank}", place, lambda: check_hosts(tmp_path))
        for rank, place in enumerate(places)
    ]
    ended = [child() for child in children]
    assert [status for status, _ in ended] == [0] * 4, ended


def wait_for_live_bytes(at_most: float, seconds: float = 10) -> int:
    """Return `count_live_bytes` as soon as it is at most `at_most`, or after some seconds.

    On a loaded machine a thread of gloo drops the last result of a collective only after `wait` of
    it has returned.
    """
    deadline = time.monotonic() + seconds
    while (held := count_live_bytes()) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def count_live_bytes() -> int:
    """Return bytes of all storages that a tensor of this process reaches, FSDP2's own included."""
    gc.collect()
    # A DTensor has no storage of its own; its shard is a tensor too. Nor have tensors of traces
    # that an earlier test may have left to this process.
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    traced = torch._C._functorch.is_functorch_wrapped_tensor, torch._is_functional_tensor
    storages = [t.untyped_storage() for t in tensors if not any(test(t) for test in traced)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def matrices_of(fused) -> list[torch.Tensor]:
    return [group.live.weight.clone() for layer in fused.layers for group in layer.linears]


def parts_of(fused) -> list[torch.Tensor]:
    groups = [group for layer in fused.layers for group in layer.linears]
    return [base.weight.to_local().clone() for group in groups for base in group.bases]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def check_memory():
    """No rank holds its part beside the gathered layers, nor anything but its part after them."""
    ranks = process_group.init()
    llm = tiny_llm(num_hidden_layers=6)
    engine = Engine(llm, pad_id=0, gradient_checkpointing=True)
    with fast_path(engine):
        expected = matrices_of(engine.fused(llm.lm_head.weight))
        engine.release()
        whole = count_live_bytes()
        engine.shard(host_mesh(ranks.device))
        fused, parts = engine._fused, parts_of(engine._fused)
        part_bytes = sum(part.nbytes for part in parts)
        assert part_bytes == engine.sharded.nbytes / 2
        # FSDP2 does not hold the parts as it made them. The engine has padded lm_head.
        others = whole - engine.sharded.nbytes + 0.1 * part_bytes
        rest = wait_for_live_bytes(others + 2 * part_bytes) - part_bytes  # `parts` are copies
        assert rest - part_bytes < others
        for _ in range(2):
            engine.unshard()
            copies = [group.copied for layer in fused.layers for group in layer.linears]
            tensors = [t for c in copies for t in (c.weight, c.bias, c.joined_b) if t is not None]
            gathered = sum(tensor.nbytes for tensor in tensors)
            largest = max(copied.weight.nbytes for copied in copies)
            # Of the part's memory a remainder, in which no further matrix fits, is empty.
            held = wait_for_live_bytes(rest + gathered + largest - 1) - rest
            assert 0 <= held - gathered < largest < part_bytes
            del copies, tensors
            assert all_equal(matrices_of(fused), expected)
            engine.reshard()
            assert wait_for_live_bytes(rest + part_bytes) == rest + part_bytes
            assert all_equal(parts_of(fused), parts)
    process_group.close()


def check_errors():
    """An error while layers are gathered, or are being gathered, loses no weights."""
    ranks = process_group.init()
    llm = tiny_llm(num_hidden_layers=6)
    engine = Engine(llm, pad_id=0, gradient_checkpointing=True)
    with fast_path(engine):
        engine.shard(host_mesh(ranks.device))
        fused, parts = engine._fused, parts_of(engine._fused)
        engine.unshard()
        expected = matrices_of(fused)
        with pytest.raises(ValueError, match="uniforms"):
            sampled = dict(num_generations=2, max_new_tokens=4, stop=None)
            engine.generate(*prompts(llm), **sampled, uniforms=torch.zeros(1, 1))
        engine.reshard()
        assert all_equal(parts_of(fused), parts)
        for number in range(6):
            fused.layers[number].gather = lambda with_all: 1 / 0
            with pytest.raises(ZeroDivisionError):
                engine.unshard()
            del fused.layers[number].gather
            engine.reshard()
            assert all_equal(parts_of(fused), parts), number
        with pytest.raises(ZeroDivisionError), torch.no_grad(), fused.gathered(3, then=4):
            1 / 0
        engine.reshard()
        engine.unshard()
        assert all_equal(matrices_of(fused), expected)
    process_group.close()


def check_order():
    """A forward without `unshard`, or with gradient before `reshard`, is an error and no hang."""
    ranks = process_group.init()
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, gradient_checkpointing=True)
    engine.shard(host_mesh(ranks.device))
    with pytest.raises(AssertionError, match=r"call unshard\(\) before"):
        engine.last_hidden_states(*prompts(llm))
    engine.unshard()
    assert engine.last_hidden_states(*prompts(llm)).isfinite().all()
    ids = torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(AssertionError, match=r"reshard\(\) before"):
        engine.score(*prompts(llm), torch.arange(3), ids, ids == 0)
    with pytest.raises(AssertionError, match="load the base anew"):
        engine.release()
    process_group.close()


def check_graphs():
    """Graphs of the sampler are kept while the gathered layers lie where they lay."""
    ranks = process_group.init()
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, gradient_checkpointing=True)
    engine.shard(host_mesh(ranks.device))
    sampled = dict(num_generations=2, max_new_tokens=4 + ranks.rank, stop=None)
    with fast_path(engine):
        engine.unshard()
        engine.generate(*prompts(llm), **sampled)
        graphs = engine._decoder.graphs
        assert len(graphs) == 1
        for addresses in (engine.gathered_at, [0]):
            engine.reshard()
            engine._fused.addresses = lambda addresses=addresses: addresses
            engine.unshard()
            assert (engine._decoder.graphs is graphs) == (addresses != [0])
    process_group.close()


@pytest.mark.parametrize("check", [check_memory, check_errors, check_order, check_graphs])
def test_on_two_ranks(check, tmp_path):
    ended = forked(tmp_path, check, check)
    assert [status for status, _ in ended] == [0, 0], ended


# Refusals


@pytest.fixture
def one_core(monkeypatch):
    yield from on_one_core(monkeypatch)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ["one process on a host", "start one for each GPU", "leave --fsdp out"]),
        (dict(quantize_base="4bit"), ["--quantize_base 4bit", "leave one of them out"]),
        ({"no-gradient_checkpointing": ""}, ["--no-gradient_checkpointing", "leave one of"]),
    ],
)
def test_refused_with_the_remedy(data, tmp_path, one_core, changes, words):
    sentence = complaint_of(flags(data, tmp_path / "run", fsdp="", **changes))
    assert sentence.startswith("rl_train: --fsdp: ") and all(word in sentence for word in words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("group", ["vision", "language_model"])
def test_layers_that_train_are_not_sharded(data, tmp_path, group):
    argv = supervised.line(data, tmp_path, fsdp="", trainable_modules=[group, "mlp1"])
    with pytest.raises(SystemExit, match=rf"--fsdp: .* --trainable_modules {group} trains them"):
        cli.parse(argv, sft.SFT)


def test_regions_that_are_drawn_are_refused(policy):
    drawn = policy()
    drawn.region_prompt = "outline"
    with pytest.raises(ValueError, match="--fsdp: .*--region_prompt outline.* leave --fsdp out"):
        drawn.shard_base()
