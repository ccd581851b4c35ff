"""Policy, teacher and reference over one base: who moves when, and that no role leaks."""

import pytest
import torch

from rl_train.config.grpo_config import OptimConfig
from rl_train.roles import TEACHER_HALF_LIFE, Roles, ema_decay_at
from rl_train.run.lr_schedule import cosine_schedule
from rl_train.utils.rng import RowRNG
from sa2va_hf import Sa2VAModel
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.tokenizer import load_tokenizer
from tests.pretend import Gpu, There
from tools.demo.make_demo import SHIPPED_CHECKPOINT


class Toy(torch.nn.Module):
    """A frozen bf16 base and two float32 weights that train."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Parameter(
            torch.tensor([2.0], dtype=torch.bfloat16), requires_grad=False
        )
        self.a = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = torch.nn.Parameter(torch.tensor([[3.0]]))

    def forward(self):
        return (self.base.float() * self.a).sum() * self.b.sum()

    @property
    def trainable(self):
        return {n: p for n, p in self.named_parameters() if p.requires_grad}


@pytest.fixture
def toy():
    return Toy()


@pytest.fixture
def roles(toy):
    return Roles(toy.trainable)


def set_policy(toy, value):
    with torch.no_grad():
        for p in toy.trainable.values():
            p.fill_(value)


def test_without_a_teacher_only_the_reference_is_kept(toy):
    roles = Roles(toy.trainable, ("reference",))
    set_policy(toy, 5.0)
    roles.update_teacher(0.5)
    assert not roles.has_teacher and roles.drift() == {} and list(roles.copies) == ["reference"]
    with roles.use("reference"):
        assert toy.a.tolist() == [1, 2]
    with pytest.raises(ValueError, match="known: policy, reference. Teacher"), roles.use("teacher"):
        pass
    assert list(Roles(toy.trainable).drift()) == [
        "teacher/distance_to_reference",
        "teacher/distance_to_policy",
    ]


def test_an_optimizer_step_moves_the_policy_alone(toy, roles):
    optimizer = torch.optim.SGD(toy.trainable.values(), lr=0.1)
    toy().backward()
    optimizer.step()  # d/da = 2 * 3, d/db = 2 * (1 + 2)
    torch.testing.assert_close(toy.a.detach(), torch.tensor([1 - 0.6, 2 - 0.6]))
    for role in ("teacher", "reference"):
        assert roles.copies[role]["a"].tolist() == [1, 2] and roles.copies[role]["b"].tolist() == [
            [3]
        ]
    roles.update_teacher(0.75)
    torch.testing.assert_close(roles.copies["teacher"]["a"], torch.tensor([1 - 0.15, 2 - 0.15]))
    torch.testing.assert_close(roles.copies["teacher"]["b"], torch.tensor([[3 - 0.15]]))
    assert roles.copies["reference"]["a"].tolist() == [1, 2]


def test_several_updates_by_hand(toy, roles):
    # policy 1, 0, 1 after a teacher of 0: .5, .25, .625
    roles.copies["teacher"]["b"].zero_()
    for value, expected in ((1.0, 0.5), (0.0, 0.25), (1.0, 0.625)):
        set_policy(toy, value)
        roles.update_teacher(0.5)
        assert roles.copies["teacher"]["b"].item() == expected


def test_a_thousand_small_updates_arrive(toy, roles):
    """They arrive under a bf16 base too: a bf16 average at 0.999 would not move at all."""
    for tensor in roles.copies["teacher"].values():
        tensor.zero_()
    set_policy(toy, 1.0)
    for _ in range(1000):
        roles.update_teacher(0.999)
    for tensor in roles.copies["teacher"].values():
        torch.testing.assert_close(
            tensor, torch.full_like(tensor, 1 - 0.999**1000), rtol=0.01, atol=0
        )  # 0.6323


def test_half_of_a_change_arrives_after_a_half_life():
    assert ema_decay_at(10**6, 1) == 0.5
    assert ema_decay_at(10**6, 70) ** 70 == pytest.approx(0.5)


def test_the_teacher_is_at_first_the_mean_of_the_policies_so_far(toy, roles):
    """toy.b of the policy is 3 (the start), 9, 0, 8: means 6, 4, 5."""
    for t, (value, mean) in enumerate(((9.0, 6.0), (0.0, 4.0), (8.0, 5.0))):
        set_policy(toy, value)
        roles.update_teacher(ema_decay_at(t, half_life_updates=100))
        assert roles.copies["teacher"]["b"].item() == pytest.approx(mean)
    assert ema_decay_at(142, 100) < 0.5 ** (1 / 100) == ema_decay_at(143, 100)


@pytest.mark.parametrize("num_updates", [40, 200, 1000, 5000])
def test_the_teacher_ends_near_the_policy_however_long_the_run(num_updates):
    """The fraction at the default half-life is that of docs/algorithm.md.

    A decay of .999 ended at 13 % after 200 updates and at 48 % after 1,000.
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = cosine_schedule(optimizer, num_updates, OptimConfig().warmup_ratio)
    half_life = TEACHER_HALF_LIFE * num_updates
    policy = teacher = 0.0
    for t in range(num_updates):
        policy += schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        teacher += (1 - ema_decay_at(t, half_life)) * (policy - teacher)
    assert teacher / policy == pytest.approx(0.974, abs=0.001)


