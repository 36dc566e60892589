"""Profile: where the time of a step goes, kernel by kernel, and which limit each one meets.

The run is put together on one rank and takes a few steps on its own data; torch's profiler records
the last of them. From the trace on everything is a pure function of a list of kernels. A kernel is
held against two peaks of the device (a roofline):

    least time = max(FLOPs / peak FLOP/s, bytes / peak bytes/s)

Compute or memory bounds it, whichever term is larger; neither, if it takes more than four times as
long. What a trace does not tell is printed as "-". Not handled: several ranks (see `train.trace`).
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
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import Ranks, keep_compiled
from ranvier.system.terminal import print
from ranvier.tools.profiler.chrome_trace import (
    EIGHTHS,
    GROUPS,
    HALVES,
    OPTIMIZER,
    TRITON,
    Kernel,
    read,
    short,
)
from ranvier.train import build_model, prepare_data, train
from ranvier.train.cuda_graph import WARM
from ranvier.train.metrics import peak_bandwidth, peak_flops
from ranvier.train.resume import run_directory as folders
from ranvier.train.trainer import Trainer

NEAR = 0.25
"""Share of a peak from which on it is what bounds a kernel."""
EIGHT_BITS = ("H100", "H200", "B200", "MI300")
"""Devices that multiply 8-bit matrices twice as fast as 16-bit ones, by their data sheets."""


@dataclass(frozen=True)
class Peaks:
    """What a device can do in a second; None where that is not known."""

    flops: float | None = None
    """Of products of 16-bit matrices."""
    bytes: float | None = None
    eighths: float | None = None
    """FLOP/s of products of 8-bit matrices."""

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Peaks:
        """Those of a device, where its name is known."""
        flops, name = peak_flops(device, dtype), train.device_name(device)
        twice = flops is not None and any(word in name for word in EIGHT_BITS)
        return cls(flops, peak_bandwidth(device), 2.0 * flops if flops and twice else None)

    def products(self, kernels: Sequence[Kernel]) -> float | None:
        """The peak of the types that all of these kernels multiply."""
        for peak, kinds in ((self.eighths, EIGHTHS), (self.flops, HALVES)):
            if all(any(kind in kinds for kind in kernel.types) for kernel in kernels):
                return peak
        return None


@dataclass(frozen=True)
class Row:
    """All launches of a kernel by an operator; numbers are of one step."""

    name: str
    op: str
    group: str
    calls: float
    ms: float
    share: float
    """Of the step."""
    flops: float | None
    bytes: float | None
    flops_share: float | None
    """Of the peak, while it runs."""
    bytes_share: float | None
    bound: str
    """compute, memory, neither; empty if it is not known."""
    least_ms: float | None
    """What it would take at the peaks."""


@dataclass(frozen=True)
class Gap:
    """A time without kernels, and the kernels around it."""

    ms: float
    before: str
    after: str


@dataclass(frozen=True)
class Report:
    """Where the time of a step went; times in milliseconds a step."""

    steps: int
    step_ms: float
    """From the first kernel to the last, by the number of steps."""
    busy_ms: float
    """With at least one kernel running."""
    idle_ms: float
    gaps: float
    """Gaps a step."""
    longest: list[Gap]
    groups: dict[str, float]
    rows: list[Row]
    """The longest first."""


@dataclass(frozen=True)
class Pace:
    """Steps as they were before the profiler was on."""

    what: str
    device: str
    seconds: float
    tokens: float
    """A second."""
    mfu: float | None


# ---- the report: pure functions of kernels --------------------------------------------------


def summary(kernels: Sequence[Kernel], *, steps: int, peaks: Peaks) -> Report:
    """Sums by group and by kernel, and the gaps between kernels of any stream."""
    assert kernels and steps > 0, (len(kernels), steps)
    unit = 1e3 * steps  # microseconds of all steps to milliseconds of one
    first, last = min(k.start for k in kernels), max(k.end for k in kernels)
    between = list(gaps(kernels))
    step_ms, idle = (last - first) / unit, sum(gap.ms for gap in between) / steps
    groups = dict.fromkeys(GROUPS, 0.0)
    same: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.group] += kernel.duration / unit
        same[short(kernel.name), kernel.op, kernel.group].append(kernel)
    rows = [_row(key, some, steps, step_ms, peaks) for key, some in same.items()]
    return Report(
        steps,
        step_ms,
        step_ms - idle,
        idle,
        len(between) / steps,
        sorted(between, key=lambda gap: -gap.ms)[:3],
        groups,
        sorted(rows, key=lambda row: -row.ms),
    )


def gaps(kernels: Sequence[Kernel]) -> Iterator[Gap]:
    """The times in which no stream ran anything."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    latest = ordered[0]
    for kernel in ordered[1:]:
        if kernel.start > latest.end:
            length = (kernel.start - latest.end) / 1e3
            yield Gap(length, short(latest.name), short(kernel.name))
        latest = max(latest, kernel, key=lambda one: one.end)


