"""Parts of a run: its length, its trainables and their rates."""

import pytest
import torch

from rl_train import cli
from rl_train.distributed.process_group import RankInfo
from rl_train.policies.sa2va import FLOAT32_MODULES
from rl_train.run.lr_schedule import cosine_schedule, follow_new_length
from rl_train.run.memory_estimate import standing_memory
from rl_train.run.start import start_run
from tests.runs import flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)
ALONE = RankInfo(0, 1, torch.device("cpu"))


def test_length_from_epochs(data, tmp_path):
    config = cli.parse(flags(data, tmp_path, max_steps=0, num_train_epochs=0.7, batch_size=4))
    assert start_run(config, ALONE).max_steps == 15  # ceil(0.7 * 21 whole steps of 84 regions)


def test_learning_rate_schedule():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = cosine_schedule(optimizer, 10, 0.2)
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5) and rates[10] == pytest.approx(0.0)


def test_a_run_of_another_length_takes_its_rates_at_once():
    """A run of 4 steps is loaded at its end, where its rate is 0, to go on to 8."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    short, long = (torch.optim.SGD([parameter], lr=1.0) for _ in range(2))
    saved, schedule = cosine_schedule(short, 4, 0.0), cosine_schedule(long, 8, 0.0)
    for _ in range(4):
        short.step()
        saved.step()
    long.load_state_dict(short.state_dict())
    schedule.load_state_dict(saved.state_dict())
    assert long.param_groups[0]["lr"] == pytest.approx(0)
    follow_new_length(schedule)
    assert long.param_groups[0]["lr"] == schedule.get_last_lr()[0] == pytest.approx(0.5)


def test_the_teacher_s_decay_counts_the_updates_of_the_run(data, tmp_path):
    """Those before the step too, whether they were done, skipped or done before a resume."""
    changes = dict(max_steps=100, num_iterations=2)
    built = start_run(cli.parse(flags(data, tmp_path, **changes)), ALONE)
    assert [built.teacher_decay(i) for i in (0, 1)] == [1 / 2, 2 / 3]
    built.state.step = 3
    assert [built.teacher_decay(i) for i in (0, 1)] == [7 / 8, 8 / 9]
    built.state.step = 99
    assert built.teacher_decay(0) ** 20 == pytest.approx(0.5)  # .1 of 200 updates
    given = start_run(cli.parse(flags(data, tmp_path / "given", ema_decay=0)), ALONE)
    assert given.teacher_decay(0) == 0


@pytest.mark.parametrize("rate, groups", [(None, 1), (1e-4, 1), (1e-3, 2)])
def test_the_prompt_embedding_has_a_rate_of_its_own(data, tmp_path, rate, groups):
    config = cli.parse(flags(data, tmp_path, learning_rate=1e-4, text_hidden_fcs_lr=rate))
    built = start_run(config, ALONE).state
    assert len(built.optimizer.param_groups) == groups
    rate_of = {
        id(p): group["initial_lr"]
        for group in built.optimizer.param_groups
        for p in group["params"]
    }
    assert (
        len(rate_of)
        == sum(len(group["params"]) for group in built.optimizer.param_groups)
        == len(built.policy.trainable)
    )
    for name, parameter in built.policy.trainable.items():
        own = built.policy.group_of[name] == "text_hidden_fcs"
        assert rate_of[id(parameter)] == ((rate or 1e-4) if own else 1e-4), name
    assert built.scheduler.base_lrs[0] == 1e-4  # what the curve `learning_rate` shows
    assert all(
        group["weight_decay"] == config.optim.weight_decay for group in built.optimizer.param_groups
    )


def test_memory_that_a_run_holds(policy):
    """Roles cost banks of the trainables, not copies of the model."""
    model = policy(groups=("lora", "mlp1"), dtype=torch.bfloat16)
    sizes = standing_memory(model)
    trainable = 4 * sum(p.numel() for p in model.trainable.values())
    assert sizes["trainable weights"] == sizes["gradients"] == trainable
    assert sizes["optimizer"] == sizes["teacher and reference"] == 2 * trainable
    kept = standing_memory(model, copies=())
    assert list(kept) == ["frozen base", "trainable weights", "optimizer", "gradients"]
    frozen = {n: p for n, p in model.model.named_parameters() if n not in model.trainable}
    float32 = sum(p.numel() for n, p in frozen.items() if n.startswith(tuple(FLOAT32_MODULES)))
    assert sizes["frozen base"] == 2 * sum(p.numel() for p in frozen.values()) + 2 * float32


BOTH = ["mask_caption_mask", "caption_mask_caption"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "lora mlp1 text_hidden_fcs sam2"),
        (dict(mask_loss_coef=0), "lora mlp1 text_hidden_fcs"),
        (dict(latent_std=0), "lora mlp1 text_hidden_fcs sam2"),
        (dict(latent_std="auto", mask_loss_coef=0), "lora mlp1 text_hidden_fcs"),
        (dict(latent_std=0, mask_loss_coef=0), "lora mlp1"),
        (dict(loop2_weight=0), "lora mlp1"),
        (dict(tasks=BOTH[:1]), "lora mlp1"),
        (dict(tasks=BOTH[1:]), "lora mlp1 text_hidden_fcs sam2"),
    ],
)
def test_groups_follow_the_flags(data, tmp_path, changes, expected):
    config = cli.parse(flags(data, tmp_path, **changes))
    reached = {group for options in config.tasks.values() for group in options.trainable_modules}
    assert reached == set(expected.split())


def test_only_what_a_task_reaches_is_built_to_train(data, tmp_path):
    config = cli.parse(flags(data, tmp_path, mask_loss_coef=0))
    policy = start_run(config, ALONE).state.policy
    groups = {policy.group_of[name] for name in policy.trainable}
    assert groups == {"lora", "mlp1", "text_hidden_fcs"}
