"""The demo's warm start: what it is wrong about, and its prompt head, trained to a stated share."""

import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.prompts import DESCRIBE
from sa2va_hf.templates import template_map, video_lisa_encode_fn
from sa2va_hf.tokenizer import load_tokenizer
from tools import demo_unsettle, demo_warm_start, make_demo
from tools.demo_losses import Codes, choice_loss, nearest, region_means
from tools.demo_model import CONFIG, make_tokenizer
from tools.demo_report import told_apart
from tools.demo_scenes import MID, TINY, Object, Scene, make_scene
from tools.demo_sizes import SIZES
from tools.make_demo import SHIPPED_CHECKPOINT, main
from tools.new_folder import save


@pytest.fixture
def warm_start():
    model = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    return demo_warm_start.WarmStart(
        model, tokenizer, Sa2VAProcessor(model.config, max_tiles=1), seed=0, num_scenes=4
    )


def test_the_shipped_files_are_those_that_would_be_written(tmp_path):
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
    save(Sa2VAModel(Sa2VAConfig(**CONFIG | {"llm_config": llm})), make_tokenizer(seed=0), tmp_path)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (SHIPPED_CHECKPOINT / name).read_text()


def test_a_prompt_head_is_disturbed_until_a_share_of_its_masks_hits(warm_start, monkeypatch):
    """Hits fall by a quarter with each standard deviation; best at twice the scale."""
    last = warm_start.model.text_hidden_fcs[2]
    learnt = last.weight.detach().clone()
    found = []

    def fake(start, phrases, scale):
        noise = float((last.weight.detach() - learnt).std() / learnt.std())
        found.append((1 - abs(scale - 2) / 10, 1 - noise / 4))
        return found[-1]

    monkeypatch.setattr(demo_unsettle, "found", fake)
    before = {name: p.clone() for name, p in warm_start.model.state_dict().items()}
    demo_unsettle.unsettle(warm_start, target=0.5, num_scenes=1)
    after = warm_start.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"text_hidden_fcs.2.weight", "text_hidden_fcs.2.bias"}
    assert torch.allclose(after["text_hidden_fcs.2.bias"], 2 * before["text_hidden_fcs.2.bias"])
    noise = (last.weight.detach() / 2 - learnt).std() / learnt.std()
    assert float(noise) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("kind", [TINY, MID])
def test_mistakes_make_no_word_more_frequent_and_half_of_the_groups_mostly_wrong(kind):
    """Each value is in one group, and of a group each is taken for another equally often."""
    values = [value for of in kind.attributes.values() for value in of]
    groups = [group for group in demo_warm_start.MISTAKES if group[0] in values]
    assert sorted(value for group in groups for value in group) == sorted(values)
    for of in kind.attributes.values():
        shares = [share for group, share in demo_warm_start.MISTAKES.items() if group[0] in of]
        assert 0.3 < np.mean(shares) < 0.5 and max(shares) <= 0.6


def test_captions_with_mistakes():
    rng, shares = np.random.default_rng(0), demo_warm_start.MISTAKES
    obj = Object("plain", "red", "circle", "top left", None, "large")
    said = [demo_warm_start.mistaken(obj, rng) for _ in range(2000)]
    wrong = {("plain", "checked"): "checked", ("red", "orange"): "orange"}
    wrong |= {("circle", "square"): "square", ("top left", "top right"): "top right"}
    wrong |= {("small", "medium", "large"): "small"}  # of three the next
    for group, word in wrong.items():
        assert abs(np.mean([word in text for text in said]) - shares[group]) < 0.05


def test_a_part_that_is_not_finite_ends(warm_start):
    part = torch.nn.Linear(1, 1)

    def loss(indices, rng, progress):
        value = part.weight.sum() * torch.nan
        return value, dict(mask=value)

    with pytest.raises(RuntimeError, match="^masks: not finite within 1 steps"):
        warm_start.train("masks", (part,), loss, 1, 0)


def test_a_prompt_head_that_never_hits_is_said(warm_start, monkeypatch):
    monkeypatch.setattr(demo_unsettle, "found", lambda start, phrases, scale: (0.0, 0.1))
    with pytest.raises(RuntimeError, match="of the masks hit, even undisturbed"):
        demo_unsettle.unsettle(warm_start, num_scenes=1)


def test_masks_are_made_the_objects_that_they_are_most_of(warm_start):
    """By SAM2's hypernetworks alone; what they are to be does not follow what they become."""
    decoder = warm_start.model.grounding_encoder.mask_decoder
    own, before = decoder.output_hypernetworks_mlps, deepcopy(warm_start.model.state_dict())
    (hidden, features, masks), *_ = demo_unsettle.phrases(warm_start, 4)

    def likest():
        prompts = warm_start.model.text_hidden_fcs(hidden)
        image = torch.zeros(len(prompts), dtype=torch.long)
        logits = warm_start.model.decode_masks(features, image, prompts)
        return demo_unsettle.all_ious(logits > 0, masks).max(1)

    with torch.no_grad():
        iou, objects = likest()
    demo_unsettle.decide(warm_start, 12)
    with torch.no_grad():
        later, same = likest()
    clear = iou > 0.5
    assert torch.equal(same[clear], objects[clear]) and later[clear].mean() > iou[clear].mean()
    after = warm_start.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("output_hypernetworks_mlps" in name for name in changed)
    assert decoder.output_hypernetworks_mlps is own


