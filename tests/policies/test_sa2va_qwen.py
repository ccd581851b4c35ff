"""Sa2VA of Qwen2.5-VL and Qwen3-VL as a policy: answers, scores, regions and whole runs."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train import sft, train
from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.errors import DamagedSample
from rl_train.data.loader import Batches
from rl_train.data.refcoco import RefCOCODataset
from rl_train.data.text import phrase
from rl_train.engine.packing import input_mask
from rl_train.export.load_policy import load_policy
from rl_train.policies.sa2va import build_policy, check_folders
from sa2va_hf import Sa2VAModel
from sa2va_hf.prompts import SEGMENT_ANSWERS, SEGMENT_WORDINGS
from sa2va_hf.qwen_images import draw_region, patches, region_box
from tests import runs, supervised
from tests.runs import curve, weights
from tests.sa2va_hf.qwen_training import training_example
from tests.sa2va_hf.tiny_qwen import IDS, write_folder, write_sam3_folder
from tools import evaluate, export, predict
from tools.demo import refcoco_writer

unmeasured = pytest.fixture(autouse=True)(runs.unmeasured)
FAMILIES = ("qwen25vl", "qwen3vl")
GROUPS = ("lora", "text_hidden_fcs", "sam2")
PROMPT_GROUPS = ("embeddings", "language_model", "vision")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("qwen") / request.param, request.param)


def policy_of(folder, groups=GROUPS, **changes):
    torch.manual_seed(0)
    settings = dict(lora_r=4, lora_alpha=8, dtype="float32") | changes
    return build_policy(PolicyConfig(model_path=str(folder), **settings), groups, 8, "cpu")


@pytest.fixture(scope="module")
def policy(folder):
    built = policy_of(folder)
    for name, parameter in built.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return built


@pytest.fixture
def batch(policy, scenes):
    return Batches(scenes, policy.preprocessor(8))[[0, 1, 2, 3]]


def whole_forward(policy, batch, row, prompts, ids):
    """The model on pixels of one row, its region drawn, without padding, packing and engine."""
    pixels = batch.inputs.tiles[prompts.image_index[row]]
    if prompts.prompt_masks is not None:
        pixels = draw_region(pixels, prompts.prompt_masks[row][0], policy.region_prompt)
    rows = patches(pixels, policy.processor.preprocessing)
    grid = torch.tensor([policy.processor.grid(pixels)])
    prompt, answer = torch.tensor([prompts.ids[row]]), torch.tensor([ids])
    model, features = policy.model, policy.model.vision_features(rows, grid)
    positions = model.positions(prompt, torch.ones_like(prompt), grid)
    following = positions.max() + 1 + torch.arange(len(ids)).expand(3, 1, -1)
    # An answer of random weights may hold an image's token, which is text there.
    states = model.language_model.model(
        inputs_embeds=torch.cat(
            [
                model.embed(prompt, features),
                model.language_model.get_input_embeddings()(answer),
            ],
            dim=1,
        ),
        attention_mask=torch.ones(1, prompt.shape[1] + len(ids), dtype=torch.long),
        position_ids=torch.cat([positions, following], dim=2),
        use_cache=False,
    ).last_hidden_state
    norm = model.language_model.head_norm or torch.nn.Identity()
    return SimpleNamespace(logits=model.model.lm_head(norm(states)), hidden_states=(states,))


@pytest.mark.parametrize("asks", ["describe", "segment"])
def test_sampling_and_scores_are_those_of_a_whole_forward(policy, batch, asks):
    images = policy.encode(batch)
    if asks == "describe":
        prompts = policy.describe_prompts(images, range(4), batch.inputs.prompt_masks)
    else:
        prompts = policy.segment_prompts(images, range(4), batch.captions)
    uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    rollout = policy.sample(batch, images, prompts, 2, 6, uniforms)
    scores = policy.score(rollout)
    seg = input_mask(rollout.valid)
    hidden = scores.hidden_of(seg)
    assert torch.allclose(scores.logp.detach(), rollout.logp, atol=2e-5)
    assert torch.allclose(hidden, rollout.hidden[seg], atol=2e-4)
    at = 0
    for row in range(8):
        length = int(rollout.valid[row].sum())
        ids = rollout.ids[row, :length].tolist()
        out = whole_forward(policy, batch, row, rollout.prompts, ids)
        start = len(rollout.prompts.ids[row])
        logp = out.logits[0, start - 1 : -1].log_softmax(-1)[range(length), ids]
        assert torch.allclose(scores.logp[row, :length], logp, atol=2e-5)
        # The states that prompt SAM2: before the final norm in Qwen3-VL.
        states = out.hidden_states[-1][0, start : start + length - 1]
        assert torch.allclose(hidden[at : at + length - 1], states, atol=2e-4)
        at += length - 1
    scores.logp.sum().backward()
    gradients = {n: p.grad for n, p in policy.trainable.items() if "lora" in n}
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())
    policy.model.zero_grad()


def test_an_image_with_a_region_is_encoded_once(policy, batch, monkeypatch):
    encoded, own = [], policy.model.encode_images
    monkeypatch.setattr(
        policy.model, "encode_images", lambda pixels: encoded.append(len(pixels)) or own(pixels)
    )
    images = policy.encode(batch)
    prompts = policy.describe_prompts(images, [0, 1, 1, 0], batch.inputs.prompt_masks[[0, 1, 1, 0]])
    for _ in range(2):
        policy.last_hidden_states(images, prompts)
    assert encoded == [4, 1, 1]
    # Segmentation sees the image without a region.
    segment = policy.segment_prompts(images, [0], batch.captions[:1])
    whole = policy.embed(images, segment)[0]
    assert torch.equal(
        whole[0][torch.tensor(segment.ids[0]) == IDS["<|image_pad|>"]][0], images.vision[0]
    )


def test_a_group_without_parameters_is_left_out(policy):
    assert set(policy.group_of.values()) == set(GROUPS)
    assert all(".visual." not in name for name in policy.trainable)


def test_groups_of_supervised_training(folder):
    built = policy_of(folder, groups=PROMPT_GROUPS)
    assert set(built.group_of.values()) == set(PROMPT_GROUPS)
    names = [name for name, group in built.group_of.items() if group == "embeddings"]
    assert names == ["model.model.language_model.embed_tokens.weight", "model.lm_head.weight"]
    assert built.encoders_train


# Regions


def test_a_region_is_drawn_outside_of_itself():
    pixels = torch.full((3, 60, 80), 9, dtype=torch.uint8)
    cells = torch.zeros(8, 8, dtype=torch.bool)
    cells[2:5, 2] = cells[4, 2:5] = True  # an L
    outline, box = (draw_region(pixels, cells, shape) for shape in ("outline", "box"))
    inside = torch.nn.functional.interpolate(cells[None, None].float(), size=(60, 80))[0, 0] > 0
    for drawn in (outline, box):
        red = (drawn[0] == 255) & (drawn[1] == 0) & (drawn[2] == 0)
        assert red.any() and not (red & inside).any()
        assert torch.equal(drawn[:, ~red], pixels[:, ~red])
    assert (outline != box).any()
    assert region_box(cells) == (2 / 8, 2 / 8, 5 / 8, 5 / 8)
    assert torch.equal(draw_region(pixels, cells & False, "outline"), pixels)
    framed = draw_region(pixels, cells | True, "outline")  # the whole image: inside of it
    assert (framed[0, [0, -1]] == 255).all() and (framed[0, 30, 10:70] == 9).all()


@pytest.mark.parametrize("way", ["outline", "box", "coordinates"])
def test_ways_to_point_at_a_region(folder, scenes, way):
    policy = policy_of(folder, region_prompt=way)
    batch = Batches(scenes, policy.preprocessor(8))[[0, 1]]
    images = policy.encode(batch)
    grids = batch.inputs.prompt_masks
    prompts = policy.describe_prompts(images, [0, 1], grids)
    text = policy.tokenizer.decode([i for i in prompts.ids[0] if i != IDS["<|image_pad|>"]])
    assert text.startswith("<|im_start|>user\n<|vision_start|><|vision_end|>\nPlease generate")
    if way == "coordinates":
        box = json.loads(re.search(r"\{.*\}", text)[0])["bbox_2d"]
        scale = 1000 if "qwen3vl" in str(folder) else images.pixels[0].shape[2]
        assert box[0] == round(region_box(grids[0])[0] * scale) and prompts.prompt_masks is None
    else:
        shown = policy.embed(images, prompts)[0]
        plain = policy.embed(images, policy.segment_prompts(images, [0, 1], ["x", "y"]))[0]
        of_image = torch.tensor(prompts.ids[0]) == IDS["<|image_pad|>"]
        assert {"outline": "outlined in red", "box": "in the red box"}[way] in text
        assert (shown[0, -len(of_image) :][of_image] != images.vision[: images.tiles[0]]).any()
        assert plain.shape[2] == shown.shape[2]


def test_ways_to_point_at_a_region_of_internvl(scenes):
    """A drawn region changes the image's tokens, alike for alike regions; a box is in the text."""
    for way in ("outline", "box", "coordinates"):
        policy = policy_of(runs.CHECKPOINT, groups=("lora", "vision"), region_prompt=way)
        batch = Batches(scenes, policy.preprocessor(8))[[0, 1]]
        images, grids = policy.encode(batch), batch.inputs.prompt_masks
        prompts = policy.describe_prompts(images, [0, 0, 1], [grids[0], grids[0], grids[1]])
        embeds, _, positions = policy.embed(images, prompts)
        assert positions is None and torch.equal(embeds[0], embeds[1])
        text = policy.tokenizer.decode(prompts.ids[0])
        plain = policy.segment_prompts(images, [0], ["x"])
        of_image = [torch.tensor(p.ids[0]) == policy.model.img_context_id for p in (prompts, plain)]
        seen, whole = (
            policy.embed(images, p)[0][0, -len(p.ids[0]) :][slots]
            for p, slots in zip((prompts, plain), of_image)
        )
        if way == "coordinates":
            left = round(region_box(grids[0])[0] * 1000)
            assert torch.equal(seen, whole) and f"the box <box>[[{left}, " in text
            continue
        assert (seen != whole).any() and "red" in text
        embeds.sum().backward()  # the vision encoder trains on the drawn image
        assert all(p.grad is not None for n, p in policy.trainable.items() if "vision" in n)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(region_prompt="tokens"), "is asked about regions by outline or box or coordinates"),
        (dict(max_tiles=6), "--max_tiles 6: the image of a Qwen"),
    ],
)
def test_flags_of_another_family(folder, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_folders(PolicyConfig(model_path=str(folder), **changes))


def test_a_group_that_the_model_lacks(folder, data, tmp_path):
    line = supervised.line(
        data,
        tmp_path / "run",
        model_path=folder,
        trainable_modules="mlp1",
        max_completion_length=48,
    )
    with pytest.raises(SystemExit, match="mlp1: the model in --model_path has no such"):
        train.main(line, sft.SFT, sft.train)
    assert not (tmp_path / "run").exists()


def test_flags_of_internvl(tmp_path):
    for changes, words in [
        (dict(region_prompt="box", max_tiles=6), "--region_prompt box: a region is drawn on one t"),
        (dict(model_path=str(tmp_path)), f"--model_path {tmp_path}: config.json: of no known fa"),
    ]:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=re.escape(words)):
            check_folders(PolicyConfig(**dict(model_path=str(runs.CHECKPOINT)) | changes))


