"""Parts that the benchmarks share: flags, the clock, the device's ceilings, a random LLM."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rl_train.config.flags import COUNT, COUNT_OR_0, WEIGHT, flag
from rl_train.distributed.process_group import gather_objects
from rl_train.policies.lora import attach_lora, freeze_all_but
from rl_train.policies.qwen_vl import LINEARS
from sa2va_hf import Sa2VAConfig
from tools.benchmarks.families import CONFIGS
from tools.benchmarks.qwen import SHAPES, TextOf, random_qwen

SIZES = [*CONFIGS, *SHAPES]
LAST = 3  # rounds of a warm-up that must be alike
WARMUP_SECONDS = 30  # after which a warm-up ends, when it has had as many rounds


@dataclass(frozen=True, kw_only=True)
class Timed:
    device: str = flag("cuda", "where")
    rounds: int = flag(5, "of each measurement; the median counts", type=COUNT)
    warmup: int = flag(
        12,
        f"rounds before those that count, at most: until they are stable or {WARMUP_SECONDS} s old",
        type=COUNT_OR_0,
    )
    stable: float = flag(
        0.03,
        f"the warm-up ends when its last {LAST} rounds differ by at most this fraction",
        type=WEIGHT,
    )
    sizes: str = flag(
        "4b",
        "of the model: 1b, 4b, 8b, 26b, internvl3-8b, sa2va-qwen3-4b, sa2va-qwen-7b = Sa2VA of "
        "these; qwen-7b = Qwen2.5-VL-7B and SAM2 large, qwen3-4b = Qwen3-VL-4B and SAM2 large, for "
        "points; names with tiny = to try the code on a CPU",
        choices=SIZES,
    )


@dataclass(frozen=True, kw_only=True)
class Ceilings(Timed):
    matmul_size: int = flag(8192, "side of the matrices whose product is the ceiling", type=COUNT)
    copy_mib: int = flag(4096, "size of the copy that measures the bandwidth", type=COUNT)


@dataclass(frozen=True, kw_only=True)
class Answers(Ceilings):
    num_generations: int = flag(8, "rows of each prompt", type=COUNT)
    prompt_length: int = flag(400, "tokens", type=COUNT)
    num_tokens: int = flag(128, "new tokens of each row", type=COUNT)
    lora_r: int = flag(128, "rank", type=COUNT)


@dataclass(frozen=True)
class Warmth:
    """The end of a warm-up."""

    warmup_rounds: int
    settled: bool

    def __str__(self):
        ending = "settled" if self.settled else "NOT SETTLED"
        return f"{ending} after {self.warmup_rounds} rounds of warm-up"


@dataclass(frozen=True)
class Timing(Warmth):
    """Seconds that the rounds of a measurement took."""

    seconds: float  # the median
    of_rounds: list[float]


def warm_up(one_round: Callable[[], dict[str, float]], options: Timed) -> Warmth:
    """Run rounds, {work: seconds} each, until all works are `stable` or the warm-up is over.

    It is over after --warmup rounds, or WARMUP_SECONDS and LAST rounds.
    Of several ranks, of which all must come here, the slowest counts: so all take as many rounds.
    """
    rounds, elapsed = [], 0.0
    while len(rounds) < options.warmup and not stable(rounds, options.stable):
        if len(rounds) >= LAST and elapsed > WARMUP_SECONDS:
            break
        # By the slowest rank, so that all ranks end the warm-up together.
        of_ranks = gather_objects(one_round())
        rounds.append(
            {
                name: max(seconds_of_rank[name] for seconds_of_rank in of_ranks)
                for name in of_ranks[0]
            }
        )
        elapsed += sum(rounds[-1].values())
    return Warmth(len(rounds), stable(rounds, options.stable))


def stable(rounds: list[dict[str, float]], fraction: float) -> bool:
    """Return True if each work's LAST rounds differ by at most a fraction of the least.

    Fewer rounds are not.
    """
    last = [[times[name] for times in rounds[-LAST:]] for name in (rounds[0] if rounds else ())]
    return len(rounds) >= LAST and all(max(t) - min(t) <= fraction * min(t) for t in last)


def seconds(work: Callable[[], object], options: Timed) -> float:
    """Return the median seconds of the rounds that follow the warm-up."""
    return timing(work, options).seconds


def timing(work: Callable[[], object], options: Timed) -> Timing:
    """Return `seconds`, and how the warm-up before them ended."""
    return timings_in_turns({"": work}, options)[""]


def timings_in_turns(works: dict, options: Timed) -> dict[str, Timing]:
    """Return {name: `timing`} of several works, one round of each after the other."""

    def one_round() -> dict[str, float]:
        times = {}
        for name, work in works.items():
            synchronize(options.device)
            start = time.perf_counter()
            work()
            synchronize(options.device)
            times[name] = time.perf_counter() - start
        return times

    warmth = vars(warm_up(one_round, options))
    rounds = [one_round() for _ in range(options.rounds)]
    of_works = {name: [times[name] for times in rounds] for name in works}
    return {
        name: Timing(**warmth, seconds=statistics.median(times), of_rounds=times)
        for name, times in of_works.items()
    }


def ratios(of_one: list[float], of_other: list[float]) -> dict[str, float]:
    """Return the median and the extremes of one work's seconds by the other's, round by round.

    The rounds of both are neighbours, so a host that becomes slower does so for both.
    """
    quotients = [one / other for one, other in zip(of_one, of_other, strict=True)]
    return dict(ratio=statistics.median(quotients), lowest=min(quotients), highest=max(quotients))


class GarbageTimer:
    """Context that counts the seconds for which Python's garbage collector stops this process."""

    def __init__(self):
        self.seconds = self.start = 0.0

    def __enter__(self):
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_):
        gc.callbacks.remove(self)

    def __call__(self, event: str, info: dict):
        """Take the time when a collection starts and stops."""
        now = time.perf_counter()
        if event == "start":
            self.start = now
        else:
            self.seconds += now - self.start

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def synchronize(device: torch.device | str):
    """Wait until a GPU has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device | str) -> str:
    """Return the name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def ceilings(options: Ceilings) -> tuple[float, float, dict]:
    """Return (operations a second of a bf16 product, bytes a second of a copy, both to be printed).

    Of square random matrices; of random bytes, read and written ones together.
    """
    side = options.matmul_size
    a, b = torch.randn(2, side, side, device=options.device, dtype=torch.bfloat16)
    products = timing(lambda: [a @ b for _ in range(10)], options)
    matmul = 10 * 2 * side**3 / products.seconds  # multiplications and additions
    source = torch.randint(256, (options.copy_mib * 2**17,), device=options.device)
    target = torch.empty_like(source)
    copy = timing(lambda: target.copy_(source), options)
    bandwidth = 2 * source.nbytes / copy.seconds  # read and written
    words = dict(matmul_tflops=matmul / 1e12, bandwidth_tb_per_second=bandwidth / 1e12)
    words |= dict(ceilings_settled=products.settled and copy.settled)
    return matmul, bandwidth, dict(device=device_name(options.device)) | words


