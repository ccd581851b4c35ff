"""Open the data of a run: training and evaluation samples, and the order of the training."""

from dataclasses import dataclass
from functools import partial

from rl_train.checkpoint.record import DataFacts
from rl_train.config.grpo_config import Config, DataConfig
from rl_train.data import DamagedSamples
from rl_train.data.base import RegionDataset
from rl_train.data.dataset_flags import dataset_openers
from rl_train.data.digest import data_facts, digest
from rl_train.data.distractors import unwrap_subset
from rl_train.data.loader import StepSampler
from rl_train.data.mixture import MixtureSampler
from rl_train.data.sample_list import listed_samples
from rl_train.data.split import split_dataset
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.rewards.attributes import AttributePhrases, load_attributes
from rl_train.run import messages
from rl_train.run.consistency import check_same_on_all_ranks
from rl_train.utils.load_named import load_named


@dataclass(frozen=True)
class RunData:
    """Samples of a run.

    Attributes:
        damaged: counts the training samples that cannot be read.
        facts: of both sets, see `digest.data_facts`.
        attribute_phrases: of --attributes, for evaluations.
    """

    train_set: RegionDataset
    eval_set: RegionDataset
    damaged: DamagedSamples
    facts: DataFacts
    attribute_phrases: AttributePhrases

    @property
    def has_masks(self) -> bool:
        """Return whether the training samples have masks; else boxes and points are the target."""
        return unwrap_subset(self.train_set)[0].has_masks

    @property
    def names_nothing(self) -> bool:
        """Return whether some training or evaluation sample's caption names nothing."""
        return any(unwrap_subset(s)[0].names_nothing for s in (self.train_set, self.eval_set))


def open_data(config: DataConfig, task_classes: dict[str, type]) -> RunData:
    """Open training and evaluation data, and print what was read.

    Args:
        task_classes: {name in --tasks: class}.

    Raises:
        ValueError: names the flag or file that is wrong.
    """
    attribute_phrases = load_attributes(config.attributes) if config.attributes else {}
    print0(f"reading {config.data_dir}")
    open_train, open_eval = dataset_openers(config)
    train_set, eval_set, damaged = split_dataset(
        open_train,
        config.data_dir,
        config.eval_data_dir,
        config.eval_samples,
        max_bad_fraction=config.max_bad_fraction,
        train_eval_overlap=config.train_eval_overlap,
        eval_opener=open_eval,
        log=print0,
    )
    reports = damaged.report.get("of_each", {config.dataset: damaged.report})
    for name, report in reports.items():
        label = name if config.data_mixture else config.data_dir
        print0(messages.data_report(f"training data, {label}", report))
    if config.eval_data_dir:
        report = unwrap_subset(eval_set)[0].report()
        print0(messages.data_report(f"evaluation data, {config.eval_data_dir}", report))
    if config.sample_list:
        num_all, train_set = len(train_set), listed_samples(train_set, config.sample_list)
        print0(f"--sample_list {config.sample_list}: {len(train_set):,d} of {num_all:,d} samples")
    print0(f"samples: {len(train_set):,d} to train on, {len(eval_set):,d} to evaluate")
    need_masks = [f"--tasks {name}" for name, task in task_classes.items() if not task.takes_boxes]
    need_masks += ["--distractors"] * config.distractors
    check_masks({"--data_dir": train_set, "--eval_data_dir": eval_set}, need_masks)
    need_targets = [name for name, task in task_classes.items() if not task.takes_no_target]
    check_targets({"--data_dir": train_set, "--eval_data_dir": eval_set}, need_targets)
    facts = dict(training=data_facts(train_set), evaluation=data_facts(eval_set))
    return RunData(train_set, eval_set, damaged, facts, attribute_phrases)


def check_masks(datasets: dict[str, RegionDataset], need_masks: list[str]):
    """Raise ValueError, naming the flag, if a data set has no masks and a flag needs them.

    Args:
        datasets: {flag: what it names}.
        need_masks: the flags that need masks.
    """
    for flag, dataset in datasets.items():
        if need_masks and not unwrap_subset(dataset)[0].has_masks:
            raise ValueError(
                f"{flag}: its samples have boxes and points and no masks (a folder masks of one "
                f"{{id}}.png for each row), which {need_masks[0]} needs"
            )


def check_targets(datasets: dict[str, RegionDataset], need_targets: list[str]):
    """Raise ValueError, naming the flag, if captions name nothing and a task needs a region.

    Args: see `check_masks`; need_targets: names in --tasks.
    """
    for flag, dataset in datasets.items():
        if need_targets and unwrap_subset(dataset)[0].names_nothing:
            raise ValueError(
                f"{flag}: some of its captions name nothing in their image, and --tasks "
                f"{need_targets[0]} needs a region for each; take other data, or leave the task "
                "out"
            )


def build_sampler(config: Config, train_set: RegionDataset, ranks: RankInfo) -> StepSampler:
    """Build the sampler of a step's samples. Raises ValueError, naming the wrong flag."""
    seed, order = config.run.seed, None
    mixture = MixtureSampler(train_set, seed) if config.data.data_mixture else None
    if config.data.sampler:
        if mixture:
            raise ValueError(
                "--sampler: not with --data_mixture, whose weights say what a step holds"
            )
        function = load_named("--sampler", config.data.sampler, "function", callable)
        order = partial(function, train_set)
    sampler = StepSampler(
        len(train_set),
        config.rollout.batch_size,
        config.optim.gradient_accumulation_steps,
        seed,
        ranks.rank,
        ranks.world_size,
        order=order,
        mixture=mixture,
    )
    num_rounds = config.flags.get("resample_equal_groups")
    if num_rounds and sampler.length == sampler.prompts_per_step:
        raise ValueError(
            f"--resample_equal_groups {num_rounds}: a step takes all {sampler.length} samples, "
            "none is left to stand in for another; give more data or a smaller --batch_size"
        )
    if order:  # what is wrong with the user's function is said before the first step
        first_epoch = digest([sampler.indices(0).tobytes()])
        check_same_on_all_ranks({"--sampler of the first epoch": first_epoch})
    return sampler