# Runs

# The demo's SAM2 finds nothing by most prompts of random weights; at this seed it does by some.
LOOPS = dict(
    num_generations=3,
    batch_size=2,
    max_completion_length=12,
    micro_batch_size=8,
    latent_std=1,
    seed=2,
)


def resumed(run, whole, folder, last, **changes):
    """A copy of the run `whole` that was killed before step `last` was saved, taken up again."""
    again = shutil.copytree(whole, folder)
    shutil.rmtree(again / f"checkpoint_step_{last}")
    return run(output=again, resume="", **changes)


def ten_steps_of_both_loops(folder, data, tmp_path):
    """Check gradient in every group, rewards that vary, and after a kill the same numbers."""

    def run(output, **changes):
        weights = ["loop2.meteor=0", "loop2.likelihood=1"]
        settings = LOOPS | dict(max_steps=10, save_steps=8, reward_weights=weights)
        return runs.run(data, output, model_path=folder, **settings | changes)

    whole = run(tmp_path / "whole")
    for group in GROUPS:
        assert max(curve(whole, f"grad_norm/{group}").values()) > 0
    for tag in ("loop1/reward_mean", "loop2/reward_mean"):
        assert len(set(curve(whole, tag).values())) > 1, tag
    again = resumed(run, whole, tmp_path / "again", 10)
    a, b = weights(whole, 10), weights(again, 10)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_ten_steps_of_both_loops(folder, data, tmp_path, capsys):
    ten_steps_of_both_loops(folder, data, tmp_path)
    printed = capsys.readouterr().out
    assert "written by transformers 4.57.1: LLM of 3 layers" in printed
    assert "--region_prompt outline, which no published model was trained on: before" in printed