def test_equal_weights_stay_bit_equal():
    parameter = torch.nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    roles = Roles({"w": parameter})
    for _ in range(50):
        roles.update_teacher(0.999)
    assert torch.equal(roles.copies["teacher"]["w"], parameter.detach())


def test_decay_zero_copies_the_policy(toy, roles):
    set_policy(toy, 0.3)
    roles.update_teacher(0.0)
    assert all(
        torch.equal(roles.copies["teacher"][n], p.detach()) for n, p in toy.trainable.items()
    )


def test_decay_one_keeps_what_the_run_started_from(toy, roles):
    set_policy(toy, 0.3)
    roles.update_teacher(1.0)
    assert all(
        torch.equal(roles.copies["teacher"][n], t) for n, t in roles.copies["reference"].items()
    )


def test_distance_of_roles_by_hand(toy, roles):
    # reference (1, 2, 3), norm sqrt 14; policy (1, 2, 5): 2 off; teacher half way: 1 off both
    names = ("policy", "teacher", "reference")
    assert [roles.distance(a, b) for a in names for b in names] == [0] * 9
    with torch.no_grad():
        toy.b.fill_(5.0)
    roles.update_teacher(0.5)
    assert (
        roles.distance("policy", "reference")
        == roles.distance("reference", "policy")
        == pytest.approx(2 / 14**0.5)
    )
    assert (
        roles.distance("teacher", "policy")
        == roles.distance("teacher", "reference")
        == pytest.approx(1 / 14**0.5)
    )


def test_no_storage_is_shared(toy, roles):
    tensors = [*toy.trainable.values()]
    for copy in roles.copies.values():
        tensors += copy.values()
    assert len({t.data_ptr() for t in tensors}) == len(tensors) == 2 * 3


def test_offloaded_roles_do_what_others_do(toy):
    """On a pretended GPU: copies lie on the CPU, and the numbers are the same."""
    kept, gpu = Roles(toy.trainable), Gpu()
    moved = Toy()
    gpu.take(moved)
    with gpu:
        offloaded = Roles(moved.trainable, offload=True)
        for module, roles in ((toy, kept), (moved, offloaded)):
            set_policy(module, 5.0)
            roles.update_teacher(0.5)
        for copies in offloaded.copies.values():
            assert not any(isinstance(weight, There) for weight in copies.values())
        for role in ("policy", "teacher", "reference"):
            with kept.use(role), offloaded.use(role):
                assert isinstance(moved.a.data, There) and moved().item() == toy().item()
        assert isinstance(moved.a.data, There) and moved().item() == toy().item()
        assert offloaded.drift() == kept.drift()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_offloaded_roles_take_no_memory_of_the_gpu():
    weight = torch.nn.Parameter(torch.randn(256, 1024, device="cuda"))
    before = torch.cuda.memory_allocated()
    offloaded = Roles({"w": weight}, offload=True)
    assert torch.cuda.memory_allocated() == before
    kept = Roles({"w": weight})
    assert torch.cuda.memory_allocated() == before + 2 * weight.nbytes
    assert all(copy["w"].is_pinned() for copy in offloaded.copies.values())
    for _ in range(3):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        kept.update_teacher(0.9)
        offloaded.update_teacher(0.9)
    for role in ("teacher", "reference"):
        with kept.use(role):
            numbers = weight.clone()
        with offloaded.use(role):
            assert weight.is_cuda and torch.equal(weight, numbers)
    assert offloaded.drift() == kept.drift()
    del numbers
    assert torch.cuda.memory_allocated() == before + 2 * weight.nbytes


