"""Compares Llama-shaped models on one GPU: Ranvier and other trainers, in one process, alternating.

Every contestant trains the same shape on the same random tokens with AdamW, with weights in fp32
and matmuls in bf16. For each peer the windows alternate: each variant of Ranvier, the peer,
Ranvier, the peer. A ratio comes only from the windows of that peer, so that drifting clocks cancel.
If two contestants do not fit into memory together, each is rebuilt for its window.

    python benchmarks/one_gpu.py --sizes 1.5b --batch 4 --json one_gpu.json
    python benchmarks/one_gpu.py --variant plain: --variant full:plan.recompute=full
    python benchmarks/one_gpu.py --smoke

Peers are searched among the installed packages and in the directory peers/ (unpacked wheels). In
the table, MFU counts 6·(N - embedding) + 6·L·D·S FLOPs per token (full: 12·L·D·S); ceiling is the
share of the step that its matmuls would take alone; the last columns are the speed of Ranvier
relative to a peer. Before its first window a contestant is compared with a plain twin in fp32
(`right_step.py`); there is no ratio with one that has not passed. The column loss is that of the
first batch after three updates from the same weights.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import (
    NEED_GPU,
    PACKAGES,
    PEERS,
    RATE,
    Contestant,
    Ours,
    Shape,
    Task,
    first_line,
    missing,
    peer_rule,
    rule_of_run,
    run_of,
)
from right_step import Check, Limits, Reference, UpdateRule, check_step, float8_limits
from rows import append_rows, checked_cell, data_columns, package_hash
from torch import Tensor

from ranvier.config.sections import suggest_nearest
from ranvier.errors import PlanError, RanvierError
from ranvier.train.metrics import DeviceEvent, peak_flops

SIZES: dict[str, tuple[Shape, tuple[int, ...]]] = {
    "0.5b": (Shape.of(24, 1024, 16, 4096, tie_embeddings=True), (16,)),
    "1.5b": (Shape.of(16, 2048, 32, 8192), (4, 8)),
    "3b": (Shape.of(28, 3072, 24, 8192), (4,)),
    "8b": (Shape.of(32, 4096, 32, 14336), (1,)),
}
"""Shapes, and sequences per step."""
TOY = {
    "toy": (Shape.of(2, 64, 4, 256, kv_heads=2, vocab=512, max_seq=64), (2,)),
    "toy-tied": (
        Shape.of(2, 64, 4, 256, kv_heads=2, vocab=512, max_seq=64, tie_embeddings=True),
        (2,),
    ),
}
"""A shape that a CPU trains quickly."""
TOY_RATE = 3e-3
"""Learning rate that moves the loss of a toy shape in three updates."""
GIB = 2**30


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", help=f"comma-separated list of {', '.join(SIZES)} (default: all)")
    add("--batch", help="sequences per step, comma-separated (default: as the size has)")
    add("--peers", help=f"comma-separated list of {', '.join(PEERS)}, or none (default: all)")
    add(
        "--ours",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of every variant of Ranvier, e.g. plan.recompute=full; may be repeated",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,KEY=VALUE",
        help="a variant of Ranvier with its settings; may be repeated (default: ranvier, without)",
    )
    add("--windows", type=int, default=3, help="windows of each contestant against each peer")
    add("--steps", type=int, default=6, help="steps per window")
    add("--warm", type=int, default=3, help="steps before the first window, which also compile")
    add("--clip", action="store_true", help="peers also clip the gradient norm, as Ranvier does")
    add("--json", type=Path, metavar="FILE", help="file to write, updated after each peer")
    add("--csv", type=Path, metavar="FILE", help="file to append rows to, as one_gpu_peers.csv")
    add("--smoke", action="store_true", help="a small model on the CPU in fp32, as a check")
    return parser.parse_args()


# ---- windows ----------------------------------------------------------------------------


@dataclass(eq=False)
class Seat:
    """The place of a contestant, which can be built and freed."""

    name: str
    make: Callable[[], Contestant]
    rule: UpdateRule
    settings: Mapping[str, str] | None = None
    """Settings of a variant of Ranvier; peers have none."""
    live: Contestant | None = None
    cold: bool = True
    """Whether warm-up steps are needed before any step is timed."""
    held: int = 0
    """Bytes that it holds between steps."""
    failed: str = ""
    check: Check | None = None
    """Whether its step is right; None before its first window."""
    built: list[float] = field(default_factory=list)
    """Seconds of building and warming up, each time."""
    windows: list[dict[str, Any]] = field(default_factory=list)

    def leave(self) -> None:
        """Frees the contestant and its memory."""
        if self.live is not None:
            self.live.close()
        self.live, self.cold, self.held = None, True, 0
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def computes_in_float8(self) -> bool:
        """Whether some of its matrix products are in float8."""
        kind = (self.settings or {}).get("train.float8", "off")
        return kind != "off" or "float8" in self.name

    def against(self, peer: str) -> list[float]:
        """Returns the milliseconds per step in the windows interleaved with a peer."""
        return [window["ms"] for window in self.windows if window["against"] == peer]


@dataclass
class Arena:
    """A task and its contestants."""

    task: Task
    asked: argparse.Namespace
    ours: list[Seat]
    peers: list[Seat]
    reference: Reference
    """The twin, which all contestants are compared with."""
    alone: bool = False
    """Whether contestants do not fit into memory together."""
    limits: dict[str, Limits] = field(default_factory=dict)
    """Limits of the difference to the twin, by contestant."""

    def play(self, after: Callable[[], None]) -> None:
        """Runs all rounds; `after` is called after each one."""
        # First, while no contestant holds memory.
        for seat in (*self.ours, *self.peers):
            try:
                self.reference.record(seat.rule)
                if seat.computes_in_float8:
                    self.limits[seat.name], words = float8_limits(self.reference, seat.rule)
                    print(f"  {seat.name}: {words}", flush=True)
            except torch.OutOfMemoryError:
                seat.check = Check(seat.name, "", ("not checked: the twin does not fit",))
                print(f"  {seat.check}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        for peer in self.peers:
            if not self.alone:
                self.attempt(peer, self.ready)
            if not peer.failed:
                self.round([*self.ours, peer], peer.name)
            peer.leave()
            torch._dynamo.reset()  # ours compile again too, in steps that are not timed
            gc.collect()
            for seat in self.ours:
                seat.cold = True
            after()
        if not any(seat.windows for seat in self.ours):
            self.round(self.ours, "")
            after()
        for seat in self.ours:
            seat.leave()
        torch._dynamo.reset()
        gc.collect()

    def round(self, seats: Sequence[Seat], peer: str) -> None:
        """Runs the windows of Ranvier and a peer, alternating."""
        for _ in range(self.asked.windows):
            for seat in seats:
                if not seat.failed:
                    self.attempt(seat, partial(self.window, peer=peer))
            if seats[-1].failed:
                break

    def attempt(self, seat: Seat, action: Callable[[Seat], None]) -> None:
        """Does something with a contestant; retries without the others if out of memory."""
        others = [one for one in (*self.ours, *self.peers) if one is not seat]
        for again in (False, True):
            for other in others:
                if self.alone and other.live is not None:
                    other.leave()
            if self.alone and seat.live is None and self.allocated() > GIB:
                torch._dynamo.reset()  # what was compiled keeps weights of those who left
                gc.collect()
            short, reason = False, ""
            try:
                action(seat)
            except Exception as error:
                reason, short = first_line(error), out_of_memory(error)
            if not reason:
                return
            seat.leave()  # only now: the error kept the frames, and they the tensors
            if not short or again or not any(other.live for other in others):
                seat.failed = reason
                print(f"  {seat.name:24} failed: {reason}", flush=True)
                return
            print(f"  {seat.name:24} does not fit with others; from here on each alone", flush=True)
            self.alone = True

    def ready(self, seat: Seat) -> None:
        """Builds and warms up a contestant."""
        if seat.live is not None and not seat.cold:
            return
        torch.manual_seed(0)
        start = time.perf_counter()
        seat.live = seat.live or seat.make()
        expected = self.task.shape.parameters
        if seat.live.parameters != expected:
            raise ValueError(f"it has {seat.live.parameters:,} parameters, not {expected:,}")
        if seat.check is None:
            limits = self.limits.get(seat.name)
            seat.check = check_step(seat.name, seat.live, self.reference, limits)
            print(f"  {seat.check}", flush=True)
        for i in range(self.asked.warm):
            seat.live.step(i)
        self.wait()
        seat.cold = False
        seat.built.append(time.perf_counter() - start)
        seat.held = self.allocated() - self.beside(seat)

    def window(self, seat: Seat, *, peer: str) -> None:
        """Times some steps of a contestant."""
        self.ready(seat)
        assert seat.live is not None, seat.name
        cuda, device, beside = self.task.cuda, self.task.device, self.beside(seat)
        if cuda:
            torch.cuda.empty_cache()  # blocks that the one before has cut
        seat.live.step(0)  # and this step takes new ones
        self.wait()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = DeviceEvent(device)
        for i in range(self.asked.steps):
            seat.live.step(i)
        end = DeviceEvent(device)
        end.synchronize()
        peak = torch.cuda.max_memory_allocated() - beside if cuda else 0
        seat.held = self.allocated() - beside
        last_loss = float(seat.live.loss) if seat.live.loss is not None else None
        ms = end.seconds_since(begin) / self.asked.steps * 1e3
        seat.windows.append({"against": peer, "ms": ms, "memory": peak, "loss": last_loss})
        rate = self.task.batch * self.task.shape.max_seq / ms * 1e3
        print(
            f"  {seat.name:24} {ms:9.2f} ms  {rate:9,.0f} tok/s  against {peer or '-'}", flush=True
        )

    def beside(self, seat: Seat) -> int:
        """Returns the bytes that the other contestants hold."""
        return sum(one.held for one in (*self.ours, *self.peers) if one is not seat)

    def allocated(self) -> int:
        """Returns the bytes in use now."""
        return torch.cuda.memory_allocated() if self.task.cuda else 0

    def wait(self) -> None:
        """Waits until the device has finished."""
        if self.task.cuda:
            torch.cuda.synchronize()


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means out of memory, in the words of any library."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def ceiling(task: Task) -> float:
    """Returns the FLOPs per second of the matmuls of a step, run by torch.mm alone.

    Each kind of matrix runs forward, for the gradient of its input and for its own gradient; the
    rate is their work divided by their time, weighted by how often a step has each.
    """
    tokens, work, seconds = task.batch * task.shape.max_seq, 0.0, 0.0
    dtype = torch.bfloat16 if task.cuda else torch.float32
    for k, n, count in task.shape.matmuls.values():
        x, weight, grad = (
            torch.randn(size, device=task.device, dtype=dtype)
            for size in ((tokens, k), (n, k), (tokens, n))
        )
        products = ((x, weight.t()), (grad, weight), (grad.t(), x))
        seconds += count * sum(_seconds(a, b, task.device) for a, b in products)
        work += count * 6.0 * tokens * k * n
        del x, weight, grad, products
    return work / seconds


def _seconds(a: Tensor, b: Tensor, device: torch.device) -> float:
    """Returns the seconds of a matmul: the median of several runs."""
    out = torch.mm(a, b)
    for _ in range(3):
        torch.mm(a, b, out=out)
    times = []
    for _ in range(3):
        begin = DeviceEvent(device)
        for _ in range(5):
            torch.mm(a, b, out=out)
        end = DeviceEvent(device)
        end.synchronize()
        times.append(end.seconds_since(begin) / 5)
    return statistics.median(times)


# ---- results ----------------------------------------------------------------------------


def summary(arena: Arena, rate: float) -> dict[str, Any]:
    """Returns all numbers of a size and batch."""
    task, shape = arena.task, arena.task.shape
    tokens, peak = task.batch * shape.max_seq, peak_flops(task.device, torch.bfloat16)
    matmuls = sum(6.0 * tokens * k * n * count for k, n, count in shape.matmuls.values())
    rows = []
    for seat in (*arena.ours, *arena.peers):
        row: dict[str, Any] = {"name": seat.name, "settings": seat.settings, "failed": seat.failed}
        row |= {"windows": seat.windows, "build_seconds": seat.built}
        if seat.windows and not seat.failed:
            seconds = statistics.median(window["ms"] for window in seat.windows) / 1e3
            row |= {"ms": seconds * 1e3, "tokens_per_second": tokens / seconds}
            row["mfu"], row["mfu_full"] = (
                None if peak is None else shape.flops(full=full) * tokens / seconds / peak
                for full in (False, True)
            )
            row["memory"] = max(window["memory"] for window in seat.windows)
            assert seat.check is not None, seat.name
            row["loss"] = seat.check.loss
            row["checked"] = seat.check.passed
            row["check"] = str(seat.check)
            row["of_ceiling"] = matmuls / rate / seconds
        rows.append(row)
    ratios = {
        peer.name: {seat.name: ratio(seat, peer) for seat in arena.ours} for peer in arena.peers
    }
    return {
        "batch": task.batch,
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "ceiling_tflops": rate / 1e12,
        "alone": arena.alone,
        "contestants": rows,
        "ratios": ratios,
    }


def ratio(ours: Seat, peer: Seat) -> float | None:
    """Returns the speed of Ranvier relative to a peer: the median over neighboring windows."""
    ratios = window_ratios(ours, peer)
    return statistics.median(ratios) if ratios else None


def window_ratios(ours: Seat, peer: Seat) -> list[float]:
    """Returns the ratio of each pair of windows; none if a step is wrong."""
    if ours.failed or peer.failed or not checked_cell(ours.check, peer.check):
        return []
    pairs = zip(ours.against(peer.name), peer.against(peer.name), strict=False)
    return [peer_ms / own_ms for own_ms, peer_ms in pairs]


CSV_NAMES = {
    "titan": "torchtitan bf16",
    "titan-fsdp": "torchtitan bf16, FSDP2",
    "titan-float8": "torchtitan float8",
    "titan-float8-fsdp": "torchtitan float8, FSDP2",
    "litgpt": "litgpt compiled",
    "liger": "transformers with Liger",
    "hf": "transformers compiled",
}
"""Names of the peers in one_gpu_peers.csv."""


def csv_rows(arena: Arena, size: str, label: str) -> list[dict[str, Any]]:
    """Returns the rows of one_gpu_peers.csv. label: which rows can be compared."""
    task, rows = arena.task, list[dict[str, Any]]()
    against = [(seat, peer) for peer in arena.peers for seat in arena.ours]
    for seat, peer in (*against, *((peer, peer) for peer in arena.peers)):
        milliseconds = seat.against(peer.name)
        if not milliseconds or seat.failed:
            continue
        seconds = statistics.median(milliseconds) / 1e3
        rate = task.batch * task.shape.max_seq / seconds
        peak = peak_flops(task.device, torch.bfloat16)
        dtype = "float8" if seat.computes_in_float8 else "bf16"
        row: dict[str, Any] = {
            "measurement": label,
            "contestant": f"ranvier {dtype}" if seat is not peer else CSV_NAMES[seat.name],
            "size": size,
            "batch": task.batch,
            "ms_per_step": f"{seconds * 1e3:.1f}",
            "tokens_per_second": f"{rate:.0f}",
            "memory_gib": f"{max(window['memory'] for window in seat.windows) / GIB:.1f}",
            "checked": checked_cell(seat.check, peer.check),
            "note": " ".join(f"{key}={value}" for key, value in (seat.settings or {}).items()),
            "source": package_hash(),
        }
        if peak is not None:
            row["mfu_causal_percent"] = f"{100 * task.shape.flops(full=False) * rate / peak:.1f}"
            row["mfu_full_percent"] = f"{100 * task.shape.flops(full=True) * rate / peak:.1f}"
        if seat is not peer and (ratios := window_ratios(seat, peer)):
            row["peer"] = CSV_NAMES[peer.name].removesuffix(" bf16")
            row["speedup"] = f"{statistics.median(ratios):.3f}"
            row["speedup_low"], row["speedup_high"] = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
        rows.append(row)
    return rows


def table(result: Mapping[str, Any]) -> str:
    """Formats the numbers of a size and batch."""
    ours = [row["name"] for row in result["contestants"] if row["settings"] is not None]
    head = ["", "tok/s", "ms", "MFU", "full", "ceiling", "GiB", "loss", "build s"]
    lines = [[*head, *(f"{name} is" for name in ours)]]
    notes = []
    for row in result["contestants"]:
        if "ms" not in row:
            notes.append(f"{row['name']} failed: {row['failed'] or 'it did not run'}")
            lines.append([row["name"], "failed", *[""] * (len(head) - 2 + len(ours))])
            continue
        if not row["checked"]:
            notes.append(f"no ratio with {row['check']}")
        ratios = result["ratios"].get(row["name"], {})
        lines.append(
            [
                row["name"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ms']:.2f}",
                *("-" if row[m] is None else f"{row[m]:.1%}" for m in ("mfu", "mfu_full")),
                f"{row['of_ceiling']:.1%}",
                f"{row['memory'] / GIB:.1f}" if row["memory"] else "-",
                "-" if row["loss"] is None else f"{row['loss']:.3f}",
                f"{row['build_seconds'][0]:.0f}",
                *(f"{ratios[n]:.3f}x" if ratios.get(n) else "" for n in ours),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(both))
        for both in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([*(line.rstrip() for line in text), *notes])


def versions() -> dict[str, str | None]:
    """Returns the versions of all packages."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ranvier", "triton", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "torch": torch.__version__, "cuda": torch.version.cuda}