def test_ten_steps_of_both_loops_with_sam3(data, tmp_path, capsys):
    """Loop 2 samples the prompt of SAM3's masks as it samples that of SAM2's."""
    ten_steps_of_both_loops(write_sam3_folder(tmp_path / "sam3"), data, tmp_path)
    assert "SAM3 at 224 pixels" in capsys.readouterr().out


def test_supervised_training_and_its_export(folder, data, tmp_path):
    """Ten steps; the exported folder has the layout of its base and the run's numbers."""

    def run(output, **changes):
        settings = dict(max_steps=10, save_steps=8, batch_size=2, max_completion_length=48)
        settings |= dict(region_prompt="box")
        return supervised.run(data, output, model_path=folder, **settings | changes)

    whole = run(tmp_path / "whole")
    for group in GROUPS:
        assert max(curve(whole, f"grad_norm/{group}").values()) > 0
    losses = curve(whole, "masks/text_loss")
    assert losses[10] < losses[1]
    again = resumed(run, whole, tmp_path / "again", 10)
    a, b = weights(whole, 10), weights(again, 10)
    assert all(torch.equal(a[name], b[name]) for name in a)
    merged = tmp_path / "merged"
    export.main(["--checkpoint", f"{whole}/checkpoint_step_10", "--output", str(merged)])
    names = {file.name for file in folder.iterdir()} | {"README.md"}
    assert {file.name for file in merged.iterdir()} == names
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, merged))
    assert after == before | dict(region_prompt="box")
    assert (policy_of(folder).region_prompt, policy_of(merged).region_prompt) == ("outline", "box")
    own = load_policy(whole / "checkpoint_step_10", "policy", None, "cpu", dtype="float32")
    model, ids = Sa2VAModel.from_pretrained(merged), torch.tensor([[1, 2, IDS["[SEG]"], 3]])
    out, expected = (m(ids, torch.ones_like(ids)) for m in (model, own.model))
    assert torch.allclose(out.logits, expected.logits, atol=1e-4)
    assert torch.allclose(out.hidden_states[-1], expected.hidden_states[-1], atol=1e-4)
    base = Sa2VAModel.from_pretrained(folder)
    assert not torch.allclose(out.logits, base(ids, torch.ones_like(ids)).logits, atol=1e-2)


