"""From a run's checkpoint to a folder in the original layout that computes what was trained."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rl_train import checkpoint, tasks
from rl_train.citations import bibtex
from rl_train.config import PolicyConfig
from rl_train.export import preferred_role
from rl_train.files import write_json
from rl_train.model_card import TASKS, front_matter, method, shown, write_card
from rl_train.policies.sa2va import build_policy
from rl_train.tasks.supervised import SUPERVISED
from rl_train.trained_policy import load_policy
from sa2va_hf import Sa2VAModel
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
    prompts = policy.describe_prompts(policy.encode(batch), [0, 1], list(inputs.grids[:2]))
    ids = torch.tensor(prompts.ids[0])[None]
    logits = model(
        ids,
        torch.ones_like(ids),
        pixel_values=inputs.pixel_values[0],
        prompt_masks=[inputs.grids[:1]],
        vp_overall_mask=torch.tensor([True]),
    ).logits
    hidden = torch.ones(1, model.config.llm.hidden_size)
    masks = model.mask_logits(inputs.sam_pixels[:1], model.text_hidden_fcs(hidden))
    return logits.detach(), masks.detach()


@pytest.mark.parametrize("role, file", [("policy", "trainables"), ("ema", "ema")])
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
    checkpoint.load_weights(trained, policy.trainable, f"{file}.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in policy.trainable.items())
    config = PolicyConfig(
        model_path=str(policy.model.folder), dtype="float32", lora_r=4, lora_alpha=8
    )
    policy = build_policy(config, {policy.group_of(name) for name in weights}, 0, "cpu")
    untrained = outputs(policy.model, batch, policy)
    checkpoint.load_weights(trained, policy.trainable, f"{file}.safetensors")
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
    assert not output.with_name("exported.tmp").exists()
    check_card(output, trained, role, base)


def check_card(output, trained, role, base):
    """What a card says of its run is what the run's own files say."""
    card = (output / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["license"] == "mit" and "custom_code" in fields["tags"]
    assert "base_model" not in fields  # a folder is no name on the hub, and its own base another
    trains = sum(w.numel() for w in load_file(trained / "trainables.safetensors").values())
    lora = sum(w.numel() for w in load_file(trained / "adapter/adapter_model.safetensors").values())
    whole = lora + sum(w.numel() for w in load_file(base / "model.safetensors").values())
    (share,) = re.findall(r"Trained parameters: ([\d,]+) of ([\d,]+) \((.+?)%", text)
    assert int(share[0].replace(",", "")) == trains
    assert int(share[1].replace(",", "")) == pytest.approx(whole, rel=0.02)  # what files leave out
    assert float(share[2]) == pytest.approx(100 * trains / int(share[1].replace(",", "")), abs=0.01)
    place = trained.parent / "evaluation"
    before, after = (json.loads((place / f"step_{step}.json").read_text()) for step in (0, 2))
    now = after["means"] if role == "policy" else after["teacher"]["means"]
    for metric, start in before["means"].items():
        row = f"(`{metric}`) | {start:.4f} | {now[metric]:.4f} | {now[metric] - start:+.4f} |"
        assert row in text, metric
    whose = dict(policy="the policy, after step 2", ema="the teacher, a moving average")[role]
    assert f"These weights are {whose}" in text and "1 regions of `heldout`" in text
    assert "trust_remote_code=True" in text and '"learning_rate": 0.001' in text
    assert str(base.parent) not in card and "/tmp" not in card
    assert (output / "README_of_the_base.md").read_text() == (base / "README.md").read_text()
    entries = (output / "CITATION.bib").read_text()
    named = ("2501.04001", "2408.00714", "2412.05271", "2412.15115", "2402.03300", "{rl_sa2va,")
    assert all(name in entries for name in named) and entries.count("{") == entries.count("}")


def test_a_card_leaves_out_what_the_run_does_not_know(trained, tmp_path):
    """Of a copied checkpoint without its evaluations, on a base without a card; hub names stay."""
    folder = shutil.copytree(trained, tmp_path / "of_somebody")
    base = shutil.copytree(CHECKPOINT, tmp_path / "models--owner--Sa2VA-4B" / "snapshots" / "f00")
    policy = load_policy(folder, "policy", base, "cpu", dtype="float32")
    write_card(tmp_path, folder, base, "policy", policy)
    card = (tmp_path / "README.md").read_text()
    fields = yaml.safe_load(card.split("---\n", 2)[1])
    assert fields["base_model"] == "owner/Sa2VA-4B" and "license" not in fields
    assert "custom_code" not in fields["tags"] and "trust_remote_code" not in card
    assert "## Held out" not in card and "after step" not in card
    assert "# owner/Sa2VA-4B, trained by reinforcement learning" in card


def test_a_card_of_supervised_training():
    """Which has no KL, and tasks of its own, those of weight 0 not counted."""
    flags = dict(tasks=["region_captions", "referring_segmentation"], mask_weight=0.0)
    text = method(flags | dict(dataset="dam", data_dir="owner/set"), CHECKPOINT, "policy", 3)
    assert "From demo_checkpoint by supervised training (rl-sa2va)" in text
    assert "- true captions of regions" in text and "masks" not in text and "reward" not in text
    assert "Trained on: format `dam`, `owner/set`." in text
    mixed = flags | dict(dataset="gar", data_dir="a/b", mix=["refcocog/val:o/s=.5", "dam:/x/y"])
    assert "`a/b`; refcocog `o/s`, weight 0.5; dam `y`, weight 1." in method(
        mixed, CHECKPOINT, "policy", 3
    )
    assert "grpo" not in front_matter(CHECKPOINT, flags)
    assert "2402.03300" not in bibtex("sa2va", reinforced=False)
    for name, (weight, _) in TASKS.items():
        options = (tasks.TASKS | SUPERVISED)[name].Options
        assert options.__dataclass_fields__["weight"].metadata["name"] == weight


@pytest.mark.parametrize(
    "value, expected",
    [
        ("/home/me/data/gar", "gar"),
        ("../runs/attributes.json", "attributes.json"),
        ("owner/name", "owner/name"),
        ("my.module:reward=0.5", "my.module:reward=0.5"),
        (["gar:/disk/gar=2", "dam/a,b:~/dam"], ["gar:gar=2", "dam/a,b:dam"]),
        ("x" * 300, "x" * 300),  # longer than a file's name may be
        (0.5, 0.5),
        (None, None),
    ],
    ids=str,
)
def test_a_card_shows_no_folders_of_the_machine(value, expected):
    assert shown(value) == expected


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


def test_the_role_that_held_out_samples_prefer(tmp_path, capsys):
    """The teacher is better by what counts and worse by what does not."""
    policy = dict(seg_iou=0.6, caption_meteor=0.4, cycle_iou=0.9, cycle_meteor=0.9)
    teacher = dict(seg_iou=0.5, caption_meteor=0.6, cycle_iou=0.1, cycle_meteor=0.1)
    file, config = tmp_path / "evaluation" / "step_7.json", "checkpoint_step_7/config.json"
    for flags in (config, "checkpoint_best/config.json"):
        write_json(tmp_path / flags, {})  # of a run before there was --best_by
    write_json(file, dict(means=policy, teacher=dict(means=teacher)))
    assert preferred_role(tmp_path / "checkpoint_step_7") == "ema"
    assert "seg_iou and caption_meteor" in (said := capsys.readouterr().out)
    assert "policy 0.5000, ema 0.5500" in said
    write_json(tmp_path / config, dict(best_by=["seg_iou"]))
    assert preferred_role(tmp_path / "checkpoint_step_7") == "policy"
    assert "mean of seg_iou on held-out samples: policy 0.6000" in capsys.readouterr().out
    write_json(tmp_path / config, dict(best_by=[]))
    write_json(file, dict(means=teacher, teacher=dict(means=policy)))
    assert preferred_role(tmp_path / "checkpoint_step_7") == "policy"
    write_json(file, dict(means=policy, teacher=dict(means=policy)))
    assert preferred_role(tmp_path / "checkpoint_step_7") == "policy"
    write_json(
        tmp_path / "checkpoint_best" / "eval.json", dict(metrics=policy | {"teacher": teacher})
    )
    assert preferred_role(tmp_path / "checkpoint_best") == "ema"
    write_json(file, dict(means=policy))  # of a run that did not measure the teacher
    for name in ("checkpoint_step_7", "checkpoint_step_8", "a_copy"):
        with pytest.raises(ValueError, match="^--role auto: .*--role policy or --role ema"):
            preferred_role(tmp_path / name)


def test_a_disk_without_room(trained, tmp_path, monkeypatch):
    """Told before anything is written; twice as much is needed in float32."""
    size = sum(file.stat().st_size for file in CHECKPOINT.iterdir()) / 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    for dtype, times in (("bfloat16", 1), ("float32", 2)):
        words = ["--checkpoint", str(trained), "--role", "ema", "--dtype", dtype]
        with pytest.raises(SystemExit) as stopped:
            export.main([*words, "--output", str(tmp_path / "new" / "deep")])
        needed = f"{times * size:.2f} GiB are needed, 0.00 are free"
        assert str(stopped.value).endswith(f"new/deep cannot be written: {needed}")
    assert not (tmp_path / "new").exists()


def test_bad_input(trained, tmp_path, capsys):
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
    refused("--checkpoint", "not a checkpoint_step_N", checkpoint=tmp_path)
    refused("--model_path", "no such folder", model_path=tmp_path / "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    (broken / "trainables.safetensors").write_bytes(
        (broken / "trainables.safetensors").read_bytes()[:-100]
    )
    refused("--role auto", "--role policy", checkpoint=broken)  # no evaluation/ beside it
    refused("trainables.safetensors", "damaged", checkpoint=broken, role="policy")
    (broken / "config.json").write_text((broken / "config.json").read_text()[:100])
    refused(f"{broken / 'config.json'} is missing or damaged", checkpoint=broken, role="ema")
    assert not (tmp_path / "new").exists()