def _row(
    key: tuple[str, str, str], kernels: Sequence[Kernel], steps: int, step_ms: float, peaks: Peaks
) -> Row:
    """One line of the table; a sum is known if every term is."""
    ms = sum(kernel.duration for kernel in kernels) / 1e3 / steps
    work = [kernel.flops for kernel in kernels if kernel.flops is not None]
    size = [kernel.bytes for kernel in kernels if kernel.bytes is not None]
    flops = sum(work) / steps if len(work) == len(kernels) else None
    moved = sum(size) / steps if len(size) == len(kernels) else None
    local = all(kernel.local for kernel in kernels)
    least_flops = _least_ms(flops, peaks.products(kernels))
    least_bytes = _least_ms(moved, peaks.bytes if local else None)
    bound, least = roof(ms, least_flops, least_bytes, products=key[2] in ("matmul", "attention"))
    return Row(
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
    return None if amount is None or peak is None else amount / peak * 1e3


def roof(
    ms: float, flops_ms: float | None, bytes_ms: float | None, *, products: bool
) -> tuple[str, float | None]:
    """What bounds a kernel, and its least time; products need their FLOPs for it to be known."""
    if (products and flops_ms is None) or (flops_ms is None and bytes_ms is None):
        return "", None
    least = max(flops_ms or 0.0, bytes_ms or 0.0)
    if least < NEAR * ms:
        return "neither", least
    return "compute" if (flops_ms or 0.0) >= (bytes_ms or 0.0) else "memory", least


# ---- the report as text ---------------------------------------------------------------------


def text(report: Report, pace: Pace, *, top: int) -> str:
    """The report for people."""
    cpu = pace.device == "CPU"
    who = "operators ran" if cpu else "the device computed"
    mfu = "" if pace.mfu is None else f", MFU {pace.mfu:.1%}"
    parts = [
        pace.what,
        f"step {1e3 * pace.seconds:,.2f} ms, {pace.tokens:,.0f} tokens/s{mfu}; under the profiler "
        f"{report.step_ms:,.2f} ms, in which {who} {_share(report.busy_ms, report)} of the time",
        f"idle {report.idle_ms:,.2f} ms a step ({_share(report.idle_ms, report)}) in "
        f"{report.gaps:,.0f} gaps" + ("; the longest:" if report.longest else ""),
        *(f"  {gap.ms:,.3f} ms from {gap.before} to {gap.after}" for gap in report.longest),
        "",
        *_groups(report),
        "",
        *_kernels(report, top, cpu=cpu),
        "",
        *textwrap.wrap(verdict(report), 100),
    ]
    return "\n".join(parts) + "\n"


def _share(ms: float, report: Report) -> str:
    return f"{ms / report.step_ms:.1%}" if report.step_ms else "-"


def _groups(report: Report) -> list[str]:
    """The table of groups; kernels at the same time count twice."""
    ordered = sorted(report.groups.items(), key=lambda item: -item[1])
    lines = [("group", "ms/step", "share")]
    lines += [(name, f"{ms:,.3f}", _share(ms, report)) for name, ms in ordered if ms > 0.0]
    return columns([*lines, ("idle", f"{report.idle_ms:,.3f}", _share(report.idle_ms, report))], 1)


def _kernels(report: Report, top: int, *, cpu: bool) -> list[str]:
    """The table of the longest kernels; on a CPU a kernel is its operator."""
    words = ("operator", "group") if cpu else ("kernel", "launched by", "group")
    numbers = ("calls", "ms/step", "share", "TFLOP/s", "peak", "MB", "GB/s", "peak", "bound")
    lines = [(*words, *numbers)]
    for row in report.rows[:top]:
        names = (_cut(row.name, 44), _cut(row.op.removeprefix("aten::") or "-", 24), row.group)
        values = (
            f"{row.calls:,.4g}",
            f"{row.ms:,.3f}",
            f"{row.share:.1%}",
            _number(row.flops, 1e9 * row.ms),
            _percent(row.flops_share),
            _number(row.bytes, 1e6),
            _number(row.bytes, 1e6 * row.ms),
            _percent(row.bytes_share),
            row.bound or "-",
        )
        lines.append((*(names[::2] if cpu else names), *values))
    if len(report.rows) > top:
        rest = sum(row.ms for row in report.rows[top:])
        blank = ("",) * (len(words) - 1)
        more = f"and {len(report.rows) - top} more"
        lines.append((more, *blank, "", f"{rest:,.3f}", _share(rest, report), *("",) * 6))
    return columns(lines, len(words))


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 2]}.."


