"""Profile: the time of a step, kernel by kernel, and the bottleneck of each kernel.

The run is built on one rank and takes a few steps on its own data; torch's profiler records the
last of them. Everything after that is a pure function of a list of kernels. A kernel is compared
with two peaks of the device (a roofline):

    least time = max(FLOPs / peak FLOP/s, bytes / peak bytes/s)

The larger term is the bottleneck: compute or memory; neither, if the kernel takes more than four
times as long. Values that a trace does not contain are printed as "-". Not handled: several
ranks (see `train.trace_comm`).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from ranvier import launch
from ranvier.config.run import RunConfig
from ranvier.data.run_data import data_source
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo, cache_compiled_kernels
from ranvier.optim.optimizer import Optimizer
from ranvier.sharding import REPLICA_AXES
from ranvier.system.terminal import print
from ranvier.tools.profiler.chrome_trace import (
    FLOAT8_TYPES,
    HALF_TYPES,
    KERNEL_GROUPS,
    OPTIMIZER_SCOPE,
    TRITON_PREFIX,
    Kernel,
    read_kernels,
    short_kernel_name,
)
from ranvier.train import build_model, resolve, train
from ranvier.train.cuda_graph import WARMUP_STEPS
from ranvier.train.metrics import peak_bandwidth, peak_flops
from ranvier.train.resume import run_directory as folders
from ranvier.train.trainer import Trainer

NEAR_PEAK_FRACTION = 0.25
"""Minimum fraction of a peak for it to count as the bottleneck of a kernel."""
FLOAT8_DEVICES = ("H100", "H200", "B200", "MI300")
"""Devices whose data sheets list 8-bit matmuls twice as fast as 16-bit ones."""


@dataclass(frozen=True)
class DevicePeaks:
    """Peak rates of a device per second; None if unknown."""

    flops: float | None = None
    """FLOP/s of 16-bit matmuls."""
    bytes: float | None = None
    eighths: float | None = None
    """FLOP/s of 8-bit matmuls."""

    @classmethod
    def from_device(cls, device: torch.device, dtype: torch.dtype) -> DevicePeaks:
        """Returns the peaks of a device, if its name is known."""
        flops = peak_flops(device, dtype)
        name = train.device_name(device)
        # The table of peaks has only 16-bit rates; 8-bit ones follow from them.
        twice = flops is not None and any(word in name for word in FLOAT8_DEVICES)
        return cls(flops, peak_bandwidth(device), 2.0 * flops if flops and twice else None)

    def matmul_peak(self, kernels: Sequence[Kernel]) -> float | None:
        """Returns the peak for the matmul dtype of these kernels; None if they have different
        ones.
        """
        for peak, kinds in ((self.eighths, FLOAT8_TYPES), (self.flops, HALF_TYPES)):
            if all(any(kind in kinds for kind in kernel.types) for kernel in kernels):
                return peak
        return None


@dataclass(frozen=True)
class KernelSummary:
    """All launches of a kernel by an operator; numbers are per step."""

    name: str
    op: str
    group: str
    calls: float
    ms: float
    share: float
    """Fraction of the step."""
    flops: float | None
    bytes: float | None
    flops_share: float | None
    """Fraction of the peak, while it runs."""
    bytes_share: float | None
    bound: str
    """compute, memory or neither; empty if unknown."""
    least_ms: float | None
    """Its time at the peaks of the device."""


@dataclass(frozen=True)
class IdleGap:
    """A time without kernels, and the kernels around it."""

    ms: float
    before: str
    after: str


@dataclass(frozen=True)
class ProfileReport:
    """The time of a step by kernel; times are in milliseconds per step."""

    steps: int
    step_ms: float
    """From the first kernel to the last, divided by the number of steps."""
    busy_ms: float
    """Time with at least one kernel running."""
    idle_ms: float
    gaps: float
    """Number of gaps per step."""
    longest: list[IdleGap]
    groups: dict[str, float]
    rows: list[KernelSummary]
    """Kernels, longest first."""


@dataclass(frozen=True)
class Throughput:
    """Speed of the steps before profiling."""

    what: str
    device: str
    seconds: float
    tokens: float
    """Tokens per second."""
    mfu: float | None


# ---- the report: pure functions of kernels --------------------------------------------------


def summarize_kernels(
    kernels: Sequence[Kernel], *, steps: int, peaks: DevicePeaks
) -> ProfileReport:
    """Returns the sums by group and by kernel, and the gaps between kernels of any stream."""
    assert kernels and steps > 0, (len(kernels), steps)
    # Converts microseconds of all steps to milliseconds per step.
    unit = 1e3 * steps
    first = min(k.start for k in kernels)
    last = max(k.end for k in kernels)
    between = list(find_gaps(kernels))
    step_ms = (last - first) / unit
    idle = sum(gap.ms for gap in between) / steps
    groups = dict.fromkeys(KERNEL_GROUPS, 0.0)
    same: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.group] += kernel.duration / unit
        same[short_kernel_name(kernel.name), kernel.op, kernel.group].append(kernel)
    rows = [_summarize_kernel(key, some, steps, step_ms, peaks) for key, some in same.items()]
    return ProfileReport(
        steps,
        step_ms,
        step_ms - idle,
        idle,
        len(between) / steps,
        sorted(between, key=lambda gap: -gap.ms)[:3],
        groups,
        sorted(rows, key=lambda row: -row.ms),
    )


def find_gaps(kernels: Sequence[Kernel]) -> Iterator[IdleGap]:
    """Yields the times in which no stream ran a kernel."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    latest = ordered[0]
    for kernel in ordered[1:]:
        if kernel.start > latest.end:
            length = (kernel.start - latest.end) / 1e3
            yield IdleGap(length, short_kernel_name(latest.name), short_kernel_name(kernel.name))
        # Kernels of several streams overlap: the one that ends last starts the next gap.
        latest = max(latest, kernel, key=lambda one: one.end)


