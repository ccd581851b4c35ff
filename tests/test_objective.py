"""One update on real rollouts of both loops: what is zero at the start, which term reaches which weights, and that
micro-batches do not matter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train.objective import (
    Totals,
    latent_loss,
    mask_loss,
    micro_batches,
    rollout_loss,
    token_logps,
)
from rl_train.policies.sa2va import TRAINABLE
from rl_train.roles import Roles
from rl_train.rollout import Latent, noise, sample

GENERATIONS, STEPS = 2, 14
SIGMA = 0.3


def arguments(**changes):
    return SimpleNamespace(
        **(
            dict(
                loss_type="dapo",
                clip_range=0.2,
                clip_range_high=None,
                kl_coef=0.0,
                mask_loss_coef=0.0,
                max_completion_length=STEPS,
            )
            | changes
        )
    )


@pytest.fixture(scope="module")
def model(policy):
    """A policy whose LoRA has already moved a little (at B = 0 no gradient would reach A)."""
    model = policy()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.trainable.items():
            if ".lora_B." in name:
                p += 0.01 * torch.randn(p.shape, generator=generator)
    return model


def rollout_of(model, batch, loop, sigma=SIGMA):
    """A rollout of 4 rows about 2 of the scenes."""
    images = model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    prompts = (
        model.describe_prompts(images, [0, 1], list(batch.inputs.grids[:2]))
        if loop == 1
        else model.segment_prompts(images, [0, 1], batch.captions[:2])
    )
    random = noise(0, 0, loop - 1, [0, 1], GENERATIONS, STEPS, model.model.config.prompt_size)
    rollout = sample(
        model, batch, images, prompts, GENERATIONS, STEPS, random, None if loop == 1 else sigma
    )
    assert loop == 1 or len(set(rollout.seg_rows.tolist())) > 1, "the demo model answers with [SEG]"
    return rollout


@pytest.fixture(scope="module")
def caption_rollout(model, batch):
    return rollout_of(model, batch, 1)


@pytest.fixture(scope="module")
def mask_rollout(model, batch):
    return rollout_of(model, batch, 2)


ADVANTAGES = torch.tensor([0.7, -0.7, -0.7, 0.7])


def backward(
    model, rollout, args, advantages=ADVANTAGES, micro_batch_size=4, scored=None, reference=None
):
    """({parameter: gradient}, summed statistics, loss) of one update's losses."""
    scored = torch.ones(4, dtype=torch.bool) if scored is None else scored
    if reference is None:
        with torch.no_grad():
            scores = token_logps(model, rollout)
        reference = [scores.logp, scores.latent_mean]
    latents = int(scored[rollout.seg_rows].sum()) if rollout.has_mask else 1
    totals = Totals(4, int(rollout.valid[scored].sum()), latents)
    for p in model.trainable.values():
        p.grad = None
    sums, value = {}, 0.0
    for rows in micro_batches(4, micro_batch_size):
        loss, stats = rollout_loss(
            model, rollout, rows, advantages, scored, reference, totals, args
        )
        loss.backward()
        value += loss.item()
        for name, x in stats.items():
            sums[name] = sums.get(name, 0) + x.item()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.trainable.items()
    }
    for p in model.trainable.values():
        p.grad = None
    return grads, sums, value


def reached(model, grads) -> set[str]:
    return {model.group_of(n) for n, g in grads.items() if g.abs().max() > 0}


def largest_difference(a, b) -> float:
    return max((a[n] - b[n]).abs().max().item() for n in a)


# The start


def test_at_step_0_the_ratio_is_one_and_the_kl_zero(policy, batch):
    model = policy()
    roles = Roles(model.trainable)
    for loop in (1, 2):
        rollout = rollout_of(model, batch, loop)
        with roles.use("reference"):
            scores = token_logps(model, rollout)
        _, sums, loss = backward(
            model, rollout, arguments(kl_coef=0.1), reference=[scores.logp, scores.latent_mean]
        )
        assert sums["tokens"] == rollout.valid.sum() and sums["clipped"] == 0
        assert 0 <= sums["sampler_gap"] < 1e-4  # |log ratio|
        assert abs(sums["kl"] / sums["tokens"]) < 1e-6
        if loop == 2:
            assert sums["latents"] == len(rollout.seg_rows) and abs(sums["latent_kl"]) < 1e-6
        # ratio 1: the loss is minus the advantages, averaged over tokens and over latents
        expected = -(ADVANTAGES[:, None] * rollout.valid).sum() / rollout.valid.sum()
        if loop == 2:
            expected = expected - ADVANTAGES[rollout.seg_rows].mean()
        assert loss == pytest.approx(expected.item(), abs=1e-4)


