import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_train.config.grpo_config import RewardConfig
from rl_train.loggers.metrics import StepMetrics, reduce_metrics
from rl_train.rewards import UserReward
from rl_train.rewards.custom import BadReward, add_user_rewards, overlong_penalty
from rl_train.rollout import Batch, Rollout
from rl_train.run.build import build_rewards

MODULE = """
import numpy as np
import torch

CONSTANT = 3

def words(completions, captions, **kwargs):
    return [len(c.split()) if c else None for c in completions]

def given(completions, **kwargs):
    return {"values": lambda: kwargs["values"]}["values"]()

def ended(completions, stopped, **kwargs):
    return [0.0 if end else -1.0 for end in stopped]

def short(completions, num_tokens, **kwargs):
    return [-n / 4 for n in num_tokens]

def broken(completions, **kwargs):
    return [1 / 0]

def strict(completions):
    return [0.0]

def old(completions, captions):
    return [float(caption == "c") for caption in captions]

def loss(completions, **kwargs):
    return [0.0]

def clears(completions, captions, **kwargs):
    completions.clear()
    captions.clear()
    return list(completions)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(MODULE)
    (tmp_path / "user_faulty.py").write_text("import module_that_is_missing\n")
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "deep.py").write_text(
        "def one(completions, **kwargs):\n    return [1] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_that_clears_its_lists_is_named_and_clears_nothing_else():
    texts, captions = ["a", "b"], ["c", "d"]
    sentence = r"^--reward user_rewards:clears: returned \[\] for 2 completions, not a list with"
    with pytest.raises(BadReward, match=sentence):
        UserReward.parse("user_rewards:clears")(texts, captions=captions)
    assert texts == ["a", "b"] and captions == ["c", "d"]


def test_function_is_called_as_trl_calls_it():
    reward = UserReward("user_rewards:words", 0.5)
    assert (reward.name, reward.weight) == ("words", 0.5)
    values = reward(["a dog", "", "dog"], captions=["x"] * 3, image_ids=["1", "2", "3"])
    assert values.dtype == torch.float32 and values.shape == (3,)
    assert values[[0, 2]].tolist() == [2, 1] and values[1].isnan()
    assert UserReward("user_package.deep:one").function(completions=["", ""]) == [1, 1]


def test_spec_with_a_weight():
    assert UserReward.parse("user_rewards:words").weight == 1
    assert UserReward.parse("user_rewards:words=0.25").weight == 0.25
    for text in (
        "user_rewards:words=",
        "user_rewards:words=much",
        "user_rewards:words=nan",
        "user_rewards:words=1=2",
    ):
        with pytest.raises(ValueError, match=f"--reward {text}"):
            UserReward.parse(text)


@pytest.mark.parametrize(
    "spec, reason",
    [
        ("user_rewards", "module:function"),
        ("user_rewards:", "module:function"),
        (":words", "invalid format: ':words'"),
        ("", "invalid format: ''"),
        ("user_rewards.py:words", "No module named 'user_rewards.py'"),
        ("a/b.py:words", "invalid format: 'a/b.py:words'"),
        ("user_rewards:words:1", "invalid format: 'user_rewards:words:1'"),
        ("no_such_module:words", "No module named 'no_such_module'"),
        ("user_package.nothing:one", "No module named 'user_package.nothing'"),
        ("user_faulty:words", "No module named 'module_that_is_missing'"),
        ("user_rewards:nothing", "module 'user_rewards' has no attribute 'nothing'"),
        ("user_rewards:CONSTANT", "must be module:function"),
    ],
)
def test_wrong_spec_is_named(spec, reason):
    with pytest.raises(ValueError, match=f"--reward {spec}: .*{reason}"):
        UserReward(spec)


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [1.0] * 3,
        [],
        None,
        1.0,
        "ab",
        ["1", 2.0],
        [1.0, "x"],
        [[1.0], [2.0]],
        [math.inf, 0.0],
        [-math.inf, 0.0],
        [3.5e38, 0.0],  # beyond float32
        [np.float64(1e300), 0.0],
        [np.longdouble("1e4000"), 0.0],
        [1j, 0.0],
        [Decimal(1), 0.0],
        [np.bool_(True), 0.0],
        [torch.tensor(1.0), 0.0],
        [np.ones(1), 0.0],
        [0.0, -1e39],
        {0: 1.0, 1: 1.0},
        {1.0, 2.0},
        (value for value in (1.0, 2.0)),
        range(2),
        map(float, "12"),
        b"ab",
        torch.ones(3),
        torch.ones(2, 1),
        torch.tensor(1.0),
        torch.tensor([1j, 0]),
        torch.tensor([math.inf, 0]),
        torch.tensor([1e300, 0], dtype=torch.float64),
        np.ones((2, 2)),
        np.array(1.0),
        np.array(["1", "2"]),
        np.array([1, None, 2]),
        np.array([1j, 0]),
        ["x" * 10**6, 0.0],
    ],
    ids=lambda values: f"{values!r:.30}".split(" at 0x")[0],  # every process gives the same
)
def test_what_is_not_one_number_each_is_named(values):
    with pytest.raises(BadReward, match="--reward user_rewards:given: returned") as raised:
        UserReward("user_rewards:given")(["a", "b"], values=values)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5],
        (1, 0.5),
        torch.tensor([1, 0.5]),
        torch.tensor([1, 0.5], requires_grad=True),
        torch.tensor([1, 0.5], dtype=torch.bfloat16),
        list(torch.tensor([1, 0.5]).numpy()),
        np.array([1, 0.5], dtype=np.float16),
        [np.int64(1), np.float16(0.5)],
        [True, Fraction(1, 2)],
    ],
    ids=lambda values: f"{values!r:.30}",
)
def test_numbers_of_all_kinds(values):
    assert UserReward("user_rewards:given")(["a", "b"], values=values).tolist() == [1, 0.5]


def test_none_and_nan_are_not_scored():
    assert UserReward("user_rewards:given")(
        ["a", "b", "c"], values=[None, math.nan, 0.0]
    ).isnan().tolist() == [True, True, False]


def test_an_answer_that_was_cut_can_be_punished():
    """The function of docs/extending.md; also by what an answer's tokens cost."""
    rollout = SimpleNamespace(
        texts=["a red cup", "a red"],
        stopped=torch.tensor([True, False]),
        valid=torch.tensor([[True, True, True, False], [True] * 4]),
        batch=Batch([0], [], ["c"], ["i"], [], None),
        repeat_for_rows=lambda values: values * 2,
    )
    rewards = [UserReward(f"user_rewards:{name}") for name in ("ended", "short")]
    found = add_user_rewards({}, rewards, rollout, ["?"] * 2, [], [])
    assert found["ended"].tolist() == [0, -1] and found["short"].tolist() == [-0.75, -1]


