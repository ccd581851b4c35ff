"""Two ranks that share the base out compute what two ranks with a base each compute.

Though their answers differ in length.
"""

import json
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_train import distributed, sharding, train
from rl_train.engine import Engine
from rl_train.export import export
from rl_train.launch import free_port
from rl_train.policies import lora
from rl_train.sharding import NOTHING, Shards, held_bytes, shared, whole_base
from sa2va_hf import Sa2VAModel
from tests.engine.tiny import train_lora, trained
from tests.ranks import forked
from tests.runs import CHECKPOINT, distance, flags, rollouts, weights
from tools import evaluate

# Rank 0 alone has a sample to measure.
SAME = dict(
    batch_size=1,
    num_generations=3,
    max_completion_length=16,
    eval_samples=1,
    max_steps=2,
    save_steps=1,
    seed=1,
)
# Whose GPUs are told to have no room for the whole base: a layer is gathered for each forward.
CROWDED = ("resumed", "kept")
RUNS = dict(
    whole={},
    shared=dict(shard_base=""),
    resumed=dict(shard_base="", resume="shared/checkpoint_step_1"),
    kept={"shard_base": "", "no-gradient_checkpointing": ""},
)


def work(data: Path, folder: Path, ports: list[str]):
    """What each of two ranks does, in `folder`: RUNS, an evaluation, `use_by_hand`.

    rank_R.json receives its numbers of forwards.
    """
    jobs = {
        name: partial(train.main, flags(data, folder / name, **SAME | changes))
        for name, changes in RUNS.items()
    }
    jobs["evaluated"] = partial(
        evaluate.main,
        [
            "--model_path=shared/checkpoint_step_2",
            f"--data_dir={data / 'heldout'}",
            "--num_samples=1",
            "--batch_size=2",
            "--max_completion_length=16",
            "--num_workers=0",
            "--dtype=float32",
            "--shard_base",
            "--output=measured.json",
        ],
    )
    jobs["by hand"] = use_by_hand
    os.chdir(folder)
    counts, agree = {name: Counter() for name in jobs}, Shards._agree
    decide = Shards.decide

    def counted(shards, number):
        counts[name]["dummy" if shards.in_dummy else "own"] += number != NOTHING
        agree(shards, number)

    def crowded(shards, _):
        shards.fits = False

    Shards._agree = counted
    for name, job in jobs.items():
        Shards.decide = crowded if name in CROWDED else decide
        os.environ["MASTER_PORT"] = ports.pop()
        job()
    Path(f"rank_{os.environ['RANK']}.json").write_text(json.dumps(counts))


@torch.no_grad()
def use_by_hand():
    """A rank's share of the demo checkpoint is half of all layers; parts run in any order."""
    ranks = distributed.init()
    shards = Shards(ranks)
    whole, model = Sa2VAModel.from_pretrained(CHECKPOINT), Sa2VAModel.blank(CHECKPOINT)
    shards.split(model)
    model.load_weights(CHECKPOINT, shards.fill)
    state, shared = model.state_dict(), 0
    for name, tensor in whole.state_dict().items():
        of_layer = name.startswith(("vision_model.encoder.layer.", "language_model.model.layers."))
        assert isinstance(state[name], DTensor) == of_layer, name
        assert torch.equal(state[name].full_tensor() if of_layer else state[name], tensor), name
        if of_layer:
            assert state[name].to_local().nbytes == tensor.nbytes / 2, name
            shared += tensor.nbytes
    assert held_bytes(model) == (held_bytes(whole)[0] - shared / 2, held_bytes(whole)[0])

    embeds = torch.randn(
        2, 5, model.config.llm.hidden_size, generator=torch.Generator().manual_seed(ranks.rank)
    )
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(ranks.rank))
    for job in ("see say say say say", "say see see")[ranks.rank].split():
        one, other = (
            m.vision_features(pixels)
            if job == "see"
            else m.language_model.model(inputs_embeds=embeds).last_hidden_state
            for m in (model, whole)
        )
        assert torch.equal(one, other)
    shards.join()
    gathered_once(shards, model, whole)
    distributed.close()


