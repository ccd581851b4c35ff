"""Supervised training as its tests call it: short runs and their losses."""

import torch

from rl_train import cli, sft, train
from rl_train.data.loader import Batches
from rl_train.distributed.process_group import RankInfo
from rl_train.run.start import start_run
from tests.runs import flags

ALL = "vision mlp1 embeddings language_model text_hidden_fcs sam2 sam2_encoder".split()


def line(data, output, **changes):
    """The command line of a short run."""
    absent = dict(num_generations=None, micro_batch_size=None, latent_std=None)
    absent |= dict(merge_at_end=None)
    return flags(data, output, **absent | dict(max_completion_length=24) | changes)


def run(data, output, **changes):
    train.main(line(data, output, **changes), sft.SFT, sft.train)
    return output


def built(data, output, **changes):
    """The parts of a run that does not begin."""
    config = cli.parse(line(data, output, **changes), sft.SFT)
    return start_run(config, RankInfo(0, 1, torch.device("cpu")))


def losses(made, index, turns=1):
    """(loss, statistics, batch, examples) of samples `index` in the first step."""
    preprocessor = made.state.policy.preprocessor(24)
    batch = Batches(made.data.train_set, preprocessor, turns=turns)[index]
    features = made.state.policy.encode(batch)
    examples = sft.build_examples(made, batch, features)
    totals = sft.step_totals([examples], 1)
    objective = sft.SFTLoss(made.state.policy)
    return *objective(features, examples, totals, False), batch, examples