def test_a_function_is_given_the_question_and_the_columns_of_a_sample():
    """A column takes no name that every function knows."""
    batch = Batch([0], [], ["c"], ["i"], [], None, questions=["how many"], answers=["two"])
    batch.columns = dict(level=[3], captions=["mine"], completions=["mine"])
    rollout = SimpleNamespace(
        texts=["a", "b"],
        stopped=torch.tensor([True] * 2),
        valid=torch.ones(2, 3, dtype=torch.bool),
        batch=batch,
        repeat_for_rows=lambda values: values * 2,
    )
    seen = {}

    def keep(completions, **columns):
        seen.update(columns, completions=completions)
        return [0.0, 1.0]

    add_user_rewards({}, [UserReward("mine:keep", 1.0, keep)], rollout, ["?"] * 2, [], [])
    assert seen["question"] == ["how many"] * 2 and seen["answer"] == ["two"] * 2
    assert seen["level"] == [3, 3] and seen["captions"] == ["c", "c"]
    assert seen["completions"] == ["a", "b"]


def test_a_function_is_given_what_it_names():
    """So that one goes on working when there is more to give."""
    more = dict(captions=["c", "d"], mask_confidence=[0.5, 0.0])
    assert UserReward("user_rewards:strict")(["a"], **more).tolist() == [0]
    assert UserReward("user_rewards:old")(["a", "b"], **more).tolist() == [1, 0]


def test_faults_of_the_users_code_pass_through():
    with pytest.raises(ZeroDivisionError):
        UserReward("user_rewards:broken")(["a"])
    with pytest.raises(TypeError, match="stopped"):
        UserReward("user_rewards:ended")(["a"], captions=["b"])


def test_two_components_of_one_name_are_refused():
    rollout = SimpleNamespace(
        texts=["a"],
        stopped=torch.tensor([True]),
        valid=torch.tensor([[True]]),
        batch=Batch([0], [], ["c"], ["i"], [], None),
        repeat_for_rows=list,
    )
    loss = UserReward("user_rewards:loss")
    with pytest.raises(BadReward, match="--reward: loss is already a component"):
        add_user_rewards({"loss": torch.zeros(1)}, [loss], rollout, ["?"], [], [])
    with pytest.raises(BadReward, match="--reward: loss is already a component"):
        add_user_rewards({}, [loss, loss], rollout, ["?"], [], [])


def test_names_of_our_curves_are_taken():
    tally = StepMetrics()
    tally.updates, tally.update_sums["loop1/loss"] = 1, 0.5
    tally.add_mean("loop1/reward/words", 6, 2)
    assert reduce_metrics([tally], {"loop1": 1.0})["loop1/words"] == 3
    tally.add_mean("loop1/reward/loss", 6, 2)
    with pytest.raises(BadReward, match="--reward: loss is a metric already"):
        reduce_metrics([tally], {"loop1": 1.0})


def test_a_new_reward_is_a_function_and_a_flag(tmp_path):
    """A reward of --reward stands beside those of the project's flags; nothing is edited."""
    source = "def brevity(completions): return [-len(text) for text in completions]"
    (tmp_path / "user_new.py").write_text(source)
    flags = RewardConfig(reward=["user_new:brevity=0.5"], overlong_buffer=4)
    new, overlong = build_rewards(flags, 12, seed=0).user_rewards
    assert (new.name, new.weight, overlong.name) == ("brevity", 0.5, "overlong")
    batch = Batch([0], [], ["a dog"], ["image"], [], inputs=None)
    valid, stopped = torch.tensor([[True] * 12, [True] * 2 + [False] * 10]), torch.tensor([0, 1])
    rest = dict(ids=None, logp=None, hidden=None, latents=None)
    rollout = Rollout(batch, None, None, ["abc", ""], 2, valid=valid, stopped=stopped, **rest)
    found = add_user_rewards({}, (new, overlong), rollout, ["?"] * 2, [], [])
    assert {name: values.tolist() for name, values in found.items()} == {
        "brevity": [-3, 0],
        "overlong": [-1, 0],
    }


def test_the_soft_punishment_of_long_answers():
    """DAPO's: of the last 4 tokens each costs a quarter; an answer that was cut costs 1."""
    tokens = [0, 8, 9, 10, 12]
    penalty = overlong_penalty(longest=12, buffer=4)
    values = penalty(["a"] * 5, num_tokens=tokens, captions=["b"] * 5)
    assert (penalty.name, penalty.weight) == ("overlong", 1)
    assert values.tolist() == [0, 0, -0.25, -0.5, -1]
    longer = overlong_penalty(longest=12, buffer=12)
    assert longer(["a"] * 5, num_tokens=tokens)[1].item() == pytest.approx(-8 / 12)