def gathered_once(shards, model, whole):
    """Within `whole_base` weights are those of a whole model, and nobody waits for anybody.

    There the fast sampler runs, of whose matrices nothing is left afterwards, whatever happened.
    """
    policies = {}
    for name, of_one, its_shards in (("one", model, shards), ("other", whole, None)):
        torch.manual_seed(0)
        lora.attach_lora(of_one.language_model, 4, 8)
        train_lora(of_one)
        how = dict(pad_id=0, gradient_checkpointing=True, lender=its_shards)
        engine = Engine(of_one.language_model, **how)
        assert engine.fast_on == ("cuda",)  # a base that is shared out is no reason against it
        engine.fast_on = ("cpu",)
        trainable = trained(of_one)
        policies[name] = SimpleNamespace(engine=engine, shards=its_shards, trainable=trainable)
    state = model.state_dict()
    rank, width = shards.ranks.rank, model.config.llm.hidden_size
    prompts = torch.randn(1, 5, width), torch.ones(1, 5, dtype=torch.long)
    pixels = torch.randn(1, 3, 224, 224)
    sizes = dict(num_generations=2, max_new_tokens=8 - 6 * rank, stop=None)

    def answer(policy):
        uniforms = torch.rand(2, sizes["max_new_tokens"], generator=torch.manual_seed(rank))
        return policy.engine.generate(*prompts, **sizes, uniforms=uniforms)

    class Stop(Exception):
        pass

    for ending in (None, Stop, None):
        met = []
        with pytest.raises(Stop) if ending else nullcontext():
            with whole_base(policies["one"]):
                seen = model.state_dict()
                for name, tensor in whole.state_dict().items():
                    assert type(seen[name]) is torch.Tensor and torch.equal(seen[name], tensor)
                collectives = (dist, "all_reduce"), (dist, "all_gather_into_tensor")
                with pytest.MonkeyPatch.context() as patch:
                    for module, name in collectives:
                        patch.setattr(module, name, lambda *_, **__: met.append(name))
                    one, other = (answer(policy) for policy in policies.values())
                    assert torch.equal(one.ids, other.ids) and torch.equal(one.logp, other.logp)
                    features = [m.vision_features(pixels) for m in (model, whole)]
                    assert torch.equal(*features) and met == []
                assert policies["one"].engine._fused is not None
                if ending:
                    raise ending
        assert policies["one"].engine._fused is None, ending
        after = model.state_dict()
        for name, tensor in state.items():
            assert type(after[name]) is type(tensor), name
            assert held(after[name]).nbytes == held(tensor).nbytes, name
        engine = policies["one"].engine
        hidden = engine.read(*prompts)  # by its own modules again, layer by layer
        assert engine._fused is None
        assert torch.allclose(hidden, policies["other"].engine.read(*prompts), atol=1e-4)
        update_by_layers(policies, prompts)
    if rank == 1:  # one without room is enough
        sharding.free_memory = lambda device: (0, 1)
    shards.decide(policies["one"])
    with whole_base(policies["one"]):
        assert isinstance(next(iter(shared(shards.layers[0]).values())), DTensor)
    shards.join()


def update_by_layers(policies, prompts):
    """The update's forward and backward gather a layer each time, by the fast engine's matrices."""
    ids = torch.arange(6).view(2, 3)
    answers = torch.tensor([0, 0]), ids, torch.ones_like(ids, dtype=torch.bool)
    found = []
    for policy in policies.values():
        with torch.enable_grad():
            logp = policy.engine.score(*prompts, *answers).logp
            logp.sum().backward()
        found.append((logp, [p.grad for p in policy.trainable.values()]))
        for p in policy.trainable.values():
            p.grad = None
    fused = policies["one"].engine._fused
    assert fused.lend and all(one.weight is None for parts in fused.layers for one in parts[0])
    assert torch.equal(found[0][0], found[1][0]) and found[0][1]
    assert all(map(torch.equal, *(gradients for _, gradients in found)))


