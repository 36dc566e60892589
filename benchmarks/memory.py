"""Compares predicted and measured memory on one GPU, and fits models into small devices.

    python benchmarks/memory.py --table                 twelve configurations, about three minutes
    python benchmarks/memory.py --table --only 8b       configurations whose name has this word
    python benchmarks/memory.py --fit                   four sizes, each with its own limit
    python benchmarks/memory.py --smoke                 the same code on the CPU

The trainer builds a configuration, predicts its memory in closed form, and takes three steps. The
verdict compares the peak bytes that torch has allocated in the last two steps with the prediction:
a ratio of 0.95 to 1.05 passes. On the CPU the storages of tensors are counted instead, during the
passes. A limit is emulated: torch refuses to allocate more than that share of the device. All
configurations run one after the other in this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu import SIZES, TOY
from peers import Shape, run_of

from ranvier.data.batch import Batch
from ranvier.errors import RanvierError
from ranvier.grid import Grid
from ranvier.launch import use_expandable_segments
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.train.memory import usage
from ranvier.train.memory.breakdown import MemoryTracker
from ranvier.train.memory.resolve import predict_memory
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer

GOOD = (0.95, 1.05)
"""Accepted range of measured / predicted."""
RATE = 1e-4


@dataclass(frozen=True)
class Config:
    """A size, sequences per step, and settings."""

    name: str
    size: str
    batch: int
    settings: Mapping[str, str] = field(default_factory=dict)


def config(size: str, batch: int, kind: str, how: str, **more: str) -> Config:
    """Returns a configuration with a recompute mode, eager or compiled, and further settings."""
    words = {name.replace("__", "."): text for name, text in more.items()}
    name = " ".join([size, f"b{batch}", kind, how, *(f"{k}={v}" for k, v in words.items())])
    compiled = "on" if how == "compiled" else "off"
    return Config(name, size, batch, {"plan.recompute": kind, "plan.compile": compiled, **words})


CONFIGS = [
    config("0.5b", 8, "none", "compiled"),
    config("0.5b", 16, "full", "eager", plan__micro_batch="4"),
    config("1.5b", 4, "none", "compiled"),
    config("1.5b", 8, "selective", "compiled", plan__micro_batch="4"),
    config("1.5b", 4, "full", "eager", memory__optimizer_states="host"),
    config(
        "1.5b",
        4,
        "none",
        "eager",
        memory__optimizer_states="split",
        memory__optimizer_states_on_device_gib="8",
    ),
    config("1.5b", 2, "selective", "eager", memory__optimizer_states="disk"),
    config("3b", 4, "full", "compiled"),
    config("3b", 2, "none", "compiled", memory__optimizer_states="host"),
    config("3b", 4, "full", "eager", memory__optimizer_states="host", memory__parameters="host"),
    config("8b", 1, "full", "eager"),
    config(
        "8b", 2, "selective", "eager", memory__optimizer_states="host", optim__state_dtype="bf16"
    ),
]
LIMITS = [("0.5b", 8, 4.0), ("1.5b", 8, 8.0), ("1.5b", 8, 24.0), ("8b", 8, 80.0)]
"""Size, sequences per step, GiB."""
SMOKE = [
    config("toy", 4, "none", "eager"),
    config("toy", 4, "selective", "eager", plan__micro_batch="2"),
    config("toy-tied", 4, "full", "eager", plan__micro_batch="1"),
]
SMOKE_LIMITS = [("toy", 4, 0.01), ("toy-tied", 4, 0.003)]


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--table", action="store_true", help="predicted and measured bytes of configurations")
    add("--fit", action="store_true", help="memory.auto=True with small limits")
    add("--only", default="", help="configurations whose name has this word")
    add("--ours", action="append", default=[], metavar="KEY=VALUE", help="a setting for all")
    add("--steps", type=int, default=3, help="steps of each; the first is not measured")
    add("--smoke", action="store_true", help="small models on the CPU, as a check")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser.parse_args()


class Bench:
    """A trainer on random tokens."""

    def __init__(self, shape: Shape, config: Config, device: torch.device) -> None:
        run = resolve_run(
            run_of(shape, config.batch, config.settings, device.type),
            ResolveContext(world_size=1, device=device),
        )
        nothing: Any = None  # steps are given their batches
        self.device = device
        self.trainer = Trainer.from_run(run, Grid({}), device, nothing)
        source = torch.Generator(device).manual_seed(0)
        size = (config.batch, shape.max_seq + 1)
        ids = torch.randint(0, shape.vocab, size, device=device, generator=source)
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        self.batches = batch.split_micro_batches(
            self.trainer.grid, self.trainer.run.plan.micro_batch
        )

    def predicted(self) -> MemoryTracker:
        """Returns the memory tracker of the trainer."""
        trainer = self.trainer
        if trainer.memory_tracker.fit_problem is None:
            trainer.memory_tracker = predict_memory(
                trainer.run, trainer.state.model, trainer.state.optimizer, self.device, 1
            )
        return trainer.memory_tracker

    def measured(self, steps: int) -> MemoryBreakdown:
        """Takes steps; returns the memory of all but the first."""
        trainer, account = self.trainer, self.trainer.memory_tracker
        if self.device.type == "cpu":
            return self._counted()
        for i in range(steps):
            if i == 1:
                torch.cuda.reset_peak_memory_stats(self.device)
            passes = (partial(account.track_gradients, trainer.state.model),) if i == 1 else ()
            trainer.take_step(self.batches, RATE, trainer.state.guard.step_limits, *passes)
            torch.cuda.synchronize(self.device)
        return account.measure_usage(trainer.state.optimizer, self.device)

    def _counted(self) -> MemoryBreakdown:
        """Counts on the CPU: storages created in the passes of a step, and resident ones."""
        trainer, queue = self.trainer, get_parallel_model(self.trainer.state.model).bucket_scheduler
        before = [[b.data for b in queue.buckets], [b.model_inputs() for b in self.batches]]
        with usage.HostMemoryCounter(before, partial(usage.live_gradients, queue)) as watch:
            passes = partial(forward_backward, trainer.state.model, self.batches)
            trainer.memory_tracker.track_gradients(trainer.state.model, passes)
        known = trainer.memory_tracker.measure_usage(trainer.state.optimizer, self.device)
        rest = watch.peak_bytes() - known.device["gradients"]
        queue.begin_step("")
        return MemoryBreakdown({**known.device, "activations": rest}, known.host)

    def close(self) -> None:
        """Frees all memory."""
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch._dynamo.reset()  # what was compiled keeps weights
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def shape_of(size: str) -> Shape:
    """Returns the shape of a named size."""
    return {**SIZES, **TOY}[size][0]


def tables(asked: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Predicts and measures each configuration."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for one in chosen(SMOKE if asked.smoke else CONFIGS, asked, folder):
            start, bench = time.perf_counter(), None
            row: dict[str, Any] = {"name": one.name}
            try:
                bench = Bench(shape_of(one.size), one, device)
                predicted = bench.predicted().predicted_usage
                assert predicted is not None, "the prediction itself did not fit"
                measured = bench.measured(asked.steps)
                row |= {"predicted": predicted.to_dict(), "measured": measured.to_dict()}
                row["ratio"] = measured.allocated_bytes / predicted.allocated_bytes
                print(f"\n{one.name} ({time.perf_counter() - start:.1f} s)")
                print(
                    *(f"  {line}" for line in breakdown.format_breakdown(predicted, measured)),
                    sep="\n",
                )
            except (RanvierError, RuntimeError, AssertionError) as error:
                row["failed"] = str(error).splitlines()[0][:200]
                print(f"\n{one.name} failed: {row['failed']}")
            if bench is not None:
                bench.close()
            found.append(row)
            sys.stdout.flush()
    return found


def chosen(configs: Sequence[Config], asked: argparse.Namespace, folder: str) -> list[Config]:
    """Returns the selected configurations, with the settings for all."""
    more = dict(text.split("=", 1) for text in asked.ours)
    found = []
    for one in configs:
        if asked.only in one.name:
            words = {"data.document_mask": "false", **one.settings, **more}
            if words.get("memory.optimizer_states") == "disk":
                words["memory.offload_dir"] = folder
            found.append(Config(one.name, one.size, one.batch, words))
    return found


def fits(asked: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Fits each size into its limit and takes steps."""
    found: list[dict[str, Any]] = []
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    for size, batch, limit in SMOKE_LIMITS if asked.smoke else LIMITS:
        name = f"{size} in {limit:g} GiB"
        words = {
            "memory.auto": "True",
            "memory.device_limit_gib": str(limit),
            "plan.compile": "off",
        }
        (one,) = chosen([Config(name, size, batch, words)], asked, "") or [None]
        if one is None:
            continue
        start, bench = time.perf_counter(), None
        row: dict[str, Any] = {"name": name}
        if total:
            torch.cuda.set_per_process_memory_fraction(limit * GIB / total, device)
        try:
            bench = Bench(shape_of(size), one, device)
            notes = bench.trainer.notes
            row["tries"] = 1 + sum("chosen again" in note for note in notes)
            predicted = bench.predicted().predicted_usage
            assert predicted is not None
            measured = bench.measured(asked.steps)
            row |= {
                "predicted": predicted.to_dict(),
                "measured": measured.to_dict(),
                "notes": notes,
            }
            row["ratio"] = measured.total_bytes / (limit * GIB)
            print(f"\n{name} ({time.perf_counter() - start:.1f} s), {row['tries']} tries")
            print(*(f"  {line}" for line in notes), sep="\n")
            print(
                *(f"  {line}" for line in breakdown.format_breakdown(predicted, measured)), sep="\n"
            )
            if total:  # on the CPU host and device are one
                print(f"  used {measured.total_bytes / GIB:.3g} of {limit:g} GiB")
        except (RanvierError, RuntimeError, AssertionError) as error:
            row["failed"] = str(error)
            print(f"\n{name} failed: {error}")
        if bench is not None:
            bench.close()
        found.append(row)
        sys.stdout.flush()
    if total:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return found