def test_entropy_and_kl_away_from_the_start(model, caption_rollout):
    """The KL of shifted reference log-probs by hand: d = ln 2 everywhere gives 1 - ln 2 per token."""
    with torch.no_grad():
        scores = token_logps(model, caption_rollout)
    shift = torch.tensor(2.0).log()
    _, sums, _ = backward(
        model,
        caption_rollout,
        arguments(kl_coef=0.1),
        reference=[scores.logp + shift, scores.latent_mean],
    )
    assert sums["kl"] / sums["tokens"] == pytest.approx(1 - 0.693147, abs=1e-4)
    assert sums["entropy"] == pytest.approx(
        (scores.entropy * caption_rollout.valid).sum().item(), rel=1e-4
    )


# Which term reaches which weights


def test_one_step_moves_what_trains_and_nothing_else(policy, batch):
    model = policy()
    before = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.model.named_buffers()}
    roles = Roles(model.trainable)
    args = arguments(kl_coef=0.02, mask_loss_coef=0.1)
    optimizer = torch.optim.AdamW(model.trainable.values(), lr=1e-3, weight_decay=0.0)
    sum_of = {}
    for rollout in (rollout_of(model, batch, 1), rollout_of(model, batch, 2)):
        for n, g in backward(model, rollout, args)[0].items():
            sum_of[n] = sum_of.get(n, 0) + g
    for n, p in model.trainable.items():
        p.grad = sum_of[n]
    optimizer.step()
    moved = {n for n, p in model.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= set(model.trainable)
    assert {model.group_of(n) for n in moved} == set(TRAINABLE)
    assert all(torch.equal(b, buffers[n]) for n, b in model.model.named_buffers())
    assert all(
        torch.equal(roles.banks[role][n], before[n])
        for role in ("teacher", "reference")
        for n in model.trainable
    )


COLUMNS = ("lora", "mlp1", "text_hidden_fcs", "mask_decoder", "prompt_encoder")
TABLE = {  # one update by each term alone, KL off unless it says so: 1 where its gradient is not zero, 0 where it is exactly zero
    # term                               lora mlp1 text_hidden_fcs mask_decoder prompt_encoder
    "loop 1, policy": (1, 1, 0, 0, 0),
    "loop 1, policy, KL, mask flag": (1, 1, 0, 0, 0),  # --mask_loss_coef means nothing to loop 1
    "loop 2, policy, sigma 0": (1, 1, 0, 0, 0),
    "loop 2, policy, latent": (1, 1, 1, 0, 0),  # IoU and captions are black boxes
    "loop 2, mask term": (1, 1, 1, 1, 1),
    "loop 2, mask term, sigma 0": (1, 1, 1, 1, 1),
    "loop 2, policy, latent, mask term": (1, 1, 1, 1, 1),
    "loop 2, equal rewards": (0, 0, 0, 0, 0),
}


def column_of(model, name) -> str:
    group = model.group_of(name)
    return (
        next(part for part in COLUMNS[3:] if f"grounding_encoder.{part}." in name)
        if group == "sam2"
        else group
    )


def test_gradient_of_each_term_by_module(model, batch, caption_rollout, mask_rollout):
    """Which weights one update of each term reaches; prints the norms."""
    plain = rollout_of(model, batch, 2, sigma=0.0)
    assert plain.latent is None and {column_of(model, n) for n in model.trainable} == set(COLUMNS)
    rollouts = {"loop 1": caption_rollout, "loop 2": mask_rollout}
    print("\n" + " " * 36 + "".join(f"{column:>17s}" for column in COLUMNS))
    for term, expected in TABLE.items():
        args = arguments(
            mask_loss_coef=0.1 if "mask" in term else 0.0, kl_coef=0.1 if "KL" in term else 0.0
        )
        advantages = ADVANTAGES if "policy" in term else torch.zeros(4)
        grads, sums, _ = backward(
            model, plain if "sigma 0" in term else rollouts[term[:6]], args, advantages
        )
        assert all(g.isfinite().all() for g in grads.values())
        assert ("latents" in sums) == (term[:6] == "loop 2" and "sigma 0" not in term)
        norms = dict.fromkeys(COLUMNS, 0.0)
        for n, g in grads.items():
            norms[column_of(model, n)] += g.double().square().sum().item()
        print(f"{term:36s}" + "".join(f"{norm**0.5:17.3g}" for norm in norms.values()))
        assert tuple(int(norm > 0) for norm in norms.values()) == expected, (term, norms)


def test_every_sam2_weight_that_trains_can_get_a_gradient(model, batch):
    """All but the hypernetworks of mask tokens that did not win here."""
    rollout = rollout_of(model, batch, 2)
    grads, _, _ = backward(model, rollout, arguments(mask_loss_coef=1.0), torch.zeros(4))
    silent = {n for n, g in grads.items() if model.group_of(n) == "sam2" and g.abs().max() == 0}
    assert {
        n.split("output_hypernetworks_mlps.")[-1].split(".")[0]
        for n in silent
        if "hypernetworks" in n
    } < {"1", "2", "3"}
    assert not {n for n in silent if "hypernetworks" not in n}


@pytest.mark.parametrize("loop", [1, 2])
def test_the_opposite_advantages_give_the_opposite_gradient(
    model, caption_rollout, mask_rollout, loop
):
    rollout = caption_rollout if loop == 1 else mask_rollout
    one = backward(model, rollout, arguments())[0]
    other = backward(model, rollout, arguments(), -ADVANTAGES)[0]
    scale = max(g.abs().max().item() for g in one.values())
    assert scale > 1e-4
    assert largest_difference(one, {n: -g for n, g in other.items()}) < 1e-4 * scale
    double = backward(model, rollout, arguments(), 2 * ADVANTAGES)[0]
    assert largest_difference({n: 2 * g for n, g in one.items()}, double) < 1e-4 * scale


def test_the_latent_term_points_to_the_better_mask(model, mask_rollout):
    """Its gradient by the mean of a [SEG] is -A (z - mean) / (sigma^2 D) / M: good samples attract, bad ones repel."""
    latent = mask_rollout.latent
    mean = (latent.z - latent.offset).clone().requires_grad_()
    m, d = mean.shape
    a = ADVANTAGES[mask_rollout.seg_rows]
    loss, kl = latent_loss(
        mean,
        latent,
        torch.ones(m, dtype=torch.bool),
        a,
        torch.ones(m, dtype=torch.bool),
        mean.detach(),
        Totals(4, 1, m),
        arguments(kl_coef=0.5),
    )
    loss.backward()
    torch.testing.assert_close(
        mean.grad, -a[:, None] * latent.offset / (SIGMA**2 * d * m), atol=1e-6, rtol=1e-3
    )
    assert kl == 0
    # a reference 2 sigma off in every dimension: KL 4 / 2 for each of the M
    far, kl = latent_loss(
        mean,
        latent,
        torch.ones(m, dtype=torch.bool),
        a,
        torch.ones(m, dtype=torch.bool),
        mean.detach() + 2 * SIGMA,
        Totals(4, 1, m),
        arguments(kl_coef=0.5),
    )
    assert kl.item() == pytest.approx(2 * m, rel=1e-4)
    assert far.item() == pytest.approx(loss.item() + 0.5 * 2, rel=1e-4)


# Normalisation


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo", "gspo"])
def test_micro_batches_give_the_gradient_of_the_whole(model, mask_rollout, loss_type):
    args = arguments(loss_type=loss_type, kl_coef=0.1, mask_loss_coef=0.1)
    with torch.no_grad():
        scores = token_logps(model, mask_rollout)
    reference = [scores.logp - 0.3, scores.latent_mean + 0.1]
    whole, sums, loss = backward(model, mask_rollout, args, reference=reference)
    assert max(g.abs().max() for g in whole.values()) > 1e-2
    for size in (1, 2, 3):
        grads, part_sums, part_loss = backward(
            model, mask_rollout, args, micro_batch_size=size, reference=reference
        )
        assert largest_difference(whole, grads) < 1e-5
        assert part_loss == pytest.approx(loss, abs=1e-5)
        for name in set(sums) - {"sampler_gap"}:
            assert part_sums[name] == pytest.approx(sums[name], abs=1e-4, rel=1e-4), name


def test_a_row_without_reward_leaves_the_loss(model, mask_rollout):
    """Whatever its advantage, and its tokens and latents do not count."""
    scored = torch.tensor([True, True, True, False])
    args = arguments(kl_coef=0.1, mask_loss_coef=0.1)
    one, sums, _ = backward(model, mask_rollout, args, scored=scored)
    other, _, _ = backward(
        model, mask_rollout, args, torch.tensor([0.7, -0.7, -0.7, 50.0]), scored=scored
    )
    assert largest_difference(one, other) == 0
    assert (
        sums["tokens"] == mask_rollout.valid[:3].sum()
        and sums["latents"] == (mask_rollout.seg_rows < 3).sum()
    )


def test_rows_without_a_mask_have_no_mask_terms(model, mask_rollout):
    """A micro-batch in which no row said [SEG] still gives a loss."""
    ids = mask_rollout.ids.clone()
    ids[ids == model.model.seg_id] = 5
    none = torch.zeros(0, dtype=torch.long)
    silent = replace(
        mask_rollout,
        ids=ids,
        seg_rows=none,
        latent=Latent(torch.zeros(0, 64), torch.zeros(0, 64), torch.zeros(0), SIGMA),
    )
    grads, sums, loss = backward(model, silent, arguments(mask_loss_coef=0.1))
    assert "mask_loss" not in sums and "latent_loss" not in sums and loss == loss
    assert reached(model, grads) == {"lora", "mlp1"}


def test_micro_batches_cover_all_rows_once():
    assert micro_batches(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert micro_batches(2, 8) == [slice(0, 2)]


# The mask term


def test_the_mask_term_is_of_the_sampled_masks(model, mask_rollout):
    """Those that the rollout was scored on, not those of the mean."""
    image = [mask_rollout.prompts.image[row] for row in mask_rollout.seg_rows.tolist()]
    targets = [mask_rollout.batch.masks[i] for i in image]
    latent = mask_rollout.latent
    with torch.no_grad():
        drawn, plain = (
            mask_loss(model.decode_masks(mask_rollout.images, image, z), targets).mean().item()
            for z in (latent.z, latent.z - latent.offset)
        )
    _, sums, loss = backward(model, mask_rollout, arguments(mask_loss_coef=0.5), torch.zeros(4))
    assert sums["mask_loss"] == pytest.approx(drawn, rel=1e-3) and abs(drawn - plain) > 5e-3 * drawn
    assert loss == pytest.approx(0.5 * drawn, rel=1e-3)


def test_mask_loss_by_hand():
    # logits 0 everywhere: p = 1/2, BCE ln 2; 4 pixels, 2 in the target: Dice 1 - (2 * 1 + 1) / (2 + 2 + 1) = 2/5
    target = torch.tensor([[True, False], [True, False]])
    loss = mask_loss(torch.zeros(1, 2, 2), [target])
    assert loss.tolist() == pytest.approx([2.0 * 0.6931472 + 0.5 * 0.4])
    perfect = mask_loss(torch.where(target, 50.0, -50.0)[None], [target])
    assert perfect.item() == pytest.approx(0, abs=1e-6)


def test_mask_loss_resizes_its_targets():
    """Targets of images of different size, nearest: a 4 x 4 mask whose left half is set is the 2 x 2 one above."""
    large = torch.zeros(4, 4, dtype=torch.bool)
    large[:, :2] = True
    small = torch.tensor([[True, False], [True, False]])
    logits = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0))[:1].expand(2, -1, -1)
    one, other = mask_loss(logits, [large, small]).tolist()
    assert one == other
