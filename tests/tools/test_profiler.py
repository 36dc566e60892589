"""The kernel report: sums, gaps, work from shapes and limits of kernels that are made up here.

Then a trace as a GPU's looks, and a real run on this CPU.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, metrics
from ranvier.tools.profiler.chrome_trace import (
    Kernel,
    Op,
    classify_kernel,
    count_bytes,
    count_flops,
    read_kernels,
    short_kernel_name,
)
from ranvier.tools.profiler.report import (
    DevicePeaks,
    Throughput,
    _record_triton,
    describe_bottleneck,
    find_gaps,
    format_report,
    possible_savings,
    roofline_bound,
    summarize_kernels,
    time_by_bound,
)

PEAKS = DevicePeaks(flops=1e12, bytes=1e9, eighths=2e12)
HALF = "c10::BFloat16"


def kernel(name: str, start: float, duration: float, **more: Any) -> Kernel:
    """A kernel by times in microseconds."""
    return Kernel(name, more.pop("op", "aten::mul"), start, duration, **more)


# ---- kernels to report ----------------------------------------------------------------------


def test_sums_and_gaps_count_overlapping_streams_once() -> None:
    kernels = [
        kernel("a", 0.0, 1000.0, stream="7"),
        kernel("b", 500.0, 1000.0, stream="8"),
        kernel("a", 2000.0, 500.0, stream="7"),
        kernel("inside", 2100.0, 100.0, stream="8"),
        kernel("c", 2600.0, 400.0, stream="7", op="aten::mm"),
    ]
    report = summarize_kernels(list(reversed(kernels)), steps=2, peaks=DevicePeaks())
    assert (report.step_ms, report.busy_ms) == (1.5, pytest.approx(1.2))
    assert report.idle_ms == pytest.approx(0.3) and report.gaps == 1.0
    assert [(gap.before, gap.after) for gap in report.longest] == [("b", "a"), ("a", "c")]
    assert report.longest[0].ms == pytest.approx(0.5)
    assert report.groups["matmul"] == pytest.approx(0.2)
    assert sum(report.groups.values()) == pytest.approx(1.5)
    rows = {row.name: row for row in report.rows}
    assert report.rows[0].name == "a" and rows["a"].calls == 1.0
    assert rows["a"].ms == pytest.approx(0.75) and rows["a"].share == pytest.approx(0.5)


def test_one_kernel_has_no_gap() -> None:
    assert list(find_gaps([kernel("a", 5.0, 1.0)])) == []


def test_the_roof_is_the_longer_of_two_least_times() -> None:
    assert roofline_bound(1.0, 0.8, 0.1, products=True) == ("compute", 0.8)
    assert roofline_bound(1.0, 0.3, 0.6, products=True) == ("memory", 0.6)
    assert roofline_bound(1.0, 0.1, 0.2, products=True) == ("neither", 0.2)
    assert roofline_bound(1.0, None, 0.9, products=False) == ("memory", 0.9)
    assert roofline_bound(1.0, None, 0.9, products=True) == ("", None), (
        "its FLOPs would have to be known"
    )
    assert roofline_bound(1.0, None, None, products=False) == ("", None)


def test_rates_bounds_and_words() -> None:
    mm = {"op": "aten::mm", "types": (HALF, HALF)}
    kernels = [
        kernel("nvjet_a", 0.0, 1000.0, flops=8e8, bytes=1e3, **mm),  # 80 % of 1 TFLOP/s
        kernel("triton_poi_b", 1000.0, 500.0, bytes=2e5),  # 40 % of 1 GB/s
        kernel("unknown", 1500.0, 100.0),
        kernel("tiny", 1700.0, 100.0, bytes=10.0),
    ]
    report = summarize_kernels(kernels, steps=1, peaks=PEAKS)
    rows = {row.name: row for row in report.rows}
    assert rows["nvjet_a"].flops_share == pytest.approx(0.8)
    assert rows["triton_poi_b"].bytes_share == pytest.approx(0.4)
    found = {name: row.bound for name, row in rows.items()}
    wanted = {"nvjet_a": "compute", "triton_poi_b": "memory", "unknown": "", "tiny": "neither"}
    assert found == wanted and rows["unknown"].bytes is None
    assert time_by_bound(report)["idle"] == pytest.approx(0.1)
    assert possible_savings(report)[0][0] == pytest.approx(0.3), (
        "0.5 ms at 40 % of the memory's peak"
    )
    words = describe_bottleneck(report)
    assert words.startswith("Bottleneck: compute. Matmuls run near their peak.")
    assert (
        "possible saving is triton_poi_b" in words and "40% of the peak memory bandwidth" in words
    )
    page = format_report(report, Throughput("a run", "H200", 0.002, 1e5, 0.4), top=3)
    assert "step 2.00 ms, 100,000 tokens/s, MFU 40.0%" in page and "and 1 more" in page
    assert next(line for line in page.splitlines() if line.startswith("unknown")).endswith("-")
    json.dumps(report.__dict__, default=lambda one: one.__dict__)


def test_a_sum_with_an_unknown_term_is_unknown_and_peaks_fit_types() -> None:
    both = [kernel("a", 0.0, 1.0, bytes=8.0), kernel("a", 1.0, 1.0)]
    (row,) = summarize_kernels(both, steps=1, peaks=PEAKS).rows
    assert row.bytes is None and row.bound == ""
    product = {"op": "aten::mm", "flops": 5e5}
    shares = []
    for types in ((HALF,), ("c10::Float8_e4m3fn",), ("float",)):
        one = kernel("gemm", 0.0, 1.0, types=types, **product)
        shares += [summarize_kernels([one], steps=1, peaks=PEAKS).rows[0].flops_share]
    assert shares == [pytest.approx(0.5), pytest.approx(0.25), None]
    far = kernel("Memcpy HtoD (Pinned -> Device)", 0.0, 1.0, bytes=1e3)
    (row,) = summarize_kernels([far], steps=1, peaks=PEAKS).rows
    assert row.bytes == 1e3 and row.bytes_share is None, "the link to the host is not the memory"


def test_nothing_known_is_said_so() -> None:
    report = summarize_kernels([kernel("a", 0.0, 1.0)], steps=1, peaks=DevicePeaks())
    assert "not known" in describe_bottleneck(
        report
    ) and "norm, elementwise" in describe_bottleneck(report)


# ---- work from shapes -----------------------------------------------------------------------


def test_flops_of_products() -> None:
    two = [HALF, HALF]
    assert count_flops(Op("aten::mm", [[4, 8], [8, 16]], two)) == 2 * 4 * 8 * 16
    assert count_flops(Op("aten::addmm", [[16], [4, 8], [8, 16]], [HALF, *two])) == 2 * 4 * 8 * 16
    assert count_flops(Op("aten::bmm", [[3, 4, 8], [3, 8, 16]], two)) == 2 * 3 * 4 * 8 * 16
    assert count_flops(Op("aten::_scaled_mm", [[4, 8], [8, 16], [], []], two)) == 2 * 4 * 8 * 16
    assert count_bytes(Op("aten::mm", [[4, 8], [8, 16]], two)) == 2 * (4 * 8 + 8 * 16 + 4 * 16)
    for unknown in (Op("aten::mm"), Op("aten::mm", [[4, 8], [9, 16]], two), Op("aten::mul")):
        assert count_flops(unknown) is None


def test_flops_of_attention() -> None:
    q, k = [2, 8, 64, 16], [2, 4, 64, 16]
    full = 4 * 2 * 8 * 64 * 64 * 16
    name = "aten::_scaled_dot_product_flash_attention"
    values = ["", "", "", "0.", "True", "False", ""]
    dims = [q, k, k, [], [], [], []]
    assert count_flops(Op(name, dims, [HALF] * 3, values=values)) == full // 2
    values[4] = "False"
    assert count_flops(Op(name, dims, [HALF] * 3, values=values)) == full
    values = [""] * 15
    values[11] = "True"
    back = Op(f"{name}_backward", [q, q, k, k, q, *[[]] * 10], [HALF] * 5, values=values)
    assert count_flops(back) == full // 2 * 5 // 2
    assert count_flops(Op("torch_attn::_varlen_attn", [[128, 8, 16]] * 3, [HALF] * 3)) is None


def test_bytes_of_other_operators() -> None:
    x, column = [4, 8], [4, 1]
    assert count_bytes(Op("aten::mul", [x, column], [HALF, "float"])) == 2 * 32 + 4 * 4 + 4 * 32
    assert count_bytes(Op("aten::mul", [x, []], [HALF, "double"])) == 2 * 32 + 8 + 2 * 32
    assert count_bytes(Op("aten::mul_", [x, x], ["float", "float"])) == 4 * 32 * 3
    assert count_bytes(Op("aten::copy_", [x, x, []], [HALF, "float", "Scalar"])) == 2 * 32 + 4 * 32
    assert count_bytes(Op("aten::fill_", [x, []], ["float", "Scalar"])) == 4 * 32
    assert count_bytes(Op("aten::eq", [x, x], ["long int", "long int"])) == 8 * 64 + 32
    spread = Op("aten::neg", [x], ["float"], [[0, 1]])
    assert count_bytes(spread) == 4 * 8 + 4 * 32, "a row that is spread lies in memory once"
    over = ["", "[1]", "True", ""]
    assert (
        count_bytes(Op("aten::sum", [x, [], [], []], ["float", "", "", ""], values=over)) == 4 * 36
    )
    assert (
        count_bytes(Op("triton_poi_fused_add_0", [x, x, []], [HALF, "float", "Scalar"])) == 6 * 32
    )
    unknown = [("aten::cat", "TensorList"), ("aten::gather", "float"), ("mine::op", "float")]
    for name, kind in unknown:
        assert count_bytes(Op(name, [x], [kind])) is None, name
    assert (
        count_bytes(Op("aten::mul")) is None
        and count_bytes(Op("aten::mul", [x], ["strange"])) is None
    )


@pytest.mark.parametrize(
    ("name", "op", "scope", "group"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "aten::mm", (), "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>(P)", "", (), "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>(P)", "", (), "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_1", "", (), "norm, elementwise"),
        ("void at::native::elementwise_kernel<1>(F)", "aten::mul", (), "norm, elementwise"),
        ("void at::native::elementwise_kernel<1>(F)", "aten::mul", ("optimizer",), "optimizer"),
        ("_gate", "triton::_gate", ("_Gate",), "norm, elementwise"),
        ("_cross_entropy", "triton::_cross_entropy", (), "cross-entropy"),
        ("reduce", "aten::sum", ("_LossBackward",), "cross-entropy"),
        ("Memcpy DtoD (Device -> Device)", "aten::copy_", (), "copies"),
        ("ncclDevKernel_AllGather_RING", "c10d::_allgather_base_", (), "communication"),
        ("something", "", (), "other"),
    ],
)
def test_groups(name: str, op: str, scope: tuple[str, ...], group: str) -> None:
    assert classify_kernel(name, op, scope) == group


def test_names_are_short() -> None:
    pieces = {
        "void at::native::vectorized_elementwise_kernel<4, at::native::F<float> >(int, F)": (
            "vectorized_elementwise_kernel"
        ),
        "void cutlass::Kernel2<cutlass_80_wmma_16x16>(cutlass_80::Params)": "cutlass_80_wmma_16x16",
        "std::enable_if<!(false), void>::type internal::gemvx::run<int>(A)": "run",
        "void (anonymous namespace)::softmax_warp<2>(float*)": "softmax_warp",
        "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD",
        "autograd::engine::evaluate_function: MmBackward0": "MmBackward0",
        "aten::mm": "mm",
        "triton_red_fused_add_0": "triton_red_fused_add_0",
    }
    assert {name: short_kernel_name(name) for name in pieces} == pieces


# ---- a trace as a GPU's looks ---------------------------------------------------------------


def host(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    """Something a thread did."""
    row = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 10, "ts": ts, "dur": dur}
    return {**row, "args": args}


def device(name: str, ts: float, dur: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    """Something the device did."""
    row = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur}
    return {**row, "args": {"stream": 7, **args}}


def shapes(*tensors: tuple[list[int], str]) -> dict[str, Any]:
    return {"Input Dims": [dims for dims, _ in tensors], "Input type": [t for _, t in tensors]}


MADE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0},
        host("cpu_op", "aten::linear", 0.0, 20.0, **{"External id": 1}),
        host("cpu_op", "aten::mm", 1.0, 18.0, **shapes(([4, 8], HALF), ([8, 16], HALF))),
        host("cuda_runtime", "cudaLaunchKernel", 3.0, 2.0, correlation=51),
        host("cuda_driver", "cuLaunchKernelEx", 8.0, 2.0, correlation=52),
        host("user_annotation", "optimizer", 30.0, 40.0),
        host("cpu_op", "triton::_adamw", 31.0, 9.0, **shapes(([100], "float"), ([100], HALF))),
        host("cuda_driver", "cuLaunchKernelEx", 33.0, 2.0, correlation=53),
        host("cpu_op", "aten::_foreach_add_", 50.0, 9.0, **shapes(([100], "TensorList"))),
        host("cuda_runtime", "cudaLaunchKernel", 51.0, 2.0, correlation=54),
        host("cuda_runtime", "cudaGraphLaunch", 80.0, 2.0, correlation=55),
        host("cpu_op", "aten::add", 90.0, 1.0, **{"External id": 9}, **shapes(([8], "float"))),
        device("splitKreduce_kernel", 130.0, 1.0, correlation=52),
        device("nvjet_a", 100.0, 30.0, correlation=51),
        device("_adamw", 140.0, 10.0, correlation=53),
        device("void multi_tensor_apply<1>()", 150.0, 10.0, correlation=54),
        device("nvjet_b", 160.0, 10.0, correlation=55),
        device("add_kernel", 170.0, 10.0, **{"External id": 9}),
        device("Memcpy DtoD (Device -> Device)", 180.0, 1.0, "gpu_memcpy", bytes=64),
    ]
}


def test_a_trace_links_kernels_to_operators() -> None:
    found = {kernel.name: kernel for kernel in read_kernels(MADE)}
    assert [kernel.start for kernel in found.values()] == sorted(k.start for k in found.values())
    mm = found["nvjet_a"]
    assert (mm.op, mm.flops, mm.scope[0]) == ("aten::mm", 2 * 4 * 8 * 16, "aten::linear")
    assert mm.shapes == ([4, 8], [8, 16]) and mm.stream == "7"
    rest = found["splitKreduce_kernel"]
    assert (rest.op, rest.flops, rest.bytes) == ("aten::mm", None, None), "work is counted once"
    update = found["_adamw"]
    assert (update.group, update.bytes) == ("optimizer", 600) and "optimizer" in update.scope
    lists = found["void multi_tensor_apply<1>()"]
    assert (lists.group, lists.bytes) == ("optimizer", None)
    graph = found["nvjet_b"]
    assert (graph.op, graph.flops, graph.group) == ("", None, "matmul")
    assert found["add_kernel"].op == "aten::add" and found["add_kernel"].bytes == 64
    assert found["Memcpy DtoD (Device -> Device)"].bytes == 128
    report = summarize_kernels(list(found.values()), steps=1, peaks=PEAKS)
    assert report.groups["matmul"] == pytest.approx(0.041)
    assert report.idle_ms == pytest.approx(0.009)


def test_a_trace_of_a_cpu_counts_operators_without_those_inside() -> None:
    outer = host("cpu_op", "aten::linear", 0.0, 20.0)
    inner = host("cpu_op", "aten::mm", 1.0, 15.0, **shapes(([4, 8], "float"), ([8, 2], "float")))
    other = {**host("cpu_op", "aten::mul", 5.0, 2.0), "tid": 11}
    found = {kernel.name: kernel for kernel in read_kernels({"traceEvents": [outer, inner, other]})}
    assert found["aten::linear"].duration == 5.0 and found["aten::mm"].duration == 15.0
    assert found["aten::mm"].flops == 2 * 4 * 8 * 2
    assert found["aten::mul"].scope == () and found["aten::mm"].scope == ("aten::linear",)
    report = summarize_kernels(list(found.values()), steps=1, peaks=DevicePeaks())
    assert report.idle_ms == 0.0 and report.step_ms == pytest.approx(0.02)


# ---- real runs ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_profiled_and_left_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL_OPTIONS, "--train.steps", "2", "--nproc", "1", "--train.output-dir", "run"]
    assert call("train", *words) == 0
    run, quick = folder / "run", ["--steps", "1", "--warmup-steps", "2"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert call("profile", "run", *quick, "--top", "4") == 0
    page = capsys.readouterr().out
    for part in ("tokens/s", "operators ran", "matmul", "optimizer", "cross-entropy", "attention"):
        assert part in page, page
    assert (run / "profile" / "profile.txt").read_text() in page
    facts = json.loads((run / "profile" / "profile.json").read_text())
    report = facts["report"]
    assert report["busy_ms"] + report["idle_ms"] == pytest.approx(report["step_ms"])
    assert sum(report["groups"].values()) == pytest.approx(report["busy_ms"], rel=1e-3)
    (mm,) = [row for row in report["rows"] if row["name"] == "mm" and row["group"] == "matmul"]
    assert mm["flops"] > 1e6 and mm["flops_share"] is None, "the peak of a CPU is not known"
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 100
    assert {path: path.read_bytes() for path in before} == before and len(metrics(run)) == 2
    rest = {path for path in run.rglob("*") if path.is_file()} - set(before)
    assert {path.parent.name for path in rest} == {"profile"}

    config = (run / "config.toml").read_text()
    (folder / "other.toml").write_text(config.replace('out = "run"', 'out = ""'))
    more = ["--model.layers", "1", "--output", "here"]
    assert call("profile", "other.toml", *quick, *more) == 0
    assert (folder / "here" / "profile.txt").exists() and not (folder / "runs").exists()


def test_functions_in_triton_show_their_tensors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Triton, whose functions run on this CPU."""
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("the real one is there")
    (folder / "triton" / "runtime").mkdir(parents=True)
    for name in ("triton/__init__.py", "triton/runtime/__init__.py"):
        (folder / name).touch()
    (folder / "triton/runtime/jit.py").write_text(
        "class JITFunction:\n"
        "    def __init__(self, fn): self.fn = fn\n"
        "    def run(self, *args, grid): return self.fn(*args)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    try:
        with _record_triton(), torch.profiler.profile(record_shapes=True) as profiler:
            function = importlib.import_module("triton.runtime.jit").JITFunction
            x, y = torch.ones(8), torch.ones(4, dtype=torch.bfloat16)
            assert function(lambda x, y, n: n).run(x, y, 3, grid=(1,)) == 3
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
    profiler.export_chrome_trace(str(folder / "trace.json"))
    found = {one.op: one for one in read_kernels(json.loads((folder / "trace.json").read_text()))}
    assert found["triton::<lambda>"].bytes == 8 * 4 + 4 * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_a_gpu_know_their_operators(folder: Path) -> None:
    (folder / "one.toml").write_text(
        '[model]\nembed = 512\nlayers = 2\n[data]\nmax_bytes = 200000\n[train]\ndevice = "cuda"\n'
    )
    assert call("profile", "one.toml", "--plan.data", "1") == 0
    report = json.loads((folder / "one-profile" / "profile.json").read_text())["report"]
    rows = [row for row in report["rows"] if row["group"] == "matmul"]
    assert report["busy_ms"] > 0.0 and report["groups"]["optimizer"] > 0.0
    assert any(row["flops"] for row in rows) and all(row["op"] for row in rows)
    assert all(row["ms"] > 0.0 for row in report["rows"])


MISTAKES: list[tuple[list[str], str]] = [
    ([], "was given 0 arguments"),
    (["."], "is not a run"),
    (["nowhere"], "cannot be read"),
    (["two.toml", "two.toml"], "Only one file or run is read"),
    (["two.toml"], "--plan.data 1 --plan.row 1 --plan.global-batch 4"),
    (["one.toml", "--steps", "0"], "steps=0"),
    (["one.toml", "--output", "one.toml"], "Choose another with --out"),
    (["one.toml", "--model.heads", "7"], "kv_heads"),
]


@pytest.mark.parametrize(
    ("words", "says"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_mistakes_end_with_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (folder / "one.toml").write_text("[plan]\ndata = 1\n")
    (folder / "two.toml").write_text("[plan]\ndata = 2\nrow = 2\n")
    assert call("profile", *words) in (64, 65)
    message = "".join(capsys.readouterr())
    assert says in message and "Traceback" not in message, message
    assert {path.name for path in folder.iterdir()} == {"one.toml", "two.toml"}
