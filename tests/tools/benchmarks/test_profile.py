"""`tools.benchmarks.__main__ profile` reads a trace: phases by marks, kernels by class."""

import pytest

from tools.benchmarks import profile


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_192x128_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("_int8_product", "matrix products"),
        ("_attend", "attention"),
        ("_merge", "attention"),
        ("_gate", "our and compiled kernels"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "our and compiled kernels"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>", "other kernels"),
        ("void at::native::reduce_kernel<512, 1>", "other kernels"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("Memset (Device)", "copies"),
    ],
)
def test_class_of_a_kernel(name, kind):
    assert profile.kernel_class(name) == kind


def trace(*events):
    """Kernels (name, start, end) in seconds, as the profiler writes them, the last first."""
    kernels = [
        {
            "cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
            "name": name,
            "ts": 7e12 + start * 1e6,
            "dur": (end - start) * 1e6,
        }
        for name, start, end in reversed(events)
    ]
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9e9}
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, launch, *kernels]}


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
STEP = [
    (SPIN, 0, 0),
    ("lost", 0.1, 0.2),
    (SPIN, 0.9, 0.95),
    ("nvjet", 1, 3),
    ("_gate", 2, 4),
    ("Memcpy HtoD", 6, 7),
    ("softmax", 6.25, 6.5),  # 3 + 1 busy of 7, 5.25 in all
    (SPIN, 8, 8),
    ("flash", 8.5, 9),
    ("flash", 9.5, 10),
    (SPIN, 11, 11),
    ("later", 11.5, 12),
]
PHASES = {"one": 7.0, "two": 3.0}


def test_kernels_are_attributed():
    """Each to the phase between whose marks it ran.

    What overlaps counts for its share of the time in which anything ran.
    """
    parts = profile.split(profile.parse(trace(*STEP), "cuda"), PHASES, "spin_kernel")
    assert [name for name, *_ in parts["one"]] == ["nvjet", "_gate", "Memcpy HtoD", "softmax"]
    shares = dict.fromkeys(profile.KERNELS, 0) | {
        "matrix products": 2 * 4 / 5.25,
        "our and compiled kernels": 2 * 4 / 5.25,
        "copies": 4 / 5.25,
        "other kernels": 0.25 * 4 / 5.25,
    }
    assert profile.attribute(parts["one"]) == pytest.approx(shares)
    flash = dict.fromkeys(profile.KERNELS, 0) | {"attention": 1}
    assert profile.attribute(parts["two"]) == pytest.approx(flash)
    assert profile.attribute([]) == dict.fromkeys(profile.KERNELS, 0)


@pytest.mark.parametrize(
    "events, message",
    [
        ([e for e in STEP if e[0] != SPIN], "0 of 3 ends of phases are left"),
        (STEP[3:], "2 of 3 ends of phases are left, among 9"),
        (STEP[:7] + STEP[8:], "one took 7.000 s, in the trace 0.900"),  # the spare mark instead
        ([], "0 of 3 ends of phases are left, among 0"),
    ],
)
def test_a_trace_that_lost_events_is_an_error(events, message):
    with pytest.raises(RuntimeError, match=message):
        profile.split(profile.parse(trace(*events), "cuda"), PHASES, "spin_kernel")