def _summarize_kernel(
    key: tuple[str, str, str],
    kernels: Sequence[Kernel],
    steps: int,
    step_ms: float,
    peaks: DevicePeaks,
) -> KernelSummary:
    """Returns one row of the table; a sum is known only if every term is."""
    ms = sum(kernel.duration for kernel in kernels) / 1e3 / steps
    work = [kernel.flops for kernel in kernels if kernel.flops is not None]
    size = [kernel.bytes for kernel in kernels if kernel.bytes is not None]
    # A partial sum would make a kernel look fast.
    if len(work) == len(kernels):
        flops = sum(work) / steps
    else:
        flops = None
    if len(size) == len(kernels):
        moved = sum(size) / steps
    else:
        moved = None
    # Transfers to other memories have the speed of a link, not of the device's own memory.
    local = all(kernel.is_local for kernel in kernels)
    least_flops = _least_ms(flops, peaks.matmul_peak(kernels))
    least_bytes = _least_ms(moved, peaks.bytes if local else None)
    bound, least = roofline_bound(
        ms, least_flops, least_bytes, products=key[2] in ("matmul", "attention")
    )
    return KernelSummary(
        *key,
        len(kernels) / steps,
        ms,
        ms / step_ms if step_ms else 0.0,
        flops,
        moved,
        None if least_flops is None or ms == 0.0 else least_flops / ms,
        None if least_bytes is None or ms == 0.0 else least_bytes / ms,
        bound,
        least,
    )


def _least_ms(amount: float | None, peak: float | None) -> float | None:
    if amount is None or peak is None:
        return None
    return amount / peak * 1e3


def roofline_bound(
    ms: float, flops_ms: float | None, bytes_ms: float | None, *, products: bool
) -> tuple[str, float | None]:
    """Returns the bottleneck of a kernel and its least time; for matmuls only if FLOPs are
    known.
    """
    if (products and flops_ms is None) or (flops_ms is None and bytes_ms is None):
        return "", None
    least = max(flops_ms or 0.0, bytes_ms or 0.0)
    # Far from both peaks: limited by latency, launch size or an unsuitable shape, not by the
    # hardware.
    if least < NEAR_PEAK_FRACTION * ms:
        return "neither", least
    return "compute" if (flops_ms or 0.0) >= (bytes_ms or 0.0) else "memory", least


# ---- the report as text ---------------------------------------------------------------------