def drifts(first: dict, last: dict) -> dict[str, float]:
    """Return by how much ceilings measured last are those measured first."""
    return dict(
        matmul_drift=last["matmul_tflops"] / first["matmul_tflops"],
        bandwidth_drift=last["bandwidth_tb_per_second"] / first["bandwidth_tb_per_second"],
    )


def print_table(columns: dict[str, str], rows: dict[str, dict], **title: float | int | str | bool):
    """Print rows {name: {column: value}} by the formats of columns; what is missing as "-"."""
    widths = {column: max(len(column), 8) + 2 for column in columns}
    words = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in title.items()}
    print(", ".join(f"{name} {value}" for name, value in words.items()))
    print(" " * 20 + "".join(f"{column:>{width}}" for column, width in widths.items()))
    for name, row in rows.items():
        cells = {c: "-" if row.get(c) is None else format(row[c], columns[c]) for c in columns}
        print(f"{name:20}" + "".join(f"{cells[c]:>{width}}" for c, width in widths.items()))


def random_llm(options: Answers):
    """Build an LLM of random bf16 weights with a float32 LoRA, not zero, on all linears."""
    if options.sizes in SHAPES:
        vlm = random_qwen(SHAPES[options.sizes], options.device)
        attach_lora(vlm, options.lora_r, 2 * options.lora_r, targets=LINEARS)
        start_lora(freeze_all_but(vlm, {"lora": "lora_"})[0])
        return TextOf(vlm.model.language_model, vlm.lm_head, vlm)
    if "text_config" in CONFIGS[options.sizes]:
        raise ValueError(
            f"--sizes {options.sizes}: its language model is that of qwen3-4b or qwen-7b (of the "
            "tiny ones: qwen3-tiny, qwen-tiny)"
        )
    torch.manual_seed(0)
    config = Sa2VAConfig(**CONFIGS[options.sizes]).llm
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attach_lora(model, options.lora_r, 2 * options.lora_r)
    start_lora(freeze_all_but(model, {"lora": "lora_"})[0])
    return model.eval()


def start_lora(trainable: dict[str, torch.nn.Parameter]):
    """Give the LoRA's B random values; they begin at zero, where the LoRA does nothing."""
    for name, parameter in trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)


def random_prompts(num: int, config: PreTrainedConfig, options: Answers):
    """Return (embeddings (num, L, C) in bf16, attention mask (num, L)) of prompts."""
    length, device = options.prompt_length, options.device
    embeds = torch.randn(num, length, config.hidden_size, device=device, dtype=torch.bfloat16)
    return embeds, torch.ones(num, length, dtype=torch.long, device=device)


def free_sampling(num_tokens: int, pad_id: int, temperature: float | None = 1.0) -> dict:
    """Return settings of transformers' `generate` for so many tokens (None: greedily)."""
    length = dict(max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=pad_id)
    sampling = dict(do_sample=True, top_k=0, top_p=1.0, temperature=temperature)
    return length | (dict(do_sample=False) if temperature is None else sampling)