def held(tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def ended(data, tmp_path_factory):
    """The folder in which two ranks did their `work`, within the time."""
    folder = tmp_path_factory.mktemp("runs")
    ports = [str(free_port()) for _ in range(len(RUNS) + 2)]
    ended = forked(folder, *[lambda: work(data, folder, ports)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize("name", ["shared", "resumed", "kept"])
def test_training_is_that_of_whole_bases(ended, name):
    for step in (1, 2)[name == "resumed" :]:
        for file in ("trainables.safetensors", "ema.safetensors"):
            assert (
                distance(weights(ended / name, step, file), weights(ended / "whole", step, file))
                == 0
            ), (step, file)
    lines = [line for line in rollouts(ended / "whole") if name != "resumed" or line["step"] == 1]
    assert rollouts(ended / name) == lines  # rewards and advantages too
    values = [
        json.loads((ended / run / "evaluation" / "step_2.json").read_text())["values"]
        for run in ("whole", name)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("free, fits", [(61, True), (60, False)])
def test_layers_are_gathered_at_once_where_they_fit(free, fits):
    """50 bytes of layers, 3 more sets of 1 byte that train, a tenth of 80."""
    assert sharding.has_room(layers=50, trained=1, free=free, total=80) is fits


def test_what_is_learnt_is_not_nothing(ended):
    assert distance(weights(ended / "shared", 2), weights(ended / "shared", 1)) > 1e-6


def test_ranks_differ_in_their_forwards_but_run_equally_many(ended):
    files = [ended / "shared" / "rollouts" / f"rank{rank}.jsonl" for rank in range(2)]
    lengths = torch.tensor(
        [
            [len(json.loads(line)["completion"]) for line in file.read_text().split("\n")[:-1]]
            for file in files
        ]
    )
    longest = lengths.view(2, 4, 3).amax(2)  # (ranks, rollouts), in letters
    assert (longest[0] != longest[1])[::2].all()  # loop 1's; loop 2's have one wording
    first, second = (json.loads((ended / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first.pop("whole") == second.pop("whole") == {}
    for name in first:
        assert sum(first[name].values()) == sum(second[name].values()), name
        gathered_once = name in ("shared", "evaluated")
        apart = first[name]["own"] != second[name]["own"]  # else nothing was tried
        assert apart != gathered_once, name
    assert first["shared"]["own"] > 0  # the updates'
    assert first["evaluated"] == dict(own=0)
    both = 2 * 3  # forwards of `gathered_once` that both make
    assert first["by hand"] == dict(own=5 + both, dummy=2)
    assert second["by hand"] == dict(own=3 + both, dummy=4)


def test_a_checkpoint_is_that_of_whole_bases(ended, tmp_path):
    folders = [ended / run / "checkpoint_step_2" for run in ("whole", "shared")]
    states = [
        torch.load(folder / "training_state.pt", weights_only=True)["optimizer"]["state"]
        for folder in folders
    ]
    assert all(
        torch.equal(a[key], b[key])
        for a, b in zip(states[0].values(), states[1].values(), strict=True)
        for key in a
    )
    adapters = [
        (folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in folders
    ]
    assert adapters[0] == adapters[1]
    export(folders[1], tmp_path / "out")  # in one process
    assert (
        held_bytes(Sa2VAModel.from_pretrained(tmp_path / "out"))[0]
        == held_bytes(Sa2VAModel.from_pretrained(CHECKPOINT))[0]
    )


def test_evaluate_with_a_shared_base(ended):
    measured = json.loads((ended / "measured.json").read_text())["values"]
    recorded = json.loads((ended / "whole" / "evaluation" / "step_2.json").read_text())["values"]
    assert {name: measured[name] for name in recorded} == recorded
