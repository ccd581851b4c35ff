"""Checks before the first step that all ranks begin alike; machines need not share a disk.

Each rank reads its own folders. If these differ, ranks would train different models and average
their gradients without an error.
"""

from pathlib import Path

from rl_train.checkpoint.fingerprint import fingerprint_of
from rl_train.checkpoint.record import DataFacts
from rl_train.checkpoint.save_load import RunState
from rl_train.config.grpo_config import Config
from rl_train.data.digest import changes, digest
from rl_train.distributed.process_group import RankInfo, gather_objects, print0


def check_same_on_all_ranks(facts: dict[str, str | int | float | list | None]):
    """Raise ValueError on all ranks, naming the entries that differ, unless `facts` are equal."""
    first, *others = gather_objects(facts)
    for rank, other in enumerate(others, 1):
        differing = [
            f"{name}: {first.get(name)} on rank 0; {other.get(name)} on rank {rank}"
            for name in first | other
            if first.get(name) != other.get(name)
        ]
        if differing:
            raise ValueError(
                f"ranks do not begin alike. {'. '.join(differing)}. Give all machines the same "
                "flags, model and data, and copy rank 0's latest checkpoint to the others."
            )


def check_same_start(config: Config, resume: Path | None, ranks: RankInfo, data: DataFacts):
    """Compare flags, the checkpoint to resume from, the base model's weights and the data sets.

    Args:
        data: facts of this rank's samples.
    """
    if ranks.world_size == 1:
        return
    machine_flags = config.flags_with("may_differ_by_rank")
    facts = {f"--{n}": value for n, value in config.flags.items() if n not in machine_flags}
    facts["the checkpoint to resume from"] = resume.name if resume else "none"
    folders = filter(None, (config.policy.model_path, config.policy.sam_path))
    facts["weights of --model_path and --sam_path"] = fingerprint_of(*folders).digest
    for name, of_samples in data.items():
        facts |= {f"{fact} of the {name} data": value for fact, value in of_samples.items()}
    check_same_on_all_ranks(facts)


def check_same_weights(state: RunState, ranks: RankInfo):
    """Compare the step and the weights of the policy and its copies, after they are loaded."""
    if ranks.world_size == 1:
        return
    facts: dict[str, str | int] = dict(step=state.step)
    for role, weights in dict(policy=state.policy.trainable, **state.roles.copies).items():
        tensors = (weight.detach().cpu().numpy().tobytes() for weight in weights.values())
        facts[f"weights of the {role}"] = digest(tensors)
    check_same_on_all_ranks(facts)


def changed_data(config: Config, before: DataFacts, now: DataFacts) -> str | None:
    """Return a sentence part that names the flag of data that differ from a run's, or None."""
    train_flag = f"--data_dir {config.data.data_dir}"
    if config.data.data_mixture:
        train_flag += " or --data_mixture"
    if config.data.sample_list:
        train_flag += f" or --sample_list {config.data.sample_list}"
    training, evaluation = (changes(before[part], now[part]) for part in ("training", "evaluation"))
    if config.data.eval_data_dir is None and evaluation:
        training = f"{training or 'trained on the same samples'}; evaluation split: {evaluation}"
        return (
            f"{train_flag}: not the data that the run was trained and measured on: {training}, so "
            "an image that was trained on may now be measured"
        )
    sentences = []
    if training:
        sentences.append(f"{train_flag}: not the data that the run was trained on: {training}")
    if evaluation:
        flag = f"--eval_data_dir {config.data.eval_data_dir}"
        sentences.append(f"{flag}: not the regions that the run was measured on: {evaluation}")
    return "; ".join(sentences) or None


def check_same_data(config: Config, before: DataFacts, now: DataFacts, place: str | Path):
    """Raise ValueError, naming the flag, if a resumed run has other data than before.

    With --allow_changed_data a line says so instead. A run of an earlier version did not keep what
    its data were.

    Args:
        before: facts in `place`, a checkpoint or an output folder.
    """
    if not before:
        print0(f"{place} does not say on which data it was trained: nothing is compared")
        return
    if not (sentence := changed_data(config, before, now)):
        return
    if not config.run.allow_changed_data:
        raise ValueError(
            f"{sentence}. Give the former data, or accept these with --allow_changed_data"
        )
    print0(f"{sentence}. Accepted by --allow_changed_data")
    if before["evaluation"] != now["evaluation"]:
        print0(
            "new scores are not compared with those of former regions: checkpoint_best starts anew"
        )