def test_all_ious_by_hand():
    masks = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()[:, None]
    areas = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()[:, None]
    assert demo_unsettle.all_ious(masks, areas).tolist() == [[0.5, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("kind, size", [(TINY, 64), (MID, 256)])
def test_codes_find_the_object_whatever_their_scale_and_the_embeddings_around_it_mostly(kind, size):
    codes = Codes(size, seed=0, device="cpu", attributes=kind.attributes)
    scenes = [make_scene(0, 0, i, kind) for i in (0, 1)]
    objects = [obj for scene in scenes for obj in scene.objects]
    image = torch.tensor([0] * len(scenes[0].objects) + [1] * len(scenes[1].objects))
    z, places = codes([obj.attributes for obj in objects]), torch.arange(len(objects))
    assert torch.allclose(z.square().mean(), torch.tensor(1.0), atol=1e-4)
    for scale in (0.1, 10):
        assert torch.equal(nearest(scale * (codes.mean + z), image, z, image), places)
    rng = np.random.default_rng(0)
    found = [nearest(codes.around(objects, rng), image, z, image) == places for _ in range(50)]
    assert 0.5 < torch.stack(found).float().mean() < 0.95
    assert torch.equal(image[nearest(z.flip(0), image, z, image)], image)  # of its own image
    assert all(share == 1 for share in codes.read(z, objects)[1].values())


def test_region_means_and_the_choice_by_hand():
    features = torch.arange(8.0).view(1, 4, 2)  # of one image, 2 x 2 cells
    grids = torch.tensor([[[True, False], [False, True]], [[False, True], [False, False]]])
    means = region_means(features, torch.tensor([0, 0]), grids)
    assert means.tolist() == [[3.0, 4.0], [2.0, 3.0]]
    # Two scenes, of two objects and of one, in images of three pixels.
    masks = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 1, 0]]).bool().view(3, 1, 3)
    logits = torch.tensor([[2.0, 0, 0], [4, 1, 1], [0, 0, 9]]).view(3, 1, 3)
    image, meant = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])
    loss, hits = choice_loss(logits, masks, image, meant)
    # mean logits 2 and 0, of which the first is meant; 4 and 1, the second; one of one
    by_hand = np.log1p(np.exp(-2)) + np.log1p(np.exp(3))
    assert loss.item() == pytest.approx(by_hand / 3, abs=1e-5) and hits.item() == pytest.approx(
        2 / 3
    )


def test_examples_are_encoded_by_the_rule_of_supervised_training(warm_start):
    prompts, tokenizer = warm_start.prompts, warm_start.tokenizer
    obj, rng = warm_start.scenes[0].objects[0], np.random.default_rng(0)
    turn = {"input": prompts.question(DESCRIBE, 1, [3]), "output": obj.caption}
    encoded = template_map({"conversation": [turn]}, prompts.template)
    encoded = video_lisa_encode_fn(encoded, tokenizer, max_length=8192)
    ids, labels = warm_start._describe(obj, 3, True, rng)
    assert (ids, labels) == (encoded["input_ids"], encoded["labels"])


def test_what_the_report_says_of_scenes():
    """Three objects: the middle one shares a value with each other one."""
    objects = [("plain", "red", "circle", "top left"), ("plain", "blue", "cross", "top right")]
    objects += [("banded", "blue", "square", "bottom left")]
    scene = Scene(None, tuple(Object(*attributes, None) for attributes in objects))
    apart = told_apart([scene])
    # alone: 3 of 4 values of the first and last object, 2 of the middle one
    assert apart[1] == dict(any=pytest.approx(8 / 12), best=1.0) and apart[4]["any"] == 1


def test_parts_are_done_again_from_what_was_saved_after_the_one_before(tmp_path, monkeypatch):
    done = []

    class Fake:
        def __init__(self, model, tokenizer, processor, seed, num_scenes, **how):
            self.model = model
            done.append((num_scenes, how["batch_size"], model.mlp1[1].bias[0].item()))

        def see(self, steps):
            self.model.mlp1[1].bias.data[0] += 1
            done.append(("see", steps))

    monkeypatch.setattr(make_demo, "WarmStart", Fake)
    monkeypatch.setattr(make_demo, "unsettle", lambda start: done.append("unsettle"))
    monkeypatch.setattr(make_demo, "decide", lambda start, steps: done.append(("decide", steps)))
    shutil.copytree(SHIPPED_CHECKPOINT, tmp_path / "warm_start")
    flags = f"--output_dir {tmp_path} --train_scenes 1 --heldout_scenes 1 --train_checkpoint"
    flags += " --warm_start_steps 1 2 5 3 4 6 --parts see unsettle decide"
    main(flags.split())
    first = done[0][-1]
    tiny = SIZES["tiny"]
    built = (tiny.warm_start_scenes, tiny.batch_size, first)
    assert done == [built, ("see", 3), "unsettle", ("decide", 6)]
    for folder in ("warm_start", "checkpoint"):
        saved = Sa2VAModel.from_pretrained(tmp_path / folder).mlp1[1].bias[0].item()
        assert saved == pytest.approx(first + 1, abs=0.01)


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--size mid", "--size mid needs --train_checkpoint"),
        ("--train_checkpoint --parts draw talk", "--parts draw talk: their order is look talk err"),
    ],
)
def test_flags_that_do_not_go_together(flags, complaint, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output_dir", str(tmp_path), *flags.split()])
    assert complaint in capsys.readouterr().err