def _number(amount: float | None, unit: float) -> str:
    return "-" if amount is None or unit == 0.0 else f"{amount / unit:,.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def columns(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table; the first `left` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


BOUNDS = {
    "compute": "Matrix products near their peak bound the step.",
    "memory": "The device's memory bounds the step.",
    "neither": "Kernels far from both peaks take most of the step: they are too small, or do not "
    "suit their shapes.",
    "communication": "Communication bounds the step.",
    "idle": "The host bounds the step: the device waits for it. Fewer and larger kernels help, "
    "such as a larger micro-batch.",
    "": "What bounds most of the step is not known.",
}


def bounds(report: Report) -> dict[str, float]:
    """Milliseconds of a step by what bounds them."""
    parts = dict.fromkeys(BOUNDS, 0.0)
    for row in report.rows:
        parts["communication" if row.group == "communication" else row.bound] += row.ms
    return {**parts, "idle": report.idle_ms}


def savings(report: Report) -> list[tuple[float, str]]:
    """Milliseconds that a step would save at best, and how, the most first."""
    found = [(report.idle_ms, f"the idle time, {report.idle_ms:,.2f} ms a step")]
    for row in report.rows:
        if row.least_ms is not None:
            compute, memory = row.flops_share or 0.0, row.bytes_share or 0.0
            peak = "the peak FLOP/s" if compute >= memory else "the peak of the memory"
            how = f"{row.name} ({row.group}), which takes {row.ms:,.2f} ms a step at "
            how += (
                f"{max(compute, memory):.0%} of {peak}; there it would take {row.least_ms:,.2f} ms"
            )
            found.append((row.ms - row.least_ms, how))
    return sorted(found, key=lambda item: -item[0])


def verdict(report: Report) -> str:
    """In words: what bounds the step, and where the most can be saved."""
    group, ms = max(report.groups.items(), key=lambda item: item[1])
    row = report.rows[0]
    largest = (
        f"The largest group is {group} with {_share(ms, report)} of the step, the longest kernel "
        f"{row.name} with {row.share:.1%}."
    )
    parts = bounds(report)
    if not any(parts[name] for name in ("compute", "memory", "neither")):
        return f"The peaks of this device or the work of its kernels are not known. {largest}"
    shares = ", ".join(
        f"{_share(ms, report)} {name or 'not known'}"
        for name, ms in sorted(parts.items(), key=lambda item: -item[1])
        if ms > 0.0
    )
    _, saving = savings(report)[0]
    most = max(parts, key=lambda name: parts[name])
    return (
        f"{BOUNDS[most]} Of a step, by what bounds it: {shares}. {largest} The largest saving to "
        f"look at is {saving}."
    )


# ---- taking the steps -----------------------------------------------------------------------


