"""Make the demo: drawn scenes in GAR's Arrow layout and a tiny but complete Sa2VA checkpoint in the original layout.

    python -m tools.make_demo --output_dir outputs/demo                     # data + the finished checkpoint that ships here
    python -m tools.make_demo --output_dir outputs/demo --train_checkpoint  # data + one made the same way, from nothing

Everything is drawn by code from --seed. The checkpoint is warm-started by supervised training on the prompts and the
encode rule of `rl_train.policies.sa2va_prompts` and `sa2va_hf.templates`, and stopped early: it captions sloppily (half of its
training captions leave attributes out), and its `text_hidden_fcs`, through which [SEG] prompts SAM2, is trained anew for
a moment only, so that it segments roughly: the room that the two loops of reinforcement learning have. It answers with
one wording of Sa2VA's five, so that in loop 2 nothing but the sampled mask can differ.
"""

import argparse
import shutil
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rl_train.policies.sa2va import load_tokenizer, pad_left
from rl_train.data.text import phrase
from sa2va_hf.prompts import DESCRIBE, FORCED_ANSWER, SEGMENT_ANSWERS, SEGMENT_WORDINGS, PromptBuilder
from rl_train.rewards.iou import mask_iou
from sa2va_hf import PROMPT_TEMPLATE, Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, video_lisa_encode_fn
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.templates import template_map
from tools.demo_scenes import (
    ATTRIBUTES,
    COLORS,
    POSITIONS,
    SHAPES,
    SIZES,
    caption,
    make_scene,
    partial_attributes,
    phrase_of,
)
from tools.gar_writer import write_gar

SHIPPED_CHECKPOINT = Path(__file__).parent / "demo_checkpoint"
TRAIN, HELDOUT, WARM_START = 0, 1, 2  # split numbers of make_scene
FULL_PHRASES = 0.7  # of the warm start's segmentation prompts; the rest are partial
PROMPT_HEAD_IOU, PROMPT_HEAD_STEPS = (
    0.44,
    2000,
)  # where its training ends: IoU of the last 25 batches; at most so many steps
DETAIL_ODDS = {
    "full": 0.25,
    "partial": 0.4,
    "vague": 0.35,
}  # captions of the warm start; the RL data is all "full"

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "[SEG]",
    "<p>",
    "</p>",
    "<vp>",
    "</vp>",
]
CONFIG = dict(
    architectures=["Sa2VAChatModel"],
    model_type="sa2va_chat",
    template="phi3_chat",
    ps_version="v2",
    select_layer=-1,
    force_image_size=224,
    downsample_ratio=0.5,
    dynamic_image_size=True,
    use_thumbnail=True,
    min_dynamic_patch=1,
    max_dynamic_patch=1,
    vision_config=dict(
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=224,
        patch_size=14,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
        qkv_bias=True,
    ),
    llm_config=dict(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        attention_dropout=0.0,
    ),
    sam2_config=dict(
        image_size=256,
        hidden_size=64,
        mask_decoder_mlp_dim=128,
        mask_decoder_heads=4,
        memory_channels=64,
        memory_layers=1,
        memory_mlp_dim=64,
        memory_fuser_dim=64,
        backbone=dict(
            hidden_size=24,
            num_attention_heads=1,
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[24, 48, 96, 192],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[8, 4, 8, 4],
            global_attention_blocks=[3],
            window_positional_embedding_background_size=[7, 7],
        ),
    ),
)


def write_split(folder: Path, seed: int, split: int, num_scenes: int):
    """One row per target object of each scene, with a full caption, in GAR layout."""

    def rows():
        for i in range(num_scenes):
            scene = make_scene(seed, split, i)
            rng = np.random.default_rng([seed, split, i, 1])
            for k in scene.targets:
                obj = scene.objects[k]
                yield dict(
                    image=scene.image,
                    mask=obj.mask,
                    caption=caption(obj, scene, rng, "full"),
                    category=obj.shape,
                )

    write_gar(rows(), folder)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen2's pre-tokenisation and Sa2VA's special tokens, trained on the demo's own texts.

    As in the real tokenizer, `<|end|>` is plain text whose ids depend on what precedes it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_qwen2_pattern(), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = np.random.default_rng([seed, 9])
    texts = []
    for i in range(300):
        scene = make_scene(seed, WARM_START, i)
        texts += [
            c + "<|end|>\n"
            for k in scene.targets
            for c in (caption(scene.objects[k], scene, rng, d) for d in DETAIL_ODDS)
        ]
    template = PROMPT_TEMPLATE["phi3_chat"]["INSTRUCTION"]
    for wording in (DESCRIBE, *SEGMENT_WORDINGS):
        texts += [
            template.replace(
                "{input}", "There are 1 part regions in the picture: region1.\n" + wording
            )
        ] * 20
    texts += [answer + "<|end|>\n" for answer in SEGMENT_ANSWERS] * 20
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=[],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
    )


