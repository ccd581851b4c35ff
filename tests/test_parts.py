"""What a run is built from: how long it is, what trains at which rate, what is held out."""

import numpy as np
import pytest
import torch

from rl_train import cli, parts
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.split import split_dataset
from rl_train.distributed import Ranks
from rl_train.memory import standing_memory
from rl_train.policies.sa2va import FLOAT32_MODULES
from tests.runs import draw_data, flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_data(tmp_path_factory.mktemp("demo"))


def test_length_from_epochs(data, tmp_path):
    config = cli.parse(flags(data, tmp_path, max_steps=0, num_epochs=0.5, batch_size=4))
    assert parts.build(config, ALONE).max_steps == 8  # ceil(60 regions / 4 / 2)


def test_learning_rate_schedule():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = parts.cosine_schedule(optimizer, 10, 0.2)
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5) and rates[10] == pytest.approx(0.0)


@pytest.mark.parametrize("rate, groups", [(None, 1), (1e-4, 1), (1e-3, 2)])
def test_the_prompt_embedding_has_a_rate_of_its_own(data, tmp_path, rate, groups):
    config = cli.parse(flags(data, tmp_path, learning_rate=1e-4, prompt_learning_rate=rate))
    built = parts.build(config, ALONE).state
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
        own = built.policy.group_of(name) == "text_hidden_fcs"
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
    frozen = {n: p for n, p in model.model.named_parameters() if n not in model.trainable}
    float32 = sum(p.numel() for n, p in frozen.items() if n.startswith(tuple(FLOAT32_MODULES)))
    assert sizes["frozen base"] == 2 * sum(p.numel() for p in frozen.values()) + 2 * float32


def test_regions_of_one_image_stay_on_one_side():
    """Whole images are held out; what of the last one is too many is not trained on either."""

    class Regions:
        images = np.array([0, 0, 1, 2, 2, 2, 3, 3, 4])

        def __init__(self, data_dir):
            pass

        def __len__(self):
            return len(self.images)

        def report(self):
            return dict(rows=5, kept=9, skipped={}, resized_masks=0)

    for eval_samples in range(1, 6):
        training, heldout, _ = split_dataset(Regions, "x", None, eval_samples, 0)
        images = [{int(Regions.images[i]) for i in part.indices} for part in (training, heldout)]
        assert (
            len(heldout) == eval_samples
            and images[0].isdisjoint(images[1])
            and len(images[0] | images[1]) == 5
        )
        assert sorted(i for i in range(9) if Regions.images[i] in images[0]) == training.indices


def test_pictures_are_held_out_whole(data):
    """Though each of their regions is a row of its own, as `write_gar` writes them."""
    training, heldout, _ = split_dataset(GraspAnyRegionDataset, data / "train", None, 10, 0)
    pictures = [
        {part[i]["image"].tobytes() for i in range(len(part))} for part in (training, heldout)
    ]
    assert (
        len(heldout) == 10
        and pictures[0].isdisjoint(pictures[1])
        and len(pictures[0] | pictures[1]) == 20
    )


BOTH = ["mask_caption_mask", "caption_mask_caption"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "lora mlp1 text_hidden_fcs sam2"),
        (dict(mask_loss_coef=0), "lora mlp1 text_hidden_fcs"),
        (dict(mask_sigma=0), "lora mlp1 text_hidden_fcs sam2"),
        (dict(mask_sigma="auto", mask_loss_coef=0), "lora mlp1 text_hidden_fcs"),
        (dict(mask_sigma=0, mask_loss_coef=0), "lora mlp1"),
        (dict(caption_to_mask_weight=0), "lora mlp1"),
        (dict(tasks=BOTH[:1]), "lora mlp1"),
        (dict(tasks=BOTH[1:]), "lora mlp1 text_hidden_fcs sam2"),
    ],
)
def test_groups_follow_the_flags(data, tmp_path, changes, expected):
    config = cli.parse(flags(data, tmp_path, **changes))
    reached = {group for options in config.tasks.values() for group in options.trains}
    assert reached == set(expected.split())


def test_only_what_a_task_reaches_is_built_to_train(data, tmp_path):
    config = cli.parse(flags(data, tmp_path, mask_loss_coef=0))
    policy = parts.build(config, ALONE).state.policy
    groups = {policy.group_of(name) for name in policy.trainable}
    assert groups == {"lora", "mlp1", "text_hidden_fcs"}