def profile(run: Run, origin: Path, *, steps: int, warm: int, top: int, out: str) -> int:
    """Profile steps of a run on one rank, write and print the report; the exit code.

    origin: the directory of the run or its TOML file; nothing else in it is changed.
    """
    for name, value in (("steps", steps), ("warm", warm), ("top", top)):
        if not 1 <= value <= 1000:
            raise PlanError(f"{name}={value}. It is from 1 to 1000. Use {name}=10.")
    run = _alone(run, origin)
    warm = max(warm, WARM + 2) if run.plan.graph else warm  # so that a graph is what is seen
    device = train.device_of(run, Ranks())
    run = train.settled(run, device, train.backend_of(run, Ranks(), device))
    train.check_memory(run, Ranks(), device)
    where = origin / "profile" if origin.is_dir() else origin.with_name(f"{origin.stem}-profile")
    folder = _folder(Path(out) if out else where)
    keep_compiled()
    data = train.opened(run, prepare_data.stored(run))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = Grid.of(run.plan, rank=0, connected=False, timeout_seconds=run.train.timeout)
    more = replace(run.train, steps=max(warm + steps + 3, run.train.steps), evaluate=0, trace=False)
    only = replace(run, train=more, checkpoint=replace(run.checkpoint, every=-1))
    trainer = Trainer.assemble(only, grid, device, data)
    pace, kernels = _taken(trainer, folder / "trace.json.gz", steps=steps, warm=warm)
    peaks = Peaks.of(device, build_model.DTYPES[run.train.dtype])
    report = summary(kernels, steps=steps, peaks=peaks)
    page = text(report, pace, top=top)
    facts: dict[str, Any] = {"pace": asdict(pace), "peaks": asdict(peaks), "report": asdict(report)}
    folders.write(folder / "profile.json", json.dumps(facts | {"words": verdict(report)}, indent=1))
    folders.write(folder / "profile.txt", page)
    print(page, end="")
    print(f"\nWritten: {folder}/profile.txt, profile.json, trace.json.gz (open it in Perfetto)")
    return 0


def _alone(run: Run, origin: Path) -> Run:
    """The run checked for one rank."""
    me, plan = launch.ranks(), run.plan
    if me is not None and me.world > 1:
        raise PlanError(
            f"A launcher has started {me.world} ranks. profile takes one. Start it alone."
        )
    many = {axis: size for axis, size in plan.degrees.items() if size > 1}
    if not many:
        return run.check(1)
    readers = math.prod(many.get(axis, 1) for axis in ("data", "expert", "depth"))
    options = " ".join(f"--plan.{axis} 1" for axis in many)
    options += f" --plan.batch {max(plan.batch // readers, 1)}" if readers > 1 else ""
    raise PlanError(
        f"{origin} is a run on {' · '.join(f'{axis}={size}' for axis, size in many.items())}. "
        "profile takes one rank. Profile the work of one, without its communication, with "
        f"{options}; the communication of all is shown by: ranvier train --train.trace True."
    )


def _folder(folder: Path) -> Path:
    """The directory of the report, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"out={str(folder)!r} cannot be made: {error.strerror}. The report needs a directory "
            "that it can write in. Choose another with --out."
        ) from None
    if not launch.writable(folder):
        raise PlanError(f"out={str(folder)!r} cannot be written in. Choose another with --out.")
    return folder


def _taken(trainer: Trainer, path: Path, *, steps: int, warm: int) -> tuple[Pace, list[Kernel]]:
    """Take the steps; the pace of those before, and the kernels of the profiled ones."""
    cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    _mark(trainer)
    rows = trainer.steps()  # each row is one step behind; the next step is under way
    row = [next(rows) for _ in range(warm)][-1]
    record = torch.profiler.profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    )
    with _recorded(), record as profiler:
        for taken in range(1 + steps):
            next(rows)
            if cuda and taken in (0, steps):  # the trace holds whole steps; between them no wait
                torch.cuda.synchronize(trainer.device)
            profiler.step()
    rows.close()  # type: ignore[attr-defined]
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        kernels = read(json.load(file))
    name = train.device_name(trainer.device)
    if not kernels or (cuda and kernels[0].span is not None):
        raise PlanError(
            f"The profiler has seen no kernel of {name}. It needs the driver's permission, and "
            "that no other profiler runs. End that one, or profile with --train.device cpu."
        )
    what = train.describe(trainer)
    return Pace(what, name, row["seconds"], row["tokens_per_second"], row["mfu"]), kernels


def _mark(trainer: Trainer) -> None:
    """Have the trace say where the update of the weights begins and ends."""
    update = trainer.optimizer.step

    def marked(*arguments: Any, **options: Any) -> Any:
        with record_function(OPTIMIZER):
            return update(*arguments, **options)

    trainer.optimizer.step = marked  # type: ignore[method-assign]


@contextmanager
def _recorded() -> Iterator[None]:
    """Have the trace show functions in Triton with the shapes of their tensors, as it does aten's.

    Those that torch compiles show themselves.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    function: Any = importlib.import_module("triton.runtime.jit").JITFunction
    launch_one = function.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        with torch._C._profiler._RecordFunctionFast(f"{TRITON}{self.fn.__name__}", tensors):
            return launch_one(self, *arguments, **options)

    function.run = run
    try:
        yield
    finally:
        function.run = launch_one