def format_report(report: ProfileReport, pace: Throughput, *, top: int) -> str:
    """Returns the report as text."""
    cpu = pace.device == "CPU"
    if cpu:
        who = "operators ran"
    else:
        who = "the device computed"
    if pace.mfu is None:
        mfu = ""
    else:
        mfu = f", MFU {pace.mfu:.1%}"
    parts = [
        pace.what,
        f"step {1e3 * pace.seconds:,.2f} ms, {pace.tokens:,.0f} tokens/s{mfu}; under the profiler "
        f"{report.step_ms:,.2f} ms, in which {who} {_format_share(report.busy_ms, report)} of "
        "the time",
        f"idle {report.idle_ms:,.2f} ms per step ({_format_share(report.idle_ms, report)}) in "
        f"{report.gaps:,.0f} gaps" + ("; the longest:" if report.longest else ""),
        *(f"  {gap.ms:,.3f} ms from {gap.before} to {gap.after}" for gap in report.longest),
        "",
        *_group_table(report),
        "",
        *_kernel_table(report, top, cpu=cpu),
        "",
        *textwrap.wrap(describe_bottleneck(report), 100),
    ]
    return "\n".join(parts) + "\n"


def _format_share(ms: float, report: ProfileReport) -> str:
    if report.step_ms:
        return f"{ms / report.step_ms:.1%}"
    return "-"


def _group_table(report: ProfileReport) -> list[str]:
    """Returns the table of groups; concurrent kernels count twice."""
    ordered = sorted(report.groups.items(), key=lambda item: -item[1])
    lines = [("group", "ms/step", "share")]
    lines += [(name, f"{ms:,.3f}", _format_share(ms, report)) for name, ms in ordered if ms > 0.0]
    return align_columns(
        [*lines, ("idle", f"{report.idle_ms:,.3f}", _format_share(report.idle_ms, report))], 1
    )


def _kernel_table(report: ProfileReport, top: int, *, cpu: bool) -> list[str]:
    """Returns the table of the longest kernels; on a CPU a kernel is its operator."""
    words = ("operator", "group") if cpu else ("kernel", "launched by", "group")
    numbers = ("calls", "ms/step", "share", "TFLOP/s", "peak", "MB", "GB/s", "peak", "bound")
    lines = [(*words, *numbers)]
    for row in report.rows[:top]:
        names = (
            _truncate_name(row.name, 44),
            _truncate_name(row.op.removeprefix("aten::") or "-", 24),
            row.group,
        )
        values = (
            f"{row.calls:,.4g}",
            f"{row.ms:,.3f}",
            f"{row.share:.1%}",
            _format_number(row.flops, 1e9 * row.ms),
            _format_percent(row.flops_share),
            _format_number(row.bytes, 1e6),
            _format_number(row.bytes, 1e6 * row.ms),
            _format_percent(row.bytes_share),
            row.bound or "-",
        )
        lines.append((*(names[::2] if cpu else names), *values))
    if len(report.rows) > top:
        rest = sum(row.ms for row in report.rows[top:])
        blank = ("",) * (len(words) - 1)
        more = f"and {len(report.rows) - top} more"
        lines.append((more, *blank, "", f"{rest:,.3f}", _format_share(rest, report), *("",) * 6))
    return align_columns(lines, len(words))


def _truncate_name(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    return f"{name[: most - 2]}.."


def _format_number(amount: float | None, unit: float) -> str:
    if amount is None or unit == 0.0:
        return "-"
    return f"{amount / unit:,.4g}"


def _format_percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.0%}"