def main() -> int:
    """Runs the selected parts; returns 0 if all pass."""
    use_expandable_segments()
    asked = settings()
    device = torch.device("cpu" if asked.smoke else "cuda")
    if asked.smoke:
        torch.set_num_threads(1)
        asked.table |= not asked.fit
    if not asked.table and not asked.fit:
        print("Pass --table or --fit.", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)
    made = {"table": tables(asked, device) if asked.table else []}
    made["fit"] = fits(asked, device) if asked.fit else []
    print()
    good = True
    for row in made["table"]:
        fine = "failed" not in row and (asked.smoke or GOOD[0] <= row["ratio"] <= GOOD[1])
        good &= fine
        what = row.get("failed") or f"{row['ratio']:.3f}"
        print(f"{'pass' if fine else 'FAIL':5} {what:>7}  {row['name']}")
    for row in made["fit"]:
        fine = "failed" not in row and row["tries"] <= 2 and (asked.smoke or row["ratio"] <= 1.0)
        good &= fine
        held = "" if asked.smoke else f", {row.get('ratio', 0.0):.0%} used"
        what = "failed" if "failed" in row else f"try {row['tries']}{held}"
        print(f"{'pass' if fine else 'FAIL':5} {what}  {row['name']}")
    if asked.json:
        asked.json.write_text(json.dumps(made, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