def test_several_turns_are_those_of_the_originals_training(folder, data, tmp_path):
    """Ids and labels of `training_example`, whose numbers are compared with the original's."""
    how = dict(tasks="referring_segmentation", turns=5, max_completion_length=48)
    made = supervised.built(data, tmp_path / "run", model_path=folder, **how)
    _, _, batch, [examples] = supervised.losses(made, [0, 9], turns=5)
    policy = made.state.policy
    for k, i in enumerate([0, 9]):
        rng = np.random.default_rng([made.config.run.seed, 0, 0, i])
        turns = []
        for caption in [batch.captions[k], *batch.companion_captions[k]]:
            wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
            answer = SEGMENT_ANSWERS[rng.integers(len(SEGMENT_ANSWERS))]
            turns.append((wording.replace("{x}", phrase(caption)), answer))
        assert len(turns) == examples.num_turns[k] > 1
        image = made.data.train_set[i]["image"]
        encoded = training_example(policy.processor, [image], turns, policy.tokenizer)
        length = int(examples.valid[k].sum())
        ids = examples.prompts.ids[k] + examples.ids[k, :length].tolist()
        # Nothing follows the newline behind the last answer.
        assert encoded["input_ids"][0].tolist() == ids + policy.tokenizer.encode("\n")
        taught = encoded["labels"][0, -length - 1 : -1] >= 0
        assert torch.equal(taught, examples.taught[k, :length])


