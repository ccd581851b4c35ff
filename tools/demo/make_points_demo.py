"""Make the demo of points: drawn clumps in GAR's Arrow layout, a tiny Qwen2.5-VL and SAM2.

    python -m tools.demo.make_points_demo --output_dir outputs/points_demo  # data + what ships
    # new ones
    python -m tools.demo.make_points_demo --output_dir outputs/points_demo --train_checkpoint

Everything is drawn by code from --seed. The models that ship are copied; --train_checkpoint trains
others from random weights (`tools.demo.points_warm_start`, `tools.demo.points_drawing`), minutes on
a GPU and hours on a CPU; with --models qwen only Qwen2.5-VL. SAM2 takes one point in a member for
its whole clump, and gives the member for a negative one in a neighbour. Qwen2.5-VL points at the
member; a fifth of its negative points are taught to be in a neighbour. The others are missing or of
no use: in the background beside the member and as far from it as a neighbour, in another clump, or
at the member's own edge. No direction, distance from the positive point or distance from the middle
of the image is a neighbour's alone (docs/points.md).
"""

import shutil
import time
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train.utils.command_line import FlagParser, run_program
from tools.demo.clump_scenes import rows
from tools.demo.new_folder import complete_or_absent
from tools.demo.points_drawing import DrawingStart
from tools.demo.points_model import make_tokenizer, new_qwen, new_sam, save_qwen, save_sam
from tools.demo.points_warm_start import PointingStart, draw
from tools.demo.scenes import HELDOUT, TRAIN
from tools.gar_writer import write_gar

MODELS = ("qwen", "sam")
SHIPPED = Path(__file__).parent / "points_checkpoint"
IMAGES = {"qwen": 32, "sam": 16}  # of a step of the warm start
MEASURED = 160  # held-out scenes on which models are measured when they are trained
BAR_STEPS = 20  # steps between two losses on the progress bar: reading one waits for the GPU


def train_checkpoint(
    folder: Path, seed: int, models: list[str], steps: list[int], num_scenes: int, device: str
):
    """Train models from random weights, print what they do, save them in bfloat16.

    `steps` are those of Qwen2.5-VL and of SAM2, whether both are trained or not.
    """
    scenes = [draw(seed, i) for i in tqdm(range(num_scenes), desc="warm-start scenes")]
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    qwen, sam = new_qwen(tokenizer), new_sam()
    parts = {}
    if "qwen" in models:
        parts["qwen"] = PointingStart(qwen, tokenizer, scenes, seed, device)
    if "sam" in models:
        parts["sam"] = DrawingStart(sam, scenes, seed, device)
    for name, part in parts.items():
        number = steps[MODELS.index(name)]
        with tqdm(range(number), desc=name) as progress:
            for step in progress:
                metrics = part.step(step / number, min(IMAGES[name], num_scenes))
                if step % BAR_STEPS == 0:
                    progress.set_postfix({key: f"{value:.2f}" for key, value in metrics.items()})
    heldout = [draw(seed, i, HELDOUT) for i in range(min(num_scenes, MEASURED))]
    if "qwen" in parts:
        print(f"Qwen2.5-VL, greedy: {parts['qwen'].evaluate(heldout)}")
        print(
            f"Qwen2.5-VL, sampled: {parts['qwen'].evaluate(heldout, temperature=1.0)}", flush=True
        )
        save_qwen(qwen, tokenizer, folder / "qwen")
    if "sam" in parts:
        print(f"SAM2, IoU: {parts['sam'].evaluate(heldout)}", flush=True)
        save_sam(sam, folder / "sam")


def main(argv: list[str] | None = None):
    parser = FlagParser(prog="python -m tools.demo.make_points_demo", description=__doc__)
    add = parser.add_argument
    receives = "receives train/, heldout/, qwen/, sam/"
    add("--output_dir", type=Path, required=True, help=receives)
    add("--train_scenes", type=int, default=800, help="scenes drawn for training")
    add("--heldout_scenes", type=int, default=100, help="scenes drawn for evaluation")
    train = "train the models instead of copying those that ship; on a CPU for hours"
    add("--train_checkpoint", action="store_true", help=train)
    trained = "those that --train_checkpoint trains; one left out is copied if it is not there"
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help=trained)
    add(
        "--warm_start_steps",
        type=int,
        nargs=2,
        metavar=("POINT", "DRAW"),
        default=[4500, 4200],
        help="optimizer steps of the warm start of Qwen2.5-VL and of SAM2",
    )
    scenes = "scenes drawn for the warm start"
    add("--warm_start_scenes", type=int, default=7000, help=scenes)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the training")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    output = args.output_dir
    splits = (("train", TRAIN, args.train_scenes), ("heldout", HELDOUT, args.heldout_scenes))
    for name, split, number in splits:
        if not (output / name).exists():
            began, folder = time.perf_counter(), output / name
            print(f"drawing {number} scenes into {folder}", flush=True)
            with complete_or_absent(folder) as unfinished:
                write_gar(rows(args.seed, split, number), unfinished)
            print(f"drawn in {time.perf_counter() - began:.0f} s", flush=True)
    if args.train_checkpoint:
        steps, scenes = args.warm_start_steps, args.warm_start_scenes
        train_checkpoint(output, args.seed, args.models, steps, scenes, args.device)
    for name in MODELS:
        if not (output / name).exists():
            with complete_or_absent(output / name) as unfinished:
                shutil.copytree(SHIPPED / name, unfinished, dirs_exist_ok=True)
    print(
        f"demo of points: {output}/train, {output}/heldout, {output}/qwen, {output}/sam", flush=True
    )


if __name__ == "__main__":
    run_program(main)
