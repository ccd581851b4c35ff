"""What the teacher does for the rewards, in batches and one sample at a time; and whether a forced and a sampled answer agree.

Without --model_path: seconds of masks for N captions and of captions for N masks, by random weights of Sa2VA-4B's shapes and forced
lengths (see `tools.benchmarks.work`). In batches as training does it, from image features that it has anyway; one sample at a time by
`generate`, with vision and, for a mask, SAM2 encode of each row's own. The floor of masks is that of the forced answer.

With --model_path and --data_dir: not seconds, but the masks that this model gives for true captions when the answer is forced and when
it answers for itself (--teacher_answer of rl_train.train), greedily. Random weights never say [SEG], so this needs trained ones.

Letters: B images, G rows of each, N = B*G rows, n regions of the data set.
"""

import torch
from rl_train.rollout import answer, describe, segment, segment_sampled

from rl_train.data.loader import eval_loader
from rl_train.distributed import Ranks
from rl_train.evaluation import bootstrap, paired_difference
from rl_train.rewards import mask_iou
from tools import evaluate
from tools.benchmarks import alternatives, work
from tools.benchmarks.common import copy_bandwidth, device_name, matmul_rate, seconds_in_turns
from tools.benchmarks.floor import step_floor

ALONE = "one at a time"
MEASURES = {
    "agreement": "IoU of the forced answer's mask with the sampled one's",
    "says_seg": "share of sampled answers with [SEG]",
    "same_tokens": "share of sampled answers that begin with the forced tokens",
    "forced_iou": "IoU of the forced answer's mask with the region",
    "sampled_iou": "IoU of the sampled answer's mask with the region",
}


def measure(args) -> dict:
    """The agreement of the model in --model_path, or without one the seconds."""
    return agreement(args) if args.model_path or args.data_dir else times(args)


# Seconds


def times(args) -> dict:
    """{"masks", "captions": {way: {"seconds", "ratio_to_floor", "times_faster" than one at a time}}, "floor": seconds of both}."""
    ceilings = dict(matmul=matmul_rate(args), bandwidth=copy_bandwidth(args))
    w = work.build(args, Ranks(0, 1, torch.device(args.device)))
    floor, num_alone = step_floor(w, **ceilings), min(args.naive_samples, w.num_rows)
    with w.roles.use("teacher"):
        found = seconds_in_turns(ways(w, num_alone), args)
    result = dict(
        device=device_name(args.device),
        matmul_tflops=ceilings["matmul"] / 1e12,
        bandwidth_tb_per_second=ceilings["bandwidth"] / 1e12,
        flags=vars(w.args),
        rounds=args.rounds,
        rows=w.num_rows,
        naive_samples=num_alone,
        floor=dict(masks=floor["teacher1"], captions=floor["teacher2"]),
        masks={},
        captions={},
    )
    alone = {kind: found[kind, ALONE] * w.num_rows / num_alone for kind in ("masks", "captions")}
    for (kind, way), measured in found.items():
        seconds = alone[kind] if way == ALONE else measured
        result[kind][way] = dict(
            seconds=seconds,
            ratio_to_floor=seconds / result["floor"][kind],
            times_faster=alone[kind] / seconds,
        )
    show_times(result, w)
    return result