def test_evaluate_by_the_originals_protocol(folder, tmp_path):
    """The answers and masks of `predict_forward`, whose images are resized twice; no tiles."""
    refcoco_writer.main(f"--output_dir {tmp_path} --num_train 1 --num_heldout 1".split())
    flags = f"--model_path {folder} --data_dir {tmp_path} --dataset refcoco --subsets testA "
    flags += "--protocol sa2va --dtype float32 --num_samples 3 --num_workers 0 "
    flags += f"--max_completion_length 8 --output {tmp_path}/e.json"
    evaluate.main(flags.split())
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["flags"]["max_tiles"] == 1
    model = Sa2VAModel.from_pretrained(folder)
    model.require_tokenizer()
    model.max_new_tokens = 8
    policy = policy_of(folder)
    dataset = RefCOCODataset(tmp_path, "refcoco", "testA")
    by_name = {
        (s["image_id"], s["caption"]): s for s in map(dataset.__getitem__, range(len(dataset)))
    }
    for k, (name, reference) in enumerate(zip(found["image_ids"], found["references"])):
        sample = by_name[name, reference]
        answer = model.predict_forward(
            image=sample["image"],
            text=f"<image>\n Please segment {reference} in this image.",
            rounded_normalisation=True,
        )
        ids = policy.tokenizer.encode(answer["prediction"], add_special_tokens=False)
        assert found["captions"][k] == policy.prompts.completion_text(ids)
        mask = np.zeros_like(sample["mask"])
        for drawn in answer["prediction_masks"]:
            mask |= drawn[0]
        assert found["values"]["seg_intersection"][k] == (mask & sample["mask"]).sum()


def test_predict_describes_a_region(folder, scenes, tmp_path, capsys):
    scenes[0]["image"].save(tmp_path / "image.png")
    Image.fromarray(scenes[0]["mask"]).save(tmp_path / "region.png")
    line = ["--model_path", str(folder), "--image", f"{tmp_path}/image.png", "--dtype", "float32"]
    line += ["--region", f"{tmp_path}/region.png", "--max_completion_length", "4"]
    predict.main(line)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="--text What is it: with --region this model is asked"):
        predict.main([*line, "--text", "What is it"])


def test_narrow_images_are_damaged_samples(policy, scenes):
    preprocessor = policy.preprocessor(8)
    preprocessor.check(scenes[0])
    narrow = scenes[0] | dict(image=scenes[0]["image"].resize((2000, 8)))
    with pytest.raises(DamagedSample, match="image of 2000x8 pixels, narrower than 1 to 200"):
        preprocessor.check(narrow)


def test_the_fast_path_equals_the_modules(folder, scenes):
    """Its kernels' torch form, on the CPU; Qwen3-VL's states are those before the final norm."""
    policy = policy_of(folder)
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    batch = Batches(scenes, policy.preprocessor(8))[[0, 1, 2, 3]]
    images, results = policy.encode(batch), {}
    prompts = policy.segment_prompts(images, [0, 0, 1, 2], ["a", "a b", "c", "d"])
    drawn = policy.describe_prompts(images, [0, 0, 1], batch.inputs.prompt_masks[[0, 1, 1]])
    uniforms = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    slow = policy.engine.fast_on
    for path in (slow, ("cpu",)):
        policy.engine.fast_on = path
        rollout = policy.sample(batch, images, prompts, 2, 3, uniforms)
        with torch.no_grad():
            results[path] = [
                rollout.logp,
                policy.score(rollout).logp,
                policy.last_hidden_states(images, prompts),
                policy.last_hidden_states(images, drawn),
                rollout.hidden[:, :-1][rollout.valid[:, 1:]],
            ]
    policy.engine.release()
    assert slow == ("cuda",)
    for one, other in zip(*results.values()):
        assert torch.allclose(one, other, atol=1e-4)