def align_columns(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns the lines of a table; the first `left` columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


BOUND_SENTENCES = {
    "compute": "Bottleneck: compute. Matmuls run near their peak.",
    "memory": "Bottleneck: memory bandwidth of the device.",
    "neither": "Bottleneck: kernels far from both peaks. They are too small, or their shapes do "
    "not suit the device.",
    "communication": "Bottleneck: communication.",
    "idle": "Bottleneck: the host. The device waits for it. Fewer and larger kernels help, for "
    "example a larger micro-batch.",
    "": "The bottleneck of most of the step is not known.",
}


def time_by_bound(report: ProfileReport) -> dict[str, float]:
    """Returns the milliseconds per step by bottleneck."""
    parts = dict.fromkeys(BOUND_SENTENCES, 0.0)
    for row in report.rows:
        parts["communication" if row.group == "communication" else row.bound] += row.ms
    return {**parts, "idle": report.idle_ms}


def possible_savings(report: ProfileReport) -> list[tuple[float, str]]:
    """Returns the milliseconds that a step could save, and how, largest first."""
    found = [(report.idle_ms, f"the idle time, {report.idle_ms:,.2f} ms per step")]
    for row in report.rows:
        if row.least_ms is not None:
            compute = row.flops_share or 0.0
            memory = row.bytes_share or 0.0
            if compute >= memory:
                peak = "the peak FLOP/s"
            else:
                peak = "the peak memory bandwidth"
            how = f"{row.name} ({row.group}), which takes {row.ms:,.2f} ms per step at "
            how += (
                f"{max(compute, memory):.0%} of {peak}; at the peak it would take "
                f"{row.least_ms:,.2f} ms"
            )
            found.append((row.ms - row.least_ms, how))
    return sorted(found, key=lambda item: -item[0])


def describe_bottleneck(report: ProfileReport) -> str:
    """Returns a text with the bottleneck of the step and the largest possible saving."""
    group, ms = max(report.groups.items(), key=lambda item: item[1])
    row = report.rows[0]
    largest = (
        f"The largest group is {group} with {_format_share(ms, report)} of the step, and the "
        f"longest kernel is {row.name} with {row.share:.1%}."
    )
    parts = time_by_bound(report)
    # Without peaks or work the bound of a kernel is not known, and only times can be reported.
    if not any(parts[name] for name in ("compute", "memory", "neither")):
        return f"The peaks of this device or the work of its kernels are not known. {largest}"
    shares = ", ".join(
        f"{_format_share(ms, report)} {name or 'not known'}"
        for name, ms in sorted(parts.items(), key=lambda item: -item[1])
        if ms > 0.0
    )
    _, saving = possible_savings(report)[0]
    most = max(parts, key=lambda name: parts[name])
    return (
        f"{BOUND_SENTENCES[most]} Step time by bottleneck: {shares}. {largest} The largest "
        f"possible saving is {saving}."
    )


# ---- taking the steps -----------------------------------------------------------------------


def profile_run(
    run: RunConfig, origin: Path, *, steps: int, warmup_steps: int, top: int, output: str
) -> int:
    """Profiles steps of a run on one rank, prints and writes the report, and returns the exit code.

    origin: the run directory or its TOML file; no other file in it is changed.
    """
    for name, value in (("steps", steps), ("warmup_steps", warmup_steps), ("top", top)):
        if not 1 <= value <= 1000:
            raise PlanError(f"{name}={value} is out of range. It must be 1 to 1000. Use {name}=10.")
    # Check everything before data are tokenized and a model is built.
    _check_single_rank(run, origin)
    device = resolve.resolve_device(run, ProcessInfo())
    context = resolve.ResolveContext(world_size=1, device=device)
    resolved = resolve.resolve_run(run, context)
    resolve.check_memory(resolved, context)
    # The first steps with a CUDA graph run eagerly or capture it: warm up until it is replayed.
    if resolved.plan.cuda_graph:
        warmup_steps = max(warmup_steps, WARMUP_STEPS + 2)
    if origin.is_dir():
        where = origin / "profile"
    else:
        where = origin.with_name(f"{origin.stem}-profile")
    folder = _make_report_dir(Path(output) if output else where)
    cache_compiled_kernels()
    source = data_source(resolved.model)
    data = source.open(resolved, source.prepare(resolved))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = Grid.from_plan(
        resolved.plan, rank=0, connected=False, timeout_seconds=resolved.train.comm_timeout_seconds
    )
    # More steps than are profiled, so that the run does not end early, and nothing that interrupts
    # steps.
    more = replace(
        resolved.train,
        steps=max(warmup_steps + steps + 3, resolved.train.steps),
        eval_interval=0,
        trace_comm=False,
    )
    only = replace(resolved, train=more, checkpoint=replace(resolved.checkpoint, interval=-1))
    trainer = Trainer.from_run(only, grid, device, data)
    pace, kernels = _profile_steps(
        trainer, folder / "trace.json.gz", steps=steps, warmup_steps=warmup_steps
    )
    peaks = DevicePeaks.from_device(device, build_model.DTYPES[resolved.train.dtype])
    report = summarize_kernels(kernels, steps=steps, peaks=peaks)
    page = format_report(report, pace, top=top)
    facts: dict[str, Any] = {"pace": asdict(pace), "peaks": asdict(peaks), "report": asdict(report)}
    folders.write_text_atomically(
        folder / "profile.json",
        json.dumps(facts | {"words": describe_bottleneck(report)}, indent=1),
    )
    folders.write_text_atomically(folder / "profile.txt", page)
    print(page, end="")
    print(f"\nWritten: {folder}/profile.txt, profile.json, trace.json.gz (open it in Perfetto)")
    return 0


def _check_single_rank(run: RunConfig, origin: Path) -> None:
    """Raises if the run needs several ranks, or is started on several."""
    me = launch.read_process_info()
    plan = run.plan
    if me is not None and me.world_size > 1:
        raise PlanError(
            f"A launcher has started {me.world_size} ranks. `ranvier profile` runs on one rank. "
            "Start it without a launcher."
        )
    many = {axis: size for axis, size in plan.degrees.items() if size > 1}
    if not many:
        return
    # One rank would otherwise process the samples of all replicas.
    readers = math.prod(many.get(axis, 1) for axis in REPLICA_AXES)
    options = " ".join(f"--plan.{axis} 1" for axis in many)
    options += f" --plan.global-batch {max(plan.global_batch // readers, 1)}" if readers > 1 else ""
    raise PlanError(
        f"{origin} is a run on {' · '.join(f'{axis}={size}' for axis, size in many.items())}. "
        "`ranvier profile` runs on one rank. To profile the work of one rank without its "
        f"communication, add {options}. To trace the communication of all ranks, use ranvier train "
        "--train.trace-comm True."
    )


def _make_report_dir(folder: Path) -> Path:
    """Returns the directory of the report, created if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"output={str(folder)!r} cannot be created: {error.strerror}. The report needs a "
            "writable directory. Choose another with --output."
        ) from None
    if not launch.is_writable(folder):
        raise PlanError(
            f"output={str(folder)!r} is not writable. Choose another directory with --output."
        )
    return folder


def _profile_steps(
    trainer: Trainer, path: Path, *, steps: int, warmup_steps: int
) -> tuple[Throughput, list[Kernel]]:
    """Takes the steps; returns the throughput before profiling, and the profiled kernels."""
    cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    _annotate_optimizer(trainer.state.optimizer)
    # Each row is one step behind: the next step is already running when it is yielded.
    rows = trainer.run_steps()
    row = [next(rows) for _ in range(warmup_steps)][-1]
    record = torch.profiler.profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    )
    with _record_triton(), record as profiler:
        for taken in range(1 + steps):
            next(rows)
            # Synchronize only at both ends: the trace has whole steps, and the steps in between
            # still overlap.
            if cuda and taken in (0, steps):
                torch.cuda.synchronize(trainer.device)
            profiler.step()
    rows.close()  # type: ignore[attr-defined]
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        kernels = read_kernels(json.load(file))
    name = train.device_name(trainer.device)
    # `span` is set only for CPU operators: with CUDA it means that the trace has no device events.
    if not kernels or (cuda and kernels[0].span is not None):
        raise PlanError(
            f"The profiler recorded no kernel of {name}. It needs the driver's permission, and no "
            "other profiler may run. Stop the other profiler, or use --train.device cpu."
        )
    what = train.describe_run(trainer.run, trainer.state.parallel, trainer.device)
    return Throughput(
        what, name, row["step_seconds"], row[f"{trainer.meter.unit}_per_second"], row["mfu"]
    ), kernels


def _annotate_optimizer(optimizer: Optimizer) -> None:
    """Marks the optimizer step in the trace."""
    update = optimizer.step

    def marked(*arguments: Any, **options: Any) -> Any:
        with record_function(OPTIMIZER_SCOPE):
            return update(*arguments, **options)

    optimizer.step = marked  # type: ignore[method-assign]


@contextmanager
def _record_triton() -> Iterator[None]:
    """Makes the trace show Triton functions with the shapes of their tensors, as for aten.

    Functions that torch compiles record themselves.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    function: Any = importlib.import_module("triton.runtime.jit").JITFunction
    launch_one = function.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        with torch._C._profiler._RecordFunctionFast(f"{TRITON_PREFIX}{self.fn.__name__}", tensors):
            return launch_one(self, *arguments, **options)

    function.run = run
    try:
        yield
    finally:
        function.run = launch_one
