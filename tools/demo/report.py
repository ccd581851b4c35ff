"""Report what the demo's captions and masks get wrong, by attribute.

    python -m tools.demo.report --checkpoint outputs/demo/checkpoint [--output F.json]

On held-out scenes: how many attributes tell an object from the others of its scene; which of them
the checkpoint's greedy captions get right, beside a linear probe on the features of the region that
it captions from; which object its masks lie on, of true captions and by how many attributes of a
caption are right.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.loader import Batches
from rl_train.policies.sa2va import build_policy
from rl_train.policies.sa2va_queries import describe, segment_by_own_answer
from rl_train.rewards import mask_iou
from rl_train.utils.command_line import FlagParser, run_program
from sa2va_hf.batches import ImageFeatures
from tools.demo.scenes import ATTRIBUTES, HELDOUT, TRAIN, Scene, caption, make_scene

TOKENS = 32  # of an answer, at most
PROBE_STEPS = 300


def told_apart(scenes: list[Scene]) -> dict[int, dict[str, float]]:
    """Return {k: fractions of objects that k attributes tell from all others}.

    "any" is averaged over all choices of k attributes, "best" takes the best choice.
    """
    by_count = {k: [] for k in range(1, len(scenes[0].objects[0].attributes) + 1)}
    for scene in scenes:
        for obj in scene.objects:
            others = [o for o in scene.objects if o is not obj]
            differ = [[a != b for a, b in zip(obj.attributes, o.attributes)] for o in others]
            for k, picked in by_count.items():
                picks = combinations(range(len(obj.attributes)), k)
                picked.append([all(any(d[a] for a in pick) for d in differ) for pick in picks])
    return {
        k: dict(any=float(np.mean(picked)), best=float(np.mean(np.any(picked, 1))))
        for k, picked in by_count.items()
    }


class Report:
    """Measures of one checkpoint on scenes that are drawn by a seed."""

    def __init__(
        self,
        checkpoint: Path,
        seed: int,
        attributes: dict[str, tuple[str, ...]],
        device: str = "cpu",
    ):
        config = PolicyConfig(model_path=str(checkpoint), lora_r=1, dtype="float32")
        self.policy = build_policy(config, ("lora", "mlp1"), TOKENS, torch.device(device))
        self.seed, self.attributes = seed, attributes

    def features(self, scene: Scene) -> ImageFeatures:
        """Return features of a scene's image, computed as in a run."""
        obj = scene.objects[0]
        sample = dict(
            image=scene.image, mask=obj.mask, caption=obj.caption, category="", image_id=""
        )
        return self.policy.encode(Batches([sample], self.policy.preprocessor(TOKENS))[[0]])

    @torch.no_grad()
    def regions(self, scenes: list[Scene]) -> torch.Tensor:
        """Return the mean input feature (n, C) of the language model over each object's cells."""
        rows, policy = [], self.policy
        for scene in scenes:
            tile = policy.processor.tiles(scene.image).to(policy.device)
            (tokens,) = policy.model.extract_feature(tile)
            for obj in scene.objects:
                rows.append(tokens[policy.processor.region_grid(obj.mask).flatten()].mean(0))
        return torch.stack(rows).cpu()

    def probe(self, training: list[Scene], heldout: list[Scene]) -> dict[str, float]:
        """Fit linear probes on `regions`; return {attribute: accuracy on held-out objects}."""
        xs = [self.regions(scenes) for scenes in (training, heldout)]
        mean, std = xs[0].mean(0), xs[0].std(0) + 1e-6
        xs, accuracy = [(x - mean) / std for x in xs], {}
        for k, (name, values) in enumerate(self.attributes.items()):
            ys = [
                torch.tensor([values.index(o.attributes[k]) for s in scenes for o in s.objects])
                for scenes in (training, heldout)
            ]
            probe = torch.nn.Linear(xs[0].shape[1], len(values))
            optimizer = torch.optim.AdamW(probe.parameters(), lr=0.02, weight_decay=0.1)
            for _ in range(PROBE_STEPS):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(probe(xs[0]), ys[0]).backward()
                optimizer.step()
            accuracy[name] = (probe(xs[1]).argmax(1) == ys[1]).float().mean().item()
        return accuracy

    def stated(self, scenes: list[Scene]) -> dict[str, float]:
        """Return {attribute: fraction of greedy captions that state it rightly}.

        "words" is a caption's mean number of words, "distinct" the fraction of distinct captions.
        """
        right, words, texts = [], [], []
        for scene in scenes:
            masks = [torch.from_numpy(obj.mask) for obj in scene.objects]
            captions = describe(self.policy, self.features(scene), [0] * len(masks), masks, TOKENS)
            for obj, text in zip(scene.objects, captions):
                right.append([value in text.lower() for value in obj.attributes])
                words.append(len(text.split()))
                texts.append(text)
        fractions = dict(zip(self.attributes, np.mean(right, 0).tolist()))
        return fractions | dict(words=float(np.mean(words)), distinct=len(set(texts)) / len(texts))

    def masks_found(self, scenes: list[Scene]) -> dict[int, dict[str, float]]:
        """Return {number of right attributes in a phrase: IoU and hits of its mask}.

        ideal_hit is that of a listener who picks one of the objects that fit most attributes.
        """
        rng, rows = np.random.default_rng([self.seed, 10]), {}
        for scene in scenes:
            features = self.features(scene)
            truth = np.stack([obj.mask for obj in scene.objects])
            truth = torch.from_numpy(truth).to(self.policy.device)
            for index, obj in enumerate(scene.objects):
                phrases, counts = [], range(len(self.attributes) + 1)
                for num_right in counts:
                    keep = rng.permutation(len(self.attributes))[:num_right]
                    phrases.append(
                        tuple(
                            value
                            if a in keep
                            else str(rng.choice([v for v in values if v != value]))
                            for a, (value, values) in enumerate(
                                zip(obj.attributes, self.attributes.values())
                            )
                        )
                    )
                texts = [caption(*phrase) for phrase in phrases]
                segmented, _, _ = segment_by_own_answer(
                    self.policy, features, [0] * len(texts), texts, TOKENS
                )
                for num_right, mask, phrase in zip(counts, segmented.masks, phrases):
                    ious = mask_iou([mask] * len(truth), list(truth), 0.0)
                    # It lies on the object with which its IoU is largest.
                    hit = ious[index] > 0 and int(ious.argmax()) == index
                    fit = [sum(map(str.__eq__, phrase, o.attributes)) for o in scene.objects]
                    # Objects that fit a phrase best; a listener can only guess among them.
                    best = [i for i, count in enumerate(fit) if count == max(fit)]
                    ideal = (index in best) / len(best)
                    row = (float(ious[index]), float(hit), ideal)
                    rows.setdefault(num_right, []).append(row)
        names = ("iou", "hit", "ideal_hit")
        return {
            k: dict(zip(names, np.mean(values, 0).tolist())) for k, values in sorted(rows.items())
        }


