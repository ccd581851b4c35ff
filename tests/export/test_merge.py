"""A run's checkpoint becomes a folder in the original layout that computes the same."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rl_train.checkpoint import save_load
from rl_train.checkpoint.save_load import STATE_KEYS
from rl_train.config.grpo_config import PolicyConfig
from rl_train.export.load_policy import load_policy
from rl_train.export.merge import preferred_role
from rl_train.export.model_card import write_card
from rl_train.policies.sa2va import build_policy
from rl_train.utils.io import write_json
from sa2va_hf import Sa2VAModel
from sa2va_hf.processing_sa2va import normalise_tiles
from tests.runs import CHECKPOINT, on_one_core, run
from tools import export


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint after two steps: the policy has moved visibly, and the teacher half as far."""
    monkeypatch = pytest.MonkeyPatch()
    for _ in on_one_core(monkeypatch):
        folder = tmp_path_factory.mktemp("export")
        base = folder / "base"
        shutil.copytree(CHECKPOINT, base)
        (base / "modeling_sa2va_chat.py").write_text(
            "# the original code beside a published checkpoint\n"
        )
        (base / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# Its own card\n")
        run(
            data,
            folder / "run",
            model_path=base,
            max_steps=2,
            save_steps=2,
            learning_rate=1e-3,
            warmup_ratio=0,
            ema_decay=0.5,
        )
        yield folder / "run" / "checkpoint_step_2"
    monkeypatch.undo()


def outputs(model, batch, policy):
    """Logits of a description prompt with image and region; mask logits of a fixed embedding."""
    inputs = batch.inputs
    prompts = policy.describe_prompts(policy.encode(batch), [0, 1], list(inputs.prompt_masks[:2]))
    ids = torch.tensor(prompts.ids[0])[None]
    logits = model(
        ids,
        torch.ones_like(ids),
        pixel_values=normalise_tiles(inputs.tiles[0]),
        prompt_masks=[inputs.prompt_masks[:1]],
        vp_overall_mask=torch.tensor([True]),
    ).logits
    hidden = torch.ones(1, model.config.llm.hidden_size)
    masks = model.mask_logits(inputs.sam_pixels[:1], model.text_hidden_fcs(hidden))
    return logits.detach(), masks.detach()


@pytest.mark.parametrize("role, file", [("policy", "trainables"), ("teacher", "ema")])
def test_exported_model_computes_what_was_trained(trained, tmp_path, batch, role, file):
    output = tmp_path / "exported"
    export.main(
        [
            "--checkpoint",
            str(trained),
            "--output",
            str(output),
            "--role",
            role,
            "--dtype",
            "float32",
        ]
    )
    policy = load_policy(trained, role, None, torch.device("cpu"), dtype="float32")
    weights = {name: parameter.detach().clone() for name, parameter in policy.trainable.items()}
    save_load.load_weights(trained, policy.trainable, f"{file}.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in policy.trainable.items())
    config = PolicyConfig(
        model_path=str(policy.model.folder), dtype="float32", lora_r=4, lora_alpha=8
    )
    policy = build_policy(config, {policy.group_of[name] for name in weights}, 0, "cpu")
    untrained = outputs(policy.model, batch, policy)
    save_load.load_weights(trained, policy.trainable, f"{file}.safetensors")
    expected = outputs(policy.model, batch, policy)
    model = Sa2VAModel.from_pretrained(output)
    model.bind_tokenizer(policy.tokenizer)
    found = outputs(model, batch, policy)
    for name, a, b, before in zip(("logits", "mask logits"), found, expected, untrained):
        deviation = ((a - b).abs().max() / b.abs().max()).item()
        print(
            f"{role}, {name}: exported and trained differ by {deviation:.1e} of the largest value; "
            f"trained moved by {(b - before).abs().max():.1e}"
        )
        assert deviation < 1e-4 and (b - before).abs().max() > 1e-3
    original = load_file(CHECKPOINT / "model.safetensors")
    exported = load_file(output / "model.safetensors")
    assert {k: v.shape for k, v in exported.items()} == {k: v.shape for k, v in original.items()}
    print(f"{len(exported)} keys, those of the original layout")
    base = trained.parent.parent / "base"
    for name in ("tokenizer.json", "tokenizer_config.json", "modeling_sa2va_chat.py"):
        assert (output / name).read_text() == (base / name).read_text()
    config = (base / "config.json").read_text()
    assert (output / "config.json").read_text() == config.replace("bfloat16", "float32")
    assert not output.with_name(".exported.unfinished").exists()
    check_card(output, trained, role, base)


def check_card(output, trained, role, base):
    """Compare a card with the files of its run."""
    card = (output / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["license"] == "mit" and fields["tags"] == ["image-segmentation"]
    assert "base_model" not in fields  # a folder is no name on the hub, and its own base another
    evaluations = trained.parent / "evaluation"
    before, after = (json.loads((evaluations / f"step_{n}.json").read_text()) for n in (0, 2))
    now = after["means"] if role == "policy" else after["teacher"]["means"]
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert not [row for row in rows if row.startswith("left out")]  # one sample was measured
    assert {"cycle_iou", "seg_iou"} <= before["means"].keys()
    for metric in before["means"]:
        start, end = before["means"][metric], now[metric]
        row = f"{metric} {start:.4f} {end:.4f} {end - start:+.4f}"
        assert any(line.startswith(row) for line in rows), metric
    assert f"The {role} of step 2 of a run of rl-sa2va, merged into base." in text
    assert "from base, step 2: `gar:train`." in text and '"learning_rate": 0.001' in text
    assert str(base.parent) not in card and "/tmp" not in card and "output_dir" not in card
    assert (output / "README_of_the_base.md").read_text() == (base / "README.md").read_text()
    entries = text.partition("## Citation")[2]
    named = ("2501.04001", "2408.00714", "2412.05271", "2412.15115", "2402.03300", "{rl_sa2va,")
    assert all(name in entries for name in named) and entries.count("{") == entries.count("}")


def test_a_card_leaves_out_what_the_run_does_not_know(trained, tmp_path):
    """The checkpoint is a copy without evaluations, the base has no card; hub names stay."""
    folder = shutil.copytree(trained, tmp_path / "of_somebody")
    base = shutil.copytree(CHECKPOINT, tmp_path / "models--owner--Sa2VA-4B" / "snapshots" / "f00")
    write_card(tmp_path, folder, base, "policy")
    card = (tmp_path / "README.md").read_text()
    fields = yaml.safe_load(card.split("---\n", 2)[1])
    assert fields["base_model"] == "owner/Sa2VA-4B" and "license" not in fields
    assert "## Metrics" not in card and "# owner/Sa2VA-4B, trained further" in card


def test_a_card_of_supervised_training(tmp_path):
    """It cites no GRPO, and shows no folders of the machine."""
    folder = tmp_path / "checkpoint_step_3"
    flags = dict(
        dataset="gar", data_dir="/home/me/set", data_mixture=["refcocog/val:o/s=.5", "dam:~/x/y"]
    )
    write_json(folder / "config.json", flags)
    torch.save(dict.fromkeys(STATE_KEYS) | dict(step=3), folder / "training_state.pt")
    write_card(tmp_path, folder, CHECKPOINT, "policy")
    card = (tmp_path / "README.md").read_text()
    assert "step 3: `gar:set`; `refcocog/val:o/s=.5`; `dam:y`." in card
    assert '"data_dir": "set"' in card and "2402.03300" not in card


def test_default_dtype_is_the_base_s_and_the_merge_is_not_rounded_first(trained, tmp_path):
    """bf16(fp32 base + fp32 product), not bf16 + bf16."""
    export.export(trained, tmp_path / "default")
    export.export(trained, tmp_path / "full", dtype=torch.float32)
    default, full = (
        load_file(tmp_path / "default" / "model.safetensors"),
        load_file(tmp_path / "full" / "model.safetensors"),
    )
    assert {v.dtype for v in default.values()} == {torch.bfloat16} and {
        v.dtype for v in full.values()
    } == {torch.float32}
    assert all(torch.equal(default[k], full[k].bfloat16()) for k in full)
    base = load_file(CHECKPOINT / "model.safetensors")
    frozen = [k for k in base if not torch.equal(default[k], base[k])]
    assert all(
        k.startswith(
            (
                "language_model.model.layers",
                "mlp1",
                "text_hidden_fcs",
                "grounding_encoder.sam2_model.sam_",
            )
        )
        for k in frozen
    )
    assert any(k.startswith("language_model") for k in frozen)


def test_the_role_with_the_better_score(tmp_path, capsys):
    """The teacher is better by what counts and worse by what does not."""
    policy = dict(seg_iou=0.6, caption_meteor=0.4, cycle_iou=0.9, cycle_meteor=0.9)
    teacher = dict(seg_iou=0.5, caption_meteor=0.6, cycle_iou=0.1, cycle_meteor=0.1)
    folder, file = tmp_path / "copied", tmp_path / "evaluation" / "step_7.json"
    folder.mkdir()
    torch.save(dict.fromkeys(STATE_KEYS) | dict(step=7), folder / "training_state.pt")
    assert preferred_role(folder) == "policy"  # there is no teacher
    (folder / "ema.safetensors").touch()
    with pytest.raises(ValueError, match="^--role auto: .*--role policy or --role teacher"):
        preferred_role(folder)

    def preferred(first, second, metric_for_best_model):
        flags = dict(metric_for_best_model=metric_for_best_model)
        write_json(file, dict(flags=flags, means=first, teacher=dict(means=second)))
        return preferred_role(folder)

    assert preferred(policy, teacher, []) == "teacher"
    printed = capsys.readouterr().out
    assert "by the mean of seg_iou and caption_meteor on the evaluation split: " in printed
    assert "policy 0.5000, teacher 0.5500" in printed
    assert preferred(policy, teacher, ["seg_iou"]) == "policy"
    assert (
        "merging the policy, by seg_iou on the evaluation split: policy 0.6"
        in capsys.readouterr().out
    )
    assert preferred(teacher, policy, []) == preferred(policy, policy, []) == "policy"
    assert "policy 0.50000000, teacher 0.50000000" in capsys.readouterr().out
    write_json(file, dict(means=policy))  # of a run that did not measure the teacher
    with pytest.raises(ValueError, match="^--role auto: .*--role policy or --role teacher"):
        preferred_role(folder)


def test_bad_input(trained, tmp_path):
    def refused(*words, **changes):
        arguments = dict(checkpoint=trained, output=tmp_path / "new") | changes
        with pytest.raises(SystemExit) as stopped:
            export.main(
                [piece for name, value in arguments.items() for piece in (f"--{name}", str(value))]
            )
        assert all(word in str(stopped.value) for word in words), stopped.value

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    refused("--output", "not empty", output=tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "precious"
    for output in (tmp_path / "full" / "mine.txt", tmp_path / "full" / "mine.txt" / "new"):
        refused(f"--output {output} cannot be written: ", "Not a directory", output=output)
    sentence = f"--checkpoint {trained.parent}: is no checkpoint of a run; give one, such as"
    refused(sentence, str(trained.parent / "checkpoint_"), checkpoint=trained.parent)
    (trained.parent / "final_model").mkdir()
    shutil.copy(CHECKPOINT / "config.json", trained.parent / "final_model")
    refused("is no checkpoint of a run; give one", checkpoint=trained.parent / "final_model")
    refused("is named checkpoint_step_N", checkpoint=tmp_path / "full")
    refused("--model_path", "no such folder", model_path=tmp_path / "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    (broken / "trainables.safetensors").write_bytes(
        (broken / "trainables.safetensors").read_bytes()[:-100]
    )
    refused("--role auto", "--role policy", checkpoint=broken)  # no evaluation/ beside it
    refused("trainables.safetensors", "damaged", checkpoint=broken, role="policy")
    (broken / "config.json").write_text((broken / "config.json").read_text()[:100])
    refused(f"{broken / 'config.json'} is missing or damaged", checkpoint=broken, role="teacher")
    assert not (tmp_path / "new").exists()