def _qwen2_pattern():
    from tokenizers import Regex

    return Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def balanced_mask_loss(logits, masks):
    """BCE with the region's and the background's pixels at equal weight, plus Dice; from random weights the usual
    loss would settle on empty masks, since regions cover a few per cent of an image."""
    size = logits.shape[-2:]
    target = torch.stack(
        [F.interpolate(torch.from_numpy(m)[None, None].float(), size=size)[0, 0] for m in masks]
    )
    target = target.to(logits.device).flatten(1)
    bce = F.binary_cross_entropy_with_logits(logits.flatten(1), target, reduction="none")
    inside = (bce * target).sum(1) / target.sum(1).clamp(min=1)
    outside = (bce * (1 - target)).sum(1) / (1 - target).sum(1)
    probability = logits.sigmoid().flatten(1)
    dice = 1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)
    return (inside + outside + 2 * dice).mean()


def initialise(model: Sa2VAModel):
    """Random weights at the scale of each layer's inputs.

    transformers' fixed std of 0.02 suits widths of a thousand; at 64 it lets the signal vanish within a few layers.
    """
    residual_ends = ("o_proj.weight", "down_proj.weight", "projection_layer.weight", "fc2.weight")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
        elif "embed" in name or "token" in name or "memory" in name and parameter.ndim != 4:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            fan_in = parameter[0].numel() if "upscale_conv" not in name else parameter.shape[0]
            scale = 0.5 if name.endswith(residual_ends) else 1.0
            torch.nn.init.normal_(parameter, std=scale * fan_in**-0.5)
    for layer in model.vision_model.encoder.layer:
        torch.nn.init.ones_(layer.lambda_1)
        torch.nn.init.ones_(layer.lambda_2)


class Attributes(torch.nn.Module):
    """Supervision by the attributes that a scene's drawer knows, to get from random weights to a model in minutes.

    `code` turns stated attributes into a prompt embedding, with which SAM2 learns first; [SEG]'s embedding learns to
    equal it and takes over. Linear probes pull the attributes into region features. Thrown away afterwards.
    """

    VALUES = dict(
        color=list(COLORS),
        shape=list(SHAPES),
        size=list(SIZES),
        position=[p for row in POSITIONS for p in row],
    )

    def __init__(self, prompt_size: int, width: int):
        super().__init__()
        self.probes = torch.nn.ModuleDict(
            {a: torch.nn.Linear(width, len(values)) for a, values in self.VALUES.items()}
        )
        self.codes = torch.nn.ParameterDict(
            {a: torch.randn(len(values), prompt_size) * 0.5 for a, values in self.VALUES.items()}
        )

    def index(self, obj, attribute):
        return self.VALUES[attribute].index(getattr(obj, attribute))

    def code(self, objects, said):
        """(n, prompt_size): the sum of the codes of the attributes said[i] of objects[i]."""
        return torch.stack(
            [sum(self.codes[a][self.index(o, a)] for a in s) for o, s in zip(objects, said)]
        )

    def probe_loss(self, vectors, objects):
        """Mean cross-entropy of all attributes of objects[i], read off vectors (n, width)."""
        losses = [
            F.cross_entropy(
                self.probes[a](vectors),
                torch.tensor([self.index(o, a) for o in objects], device=vectors.device),
            )
            for a in self.VALUES
        ]
        return torch.stack(losses).mean()