def main(argv: list[str] | None = None):
    parser = FlagParser(prog="python -m tools.demo.report", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=60, help="held-out scenes")
    parser.add_argument("--probe_scenes", type=int, default=300, help="that probes are fitted on")
    parser.add_argument("--seed", type=int, default=0, help="of the demo's scenes")
    parser.add_argument("--output", type=Path, help="JSON file of all figures")
    args = parser.parse_args(argv)
    heldout, training = (
        [make_scene(args.seed, split, i) for i in range(number)]
        for split, number in ((HELDOUT, args.scenes), (TRAIN, args.probe_scenes))
    )
    report = Report(args.checkpoint, args.seed, ATTRIBUTES, args.device)
    apart = told_apart(heldout)
    for k, row in apart.items():
        print(
            f"{k} attributes tell an object apart: {row['any']:.2f}, the best {k} {row['best']:.2f}"
        )
    stated, read = report.stated(heldout), report.probe(training, heldout)
    for name, values in ATTRIBUTES.items():
        print(
            f"{name}: said {stated[name]:.2f}, read {read[name]:.2f}, chance {1 / len(values):.2f}"
        )
    print(f"captions: {stated['words']:.1f} words, {stated['distinct']:.2f} of them distinct")
    ious = report.masks_found(heldout)
    for k, row in ious.items():
        print(f"{k} attributes right: " + ", ".join(f"{n} {v:.2f}" for n, v in row.items()))
    if args.output:
        figures = dict(told_apart=apart, said=stated, read=read, found=ious)
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    run_program(main)