def ways(w: work.Work, num_alone: int) -> dict:
    """{(what, way): a function that does it}, all on one model object; one at a time for the first `num_alone` rows."""
    policy, batch = w.policy, w.batch
    images = policy.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    image = [row // w.args.num_generations for row in range(w.num_rows)]
    captions = [batch.captions[i] for i in image]
    rows = alternatives.PerRow(w, all_logits=True)

    def sampled():
        with work.forced(w):
            segment_sampled(policy, batch, images, image, captions, w.answer_tokens)

    def alone(function):
        with (
            alternatives.replaced(
                (policy.engine, "generate", alternatives.huggingface(w)), *rows.replacements()[:1]
            ),
            work.forced(w),
        ):
            for row in range(num_alone):
                function(slice(row, row + 1))

    def describe_rows(chunk):
        return describe(
            policy, batch, images, image[chunk], w.masks[chunk], w.args.max_completion_length
        )

    with work.forced(w):
        answers = answer(policy, batch, images, image, captions, w.answer_tokens)
    assert answers.ids.shape == (w.num_rows, w.answer_tokens) and answers.seg_rows.tolist() == list(
        range(w.num_rows)
    ), "forced lengths"
    return {
        ("masks", "forced"): lambda: segment(policy, images, image, captions),
        ("masks", "sampled"): sampled,
        ("masks", ALONE): lambda: alone(
            lambda row: rows.segment(policy, images, image[row], captions[row])
        ),
        ("captions", "in batches"): lambda: describe_rows(slice(None)),
        ("captions", ALONE): lambda: alone(describe_rows),
    }


def show_times(found, w: work.Work):
    print(
        f"{found['device']}: matrix product {found['matmul_tflops']:.0f} TFLOP/s, copy {found['bandwidth_tb_per_second']:.2f} TB/s; seconds, "
        f"medians of {found['rounds']}; one at a time measured on {found['naive_samples']} samples and scaled"
    )
    sizes = dict(
        masks=f"sampled answers of {w.answer_tokens} tokens",
        captions=f"of {w.args.max_completion_length} tokens",
    )
    for kind, size in sizes.items():
        print(f"{found['rows']} {kind}, {size}; floor {found['floor'][kind]:.3f}")
        for way, of in found[kind].items():
            print(
                f"  {way:14}{of['seconds']:>10.3f}{of['ratio_to_floor']:>10.1f} x floor"
                + (
                    ""
                    if way == ALONE
                    else f"{of['times_faster']:>10.1f} times faster than one at a time"
                )
            )


# Agreement


def agreement(args) -> dict:
    """{"means", "intervals": of each of MEASURES; "difference": of the two IoUs with the region, with its interval}, over n regions."""
    flags = dict(
        model_path=args.model_path,
        data_dir=args.data_dir,
        role=args.role,
        num_samples=args.num_samples,
        dtype=args.dtype,
    )
    given = [
        word
        for name, value in flags.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    chosen = evaluate.build_parser().parse_args(given)
    dataset = evaluate.build_dataset(chosen)
    policy = evaluate.build_measured_policy(chosen, Ranks(0, 1, torch.device(args.device)))
    values = {name: [] for name in MEASURES}
    for batch in eval_loader(dataset, policy.inputs, chosen.batch_size, 0):
        for name, column in compare(policy, batch, chosen.max_completion_length).items():
            values[name] += column
    values = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    found = dict(
        flags=flags,
        num_samples=len(dataset),
        means={name: column.mean().item() for name, column in values.items()},
        intervals={name: bootstrap(column) for name, column in values.items()},
        difference=paired_difference(values["forced_iou"], values["sampled_iou"]),
    )
    show_agreement(found)
    return found


def compare(policy, batch, max_new_tokens: int) -> dict[str, list]:
    """{name of MEASURES: B values} of the regions of a batch and their true captions."""
    images, rows = (
        policy.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes),
        list(range(len(batch))),
    )
    targets, tokens = [mask.to(policy.device) for mask in batch.masks], policy.prompts.forced_answer
    forced = segment(policy, images, rows, batch.captions)
    answers = answer(policy, batch, images, rows, batch.captions, max_new_tokens)
    with_seg = set(answers.seg_rows.tolist())
    return dict(
        agreement=mask_iou(forced, answers.masks, 1.0).tolist(),
        says_seg=[row in with_seg for row in rows],
        same_tokens=[
            ids[valid].tolist()[: len(tokens)] == tokens
            for ids, valid in zip(answers.ids, answers.valid)
        ],
        forced_iou=mask_iou(forced, targets).tolist(),
        sampled_iou=mask_iou(answers.masks, targets).tolist(),
    )


def show_agreement(found):
    print(f"{'n = ' + str(found['num_samples']):16s} {'mean':>8s}   95 % interval")
    for name, mean in found["means"].items():
        low, high = found["intervals"][name]
        print(f"{name:16s} {mean:8.4f}   {f'[{low:.4f}, {high:.4f}]':20s} {MEASURES[name]}")
    change, low, high = found["difference"]
    print(
        f"{'difference':16s} {change:+8.4f}   {f'[{low:+.4f}, {high:+.4f}]':20s} sampled_iou - forced_iou"
    )


def add_arguments(parser):
    parser.add_argument(
        "--model_path",
        help="Sa2VA folder or checkpoint of a run, whose answers' agreement is then measured",
    )
    parser.add_argument("--data_dir", help="folder of its held-out regions")
    parser.add_argument(
        "--role",
        choices=["policy", "ema"],
        default="policy",
        help="whose weights of a run's checkpoint; ema = the teacher's",
    )
    parser.add_argument(
        "--num_samples", type=int, default=128, help="first regions that are asked about (n)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="of the base in --model_path",
    )
    parser.add_argument(
        "--naive_samples",
        type=int,
        default=2,
        help="rows that are done one at a time; their seconds are scaled to all",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each way, in turns; the median counts"
    )
    parser.add_argument(
        "--matmul_size",
        type=int,
        default=8192,
        help="side of the square matrices whose product is the ceiling",
    )
    parser.add_argument(
        "--copy_mib", type=int, default=4096, help="size of the copy that measures the bandwidth"
    )
    work.add_arguments(parser)
