"""--reward_weights: the words that it takes, and the sentences about those that it does not."""

import pytest

from rl_train import cli
from rl_train.rewards.weights import ComponentWeight, of_task
from rl_train.utils.io import write_json
from tests.runs import complaint_of, flags

TASKS = ["mask_caption_mask", "caption_mask_caption", "referring", "captioning"]


def test_a_word_is_parsed():
    weights = [ComponentWeight.parse(text) for text in ("loop1.iou=1", "loop2.judge=.75")]
    assert weights == [
        ComponentWeight("loop1", "iou", 1.0),
        ComponentWeight("loop2", "judge", 0.75),
    ]
    assert of_task(weights, "loop2") == {"judge": 0.75} and of_task(weights, "points") == {}


def test_the_tasks_share_the_flags_of_sampled_masks(data, tmp_path):
    """Two tasks of one run have them once, and all four of one run their weights."""
    words = dict(tasks=TASKS, latent_std=3, referring_weight=0.5, captioning_weight=0.25)
    config = cli.parse(flags(data, tmp_path, **words))
    options = config.tasks
    assert options["caption_mask_caption"].latent_std == options["referring"].latent_std == 3
    assert [options[name].weight for name in TASKS] == [1, 1, 0.5, 0.25]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("loop1.iou", "--reward_weights loop1.iou: must be TASK.COMPONENT=WEIGHT, such as"),
        ("iou=1", "--reward_weights iou=1: must be TASK.COMPONENT=WEIGHT, such as loop1.iou=1"),
        ("loop1.iou=-1", "--reward_weights loop1.iou=-1: must be TASK.COMPONENT=WEIGHT"),
        ("loop1.iou=nan", "--reward_weights loop1.iou=nan: must be TASK.COMPONENT=WEIGHT"),
        (
            "loop3.iou=1",
            "--reward_weights loop3.iou=1: the tasks of this run are loop1, loop2, referring, "
            "captioning",
        ),
        (
            "loop1.likelihood=1",
            "--reward_weights loop1.likelihood=1: the components of loop1 are loop1.iou, "
            "loop1.on_target, loop1.meteor, loop1.cider, loop1.judge",
        ),
        (
            "captioning.iou=1",
            "the components of captioning are captioning.meteor, captioning.cider, "
            "captioning.judge",
        ),
        (
            "referring.meteor=1",
            "the components of referring are referring.iou, referring.box_iou, referring.centre",
        ),
        (
            "loop2.box_iou=1",
            "the components of loop2 are loop2.meteor, loop2.cider, loop2.judge, "
            "loop2.likelihood, loop2.iou",
        ),
        (["loop1.iou=1", "loop1.iou=0.5"], "loop1.iou is named twice"),
    ],
)
def test_what_is_refused(data, tmp_path, words, sentence):
    argv = flags(data, tmp_path / "run", tasks=TASKS, reward_weights=words)
    assert sentence in complaint_of(argv)


def test_what_leaves_no_reward_is_refused(data, tmp_path):
    argv = flags(data, tmp_path / "run", reward_weights="loop1.iou=0")
    sentence = complaint_of(argv)
    assert "--reward_weights: leaves loop1 no component with a weight" in sentence
    argv = flags(data, tmp_path / "run", reward_weights="loop1.iou=1", reward="json:dumps")
    sentence = complaint_of([*argv, "--reward_only"])
    assert "--reward_weights: not with --reward_only" in sentence


def test_the_object_found_needs_the_other_regions(data, tmp_path):
    """One sentence names both flags; a weight of 0 needs nothing."""
    of = lambda weight: dict(reward_weights=["loop1.iou=1", f"loop1.on_target={weight}"])  # noqa: E731
    sentence = complaint_of(flags(data, tmp_path / "run", **of(0.5)))
    assert "--reward_weights loop1.on_target: needs --distractors" in sentence
    for words in (of(0.5) | dict(distractors=""), of(0)):
        config = cli.parse(flags(data, tmp_path / "run", **words))
        assert config.reward.gives_weight("on_target") == ("distractors" in words)


def test_a_resume_with_other_weights_is_refused(data, tmp_path):
    """The sentence has the flag's name and both values."""
    half, whole = ["loop2.meteor=.5", "loop2.likelihood=.5"], ["loop2.likelihood=1"]
    config, other = (
        cli.parse(flags(data, tmp_path / "run", reward_weights=weights, resume=""))
        for weights in (half, whole)
    )
    write_json(tmp_path / "run" / "config.json", config.flags)
    cli.check_output_dir(config, config.flags)
    with pytest.raises(ValueError, match="another config: --reward_weights was .*=.5'], now .*=1"):
        cli.check_output_dir(other, other.flags)