class WarmStart:
    """Supervised training of the tiny model: region captioning and referring segmentation on drawn scenes.

    Args:
        num_scenes: scenes drawn once and reused; objects_per_scene: targets drawn from each scene at every visit.
    """

    def __init__(self, model, tokenizer, processor, seed, num_scenes, objects_per_scene=3):
        self.model, self.tokenizer, self.seed, self.objects_per_scene = (
            model,
            tokenizer,
            seed,
            objects_per_scene,
        )
        self.processor, self.attributes = (
            processor,
            Attributes(model.config.prompt_size, model.config.llm.hidden_size).to(model.device),
        )
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        model.bind_tokenizer(tokenizer)
        self.scenes = [
            make_scene(seed, WARM_START, i)
            for i in tqdm(range(num_scenes), desc="warm-start scenes")
        ]
        self.tiles = torch.cat([processor.tiles(s.image) for s in self.scenes])  # (scenes, 3, S, S)
        self.sam_images = torch.stack([processor.sam_image(s.image) for s in self.scenes])  # uint8

    def loss(self, indices, rng, own_share):
        """Cross-entropy of both tasks' answers, mask losses and help by `Attributes`, for the scenes `indices`.

        own_share: weight of the masks that are decoded from [SEG]'s own embedding, beside those from attribute codes.
        """
        model, n = self.model, self.objects_per_scene
        scenes = [self.scenes[i] for i in indices]
        image = [i for i in range(len(scenes)) for _ in range(n)]
        objects = [
            s.objects[k]
            for s in scenes
            for k in rng.choice(s.targets, n, replace=len(s.targets) < n)
        ]
        features = model.extract_feature(self.tiles[indices].to(model.device))
        grids = [self.processor.region_grid(obj.mask)[None] for obj in objects]
        examples = [
            self._describe(obj, scenes[i], grid, rng) for obj, i, grid in zip(objects, image, grids)
        ]
        questions, masks, said = zip(
            *[self._segment(obj, scenes[i], rng) for obj, i in zip(objects, image)]
        )
        examples += questions
        ids, mask = (
            t.to(model.device)
            for t in pad_left([e["input_ids"] for e in examples], self.tokenizer.pad_token_id)
        )
        labels = pad_left([e["labels"] for e in examples], -100)[0].to(model.device)
        flags = torch.tensor(
            [True] * len(objects) + [False] * len(objects)
        )  # one tile each; half have a region
        out = model(
            ids,
            mask,
            image_features=features[image + image],
            prompt_masks=grids,
            vp_overall_mask=flags,
        )
        text = F.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        prompts = model.text_hidden_fcs(out.hidden_states[-1][ids == model.seg_id])
        copy = F.mse_loss(prompts, self.attributes.code(objects, said).detach())
        regions = torch.stack(
            [
                features[i][grid[0].flatten().to(model.device)].mean(0)
                for i, grid in zip(image, grids)
            ]
        )
        probe = self.attributes.probe_loss(regions, objects)
        every = [(i, obj) for i, scene in enumerate(scenes) for obj in scene.objects]
        codes = self.attributes.code([obj for _, obj in every], [ATTRIBUTES] * len(every))
        sam = model.sam_features(self.sam_images[indices].to(model.device))
        logits = model.decode_masks(
            sam,
            torch.tensor([i for i, _ in every] + image, device=model.device),
            torch.cat([codes, prompts]),
        )
        from_code = balanced_mask_loss(logits[: len(every)], [obj.mask for _, obj in every])
        own = balanced_mask_loss(logits[len(every) :], masks)
        parts = dict(
            text=text.item(),
            from_code=from_code.item(),
            own=own.item(),
            copy=copy.item(),
            probe=probe.item(),
        )
        return text + from_code + own_share * own + copy + probe, parts

    def _describe(self, obj, scene, grid, rng):
        detail = str(rng.choice(list(DETAIL_ODDS), p=list(DETAIL_ODDS.values())))
        question = self.prompts.question(DESCRIBE, 1, [int(grid.sum())])
        return self._encode(question, caption(obj, scene, rng, detail))

    def _segment(self, obj, scene, rng):
        """An encoded example, its mask (of a partial phrase all the objects that it fits), and the attributes it states."""
        if rng.random() < FULL_PHRASES:
            words, mask, said = caption(obj, scene, rng, "full"), obj.mask, ATTRIBUTES
        else:
            said = partial_attributes(rng)
            words = phrase_of(obj, scene, rng, said)
            mask = np.any(
                [
                    o.mask
                    for o in scene.objects
                    if all(getattr(o, a) == getattr(obj, a) for a in said)
                ],
                axis=0,
            )
        wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
        question = self.prompts.question(wording.replace("{x}", phrase(words)), 1)
        return self._encode(question, FORCED_ANSWER), mask, said

    def _encode(self, question, answer):
        example = template_map(
            {"conversation": [{"input": question, "output": answer}]}, self.prompts.template
        )
        return video_lisa_encode_fn(
            example, self.tokenizer, max_length=8192, input_ids_with_output=True
        )

    def run(self, steps, batch_size=8, learning_rate=7e-4):
        parameters = [*self.model.parameters(), *self.attributes.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, learning_rate, total_steps=steps, pct_start=0.05
        )
        with tqdm(range(steps), desc="warm start") as progress:
            for step in progress:
                rng = np.random.default_rng([self.seed, 7, step])
                loss, parts = self.loss(
                    rng.choice(len(self.scenes), batch_size, replace=False),
                    rng,
                    own_share(step / steps),
                )
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                progress.set_postfix(parts)

    def prompt_head_loss(self, rng, num_scenes=4, objects_per_scene=2):
        """(mask loss of [SEG]'s own embedding, of which nothing but text_hidden_fcs gets a gradient; mean IoU of its masks)."""
        model, indices = self.model, rng.choice(len(self.scenes), num_scenes, replace=False)
        image = [i for i in range(num_scenes) for _ in range(objects_per_scene)]
        scenes = [self.scenes[i] for i in indices]
        n = objects_per_scene
        objects = [
            s.objects[k]
            for s in scenes
            for k in rng.choice(s.targets, n, replace=len(s.targets) < n)
        ]
        questions, masks, _ = zip(
            *[self._segment(obj, scenes[i], rng) for obj, i in zip(objects, image)]
        )
        ids, mask = (
            t.to(model.device)
            for t in pad_left([q["input_ids"] for q in questions], self.tokenizer.pad_token_id)
        )
        with torch.no_grad():
            features = model.extract_feature(self.tiles[indices].to(model.device))
            hidden = model(ids, mask, image_features=features[image]).hidden_states[-1][
                ids == model.seg_id
            ]
            sam = model.sam_features(self.sam_images[indices].to(model.device))
        logits = model.decode_masks(
            sam, torch.tensor(image, device=model.device), model.text_hidden_fcs(hidden)
        )
        found = [
            upsample_masks(one[None], self.processor.sam_size, mask.shape)[0] > 0
            for one, mask in zip(logits.detach(), masks)
        ]
        iou = (
            mask_iou(found, [torch.from_numpy(mask).to(model.device) for mask in masks])
            .mean()
            .item()
        )
        return balanced_mask_loss(logits, masks), iou

    def retrain_prompt_head(self, target=PROMPT_HEAD_IOU, learning_rate=3e-3):
        """Draw text_hidden_fcs anew and train it alone, until its masks have an IoU of `target`."""
        for layer in self.model.text_hidden_fcs:
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.Adam(self.model.text_hidden_fcs.parameters(), lr=learning_rate)
        ious = deque([0.0] * 25, maxlen=25)
        with tqdm(range(PROMPT_HEAD_STEPS), desc="prompt head") as progress:
            for step in progress:
                loss, iou = self.prompt_head_loss(np.random.default_rng([self.seed, 8, step]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ious.append(iou)
                progress.set_postfix(iou=np.mean(ious))
                if np.mean(ious) >= target:
                    return
        raise RuntimeError(
            f"the prompt head's masks have an IoU of {np.mean(ious):.2f} after {PROMPT_HEAD_STEPS} steps, not {target}"
        )


def own_share(progress: float) -> float:
    """Masks come from attribute codes alone in the first 40 % of the warm start; then [SEG] takes over."""
    return min(max((progress - 0.4) / 0.2, 0.0), 1.0)


def train_checkpoint(folder: Path, seed: int, steps: int, num_scenes: int):
    """Train the tiny Sa2VA from random weights and save it (bf16 numbers) with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    config = Sa2VAConfig(
        **{**CONFIG, "llm_config": {**CONFIG["llm_config"], "vocab_size": len(tokenizer)}}
    )
    model = Sa2VAModel(config)
    initialise(model)
    warm_start = WarmStart(model, tokenizer, Sa2VAProcessor(config, max_tiles=1), seed, num_scenes)
    warm_start.run(steps)
    warm_start.retrain_prompt_head()
    model.save_pretrained(folder, dtype=torch.bfloat16)
    tokenizer.save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="receives train/, heldout/ and checkpoint/"
    )
    parser.add_argument("--train_scenes", type=int, default=1500, help="scenes drawn for training")
    parser.add_argument(
        "--heldout_scenes", type=int, default=100, help="scenes drawn for evaluation"
    )
    parser.add_argument(
        "--train_checkpoint",
        action="store_true",
        help="train the checkpoint instead of copying the shipped one",
    )
    parser.add_argument(
        "--warm_start_steps",
        type=int,
        default=800,
        help="optimizer steps of the supervised warm start",
    )
    parser.add_argument(
        "--warm_start_scenes", type=int, default=2000, help="scenes drawn for the warm start"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, split, count in (
        ("train", TRAIN, args.train_scenes),
        ("heldout", HELDOUT, args.heldout_scenes),
    ):
        if not (args.output_dir / name).exists():
            write_split(args.output_dir / name, args.seed, split, count)
    checkpoint = args.output_dir / "checkpoint"
    if args.train_checkpoint:
        train_checkpoint(checkpoint, args.seed, args.warm_start_steps, args.warm_start_scenes)
    elif not checkpoint.exists():
        shutil.copytree(SHIPPED_CHECKPOINT, checkpoint)
    load_tokenizer(checkpoint)
    print(f"demo: {args.output_dir}/train, {args.output_dir}/heldout, {checkpoint}")


if __name__ == "__main__":
    main()