def test_use_swaps_and_restores(toy, roles):
    set_policy(toy, 5.0)
    own = {n: p.data_ptr() for n, p in toy.trainable.items()}
    roles.copies["teacher"]["b"].fill_(7.0)
    assert toy().item() == 2 * (5 + 5) * 5
    with roles.use("teacher"):
        out = toy()
        assert out.item() == 2 * (1 + 2) * 7 and not out.requires_grad
        assert toy.b.data_ptr() == roles.copies["teacher"]["b"].data_ptr()  # no byte was moved
    with roles.use("reference"):
        assert toy().item() == 2 * (1 + 2) * 3
    with roles.use("policy"):
        out = toy()
        assert out.item() == 100 and not out.requires_grad
    assert toy().requires_grad and toy().item() == 100
    assert {n: p.data_ptr() for n, p in toy.trainable.items()} == own


def test_use_restores_after_an_exception(toy, roles):
    set_policy(toy, 5.0)
    with pytest.raises(KeyError), roles.use("teacher"):
        raise KeyError("judge")
    assert toy.a.tolist() == [5, 5] and roles.active == "policy" and torch.is_grad_enabled()
    toy().backward()
    assert toy.b.grad.item() == 20


def test_nested_use_is_refused(toy, roles):
    set_policy(toy, 5.0)
    with (
        pytest.raises(AssertionError, match=r"use\('reference'\) inside roles.use\('teacher'\)"),
        roles.use("teacher"),
    ):
        with roles.use("reference"):
            pass
    assert toy.a.tolist() == [5, 5] and roles.active == "policy"
    with pytest.raises(AssertionError), roles.use("teacher"):
        roles.update_teacher(0.9)


def test_backward_inside_a_role_is_refused(toy, roles):
    loss = toy()
    with (
        pytest.raises(AssertionError, match=r"backward ran inside roles.use\('reference'\)"),
        roles.use("reference"),
    ):
        loss.backward()
    with pytest.raises(AssertionError, match="backward"), roles.use("teacher"), torch.enable_grad():
        toy().backward()


def test_bad_input_is_named(roles):
    with pytest.raises(ValueError, match="w is torch.bfloat16"):
        Roles({"w": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))})
    with pytest.raises(ValueError, match="'judge'"), roles.use("judge"):
        pass


@torch.no_grad()
def test_the_reference_is_the_base_model(policy, batch):
    """The reference gives the checkpoint's own log-probs after the policy has moved."""
    policy = policy()
    roles = Roles(policy.trainable)
    for n, p in policy.trainable.items():
        p += 0.02
    images = policy.encode(batch)
    prompts = policy.segment_prompts(images, [0, 1], batch.captions[:2])
    uniforms = RowRNG(0, 0, 0, [0, 1], 1).uniforms(6)
    rollout = policy.sample(batch, images, prompts, 1, 6, uniforms)
    with roles.use("reference"):
        reference = policy.score(rollout)
    # The base is sure of its answer; what must not differ below is a hundredth of this.
    assert (policy.score(rollout).logp - reference.logp).abs().max() > 0.01
    base = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)
    base.bind_tokenizer(load_tokenizer(SHIPPED_CHECKPOINT))
    for row in range(2):
        valid = rollout.valid[row]
        ids = torch.tensor([rollout.prompts.ids[row]])
        full = torch.cat([ids, rollout.ids[row : row + 1, valid]], dim=1)
        logits = base(full, torch.ones_like(full), normalise_tiles(batch.inputs.tiles[row])).logits[
            0, ids.shape[1] - 1 : -1
        ]
        expected = torch.log_softmax(logits, -1).gather(1, rollout.ids[row, valid, None])[:, 0]
        torch.testing.assert_close(reference.logp[row, valid], expected, atol=1e-4, rtol=0)