# ---- main -------------------------------------------------------------------------------


def chosen(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """Returns the names in a comma-separated list."""
    names = list(known) if text is None else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            near = suggest_nearest(name, known)
            raise PlanError(f"{name!r} is not a known {what}.{near} Use one of {', '.join(known)}.")
    return names


def pairs_of(texts: Sequence[str]) -> dict[str, str]:
    """Returns the settings from KEY=VALUE."""
    for text in texts:
        if "=" not in text:
            raise PlanError(f"{text!r} has no value. A setting is KEY=VALUE. Add a value.")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def variants(asked: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Returns the settings of each variant of Ranvier by its name."""
    found = {}
    for text in asked.variant or ["ranvier:"]:
        name, colon, rest = text.partition(":")
        if not colon or not name or name in PEERS or name in found:
            raise PlanError(
                f"--variant {text!r} has no unique name. Write NAME:KEY=VALUE,KEY=VALUE, or NAME: "
                "for one without settings."
            )
        parts = re.split(r",(?=[\w.]+=)", rest) if rest else []  # commas of lists stay
        found[name] = {**pairs_of(asked.ours), **pairs_of(parts)}
    return found


def batches_of(asked: argparse.Namespace, usual: Sequence[int]) -> list[int]:
    """Returns the sequences per step."""
    words = asked.batch.split(",") if asked.batch else [str(size) for size in usual]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise PlanError(f"--batch {asked.batch!r} is not a list of numbers above 0. Use 4 or 4,8.")
    return [int(word) for word in words]


def compare(asked: argparse.Namespace) -> None:
    """Runs all selected sizes and batches."""
    if not asked.smoke and not torch.cuda.is_available():
        raise PlanError("torch sees no CUDA device. The benchmark needs one. Use --smoke here.")
    if min(asked.windows, asked.steps, asked.warm) < 1:
        raise PlanError("--windows, --steps and --warm are at least 1. Use 3, 6 and 3.")
    device = torch.device("cpu") if asked.smoke else torch.device("cuda", 0)
    if asked.smoke:
        asked.windows, asked.steps, asked.warm = 1, 1, 1
        torch.set_num_threads(1)
    sizes = TOY if asked.smoke else SIZES
    usual = "toy" if asked.smoke else None
    known, ours = chosen(asked.sizes or usual, list(sizes), "size"), variants(asked)
    wanted = [] if asked.peers == "none" else chosen(asked.peers, list(PEERS), "peer")
    for name in wanted if asked.smoke else ():
        if name in NEED_GPU:
            print(f"{name} is skipped: it needs a GPU")
    wanted = [name for name in wanted if not (asked.smoke and name in NEED_GPU)]
    plan = [(size, batch) for size in known for batch in batches_of(asked, sizes[size][1])]
    for size, batch in plan:  # errors are reported before any work
        for changes in ours.values():
            run_of(sizes[size][0], batch, changes, device.type)
    reasons = {name: missing(name) for name in wanted}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} cannot be imported: {reason}")
    there = [name for name in wanted if not reasons[name]]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    facts: dict[str, Any] = {
        "command": sys.argv,
        "device": kind,
        "versions": versions(),
        "missing": {name: reason for name, reason in reasons.items() if reason},
        "results": [],
    }
    print(f"{kind}, " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v))
    torch.set_float32_matmul_precision("high")  # of all
    for size, batch in plan:
        rate = TOY_RATE if asked.smoke else RATE
        task = Task.of(sizes[size][0], batch, device, clip=asked.clip, lr=rate)
        play(size, task, asked, ours, there, facts)


def play(
    size: str,
    task: Task,
    asked: argparse.Namespace,
    ours: Mapping[str, Mapping[str, str]],
    peers: Sequence[str],
    facts: dict[str, Any],
) -> None:
    """Runs one size and batch: its windows, its table and its part of the file."""
    shape, rate = task.shape, ceiling(task)
    print(
        f"\n{size}: {shape.parameters / 1e9:.3f}B parameters, {task.batch} x "
        f"{shape.max_seq} tokens, matmuls alone {rate / 1e12:.4g} TFLOP/s",
        flush=True,
    )
    rules = {
        name: rule_of_run(run_of(shape, task.batch, changes, task.device.type), task.lr)
        for name, changes in ours.items()
    }
    arena = Arena(
        task,
        asked,
        [Seat(name, partial(Ours, task, one), rules[name], one) for name, one in ours.items()],
        [Seat(name, partial(PEERS[name][1], task), peer_rule(task)) for name in peers],
        task.reference(),
    )
    before = list(facts["results"])

    def after() -> None:
        facts["results"] = [*before, {"size": size, **summary(arena, rate)}]
        if asked.json is not None:
            asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    arena.play(after)
    print(table(summary(arena, rate)), flush=True)
    if asked.csv is not None:
        label = time.strftime("%Y-%m-%d %H:%M")
        append_rows(asked.csv, data_columns("one_gpu_peers.csv"), csv_rows(arena, size, label))


def main() -> int:
    """Compares; prints user errors without a traceback."""
    try:
        compare(settings())
    except RanvierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
