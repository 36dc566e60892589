"""Compares predicted and measured step time and memory of single-device runs.

    --json FILE    eight configurations, four minutes; the file gets all results
    --only fp8     only configurations whose name has this word
    --tiny         small models on the CPU, as a check

The machine is measured first as with `ranvier measure`; predictions do not use any training run.
Then the trainer builds each configuration and takes steps; medians of windows count. Required:
seconds within 8%, memory (peak bytes allocated by torch) within 5%. The JSON contains all measured
rates and the kernels of a step, so that the model can be checked on another machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from script_parser import ScriptParser
from torch.profiler import ProfilerActivity

from memory import RATE, Bench, Config, config, shape_of
from ranvier.config.run import RunConfig
from ranvier.errors import RanvierError
from ranvier.launch import ProcessInfo, cache_compiled_kernels
from ranvier.planner.cluster import Cluster, load_cluster
from ranvier.planner.memory.breakdown import GIB
from ranvier.tools.benchmark_cluster import ClusterBenchmark, describe_cluster
from ranvier.tools.profiler.chrome_trace import read_kernels
from ranvier.tools.profiler.report import (
    DevicePeaks,
    _annotate_optimizer,
    _record_triton,
    summarize_kernels,
)
from ranvier.train.metrics import DeviceEvent

TIME, MEMORY = 0.08, 0.05
"""Maximum errors."""
FP8 = {"train__float8": "tensorwise"}
CONFIGS = [
    config("0.5b", 16, "none", "compiled"),
    config("0.5b", 8, "full", "eager"),
    config("1.5b", 8, "selective", "compiled", plan__micro_batch="4"),
    config("1.5b", 4, "none", "compiled", **FP8),
    config("3b", 4, "full", "compiled"),
    config("3b", 2, "none", "eager", **FP8),
    config("1.5b", 8, "selective", "compiled", train__float8="rowwise"),
    config("0.5b", 1, "none", "compiled", train__dtype="fp32"),
]
TINY = [config("toy", 4, "none", "eager"), config("toy-tied", 4, "full", "eager")]


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__, smoke="--tiny --cluster perlmutter --windows 1 --steps 1 --json {folder}/rows.json"
    )
    add = parser.add_argument
    add("--only", default="", help="configurations whose name has one of these words")
    add("--windows", type=int, default=3, help="windows of each configuration")
    add("--steps", type=int, default=4, help="steps per window")
    add("--tiny", action="store_true", help="small models on the CPU, as a check")
    add("--cluster", default="", help="name or TOML file of the machine (default: measure it)")
    add("--json", type=Path, metavar="FILE", help="file to write, updated after each configuration")
    return parser.parse_args()


def foretold(run: RunConfig, made: Cluster) -> dict[str, Any]:
    """Returns the prediction for a run on one device of a cluster."""
    from ranvier.planner.model_spec import resolve_model_spec
    from ranvier.planner.predict import Candidate, Workload, predict_step
    from ranvier.planner.time.compute import FP8_SCALING

    job = Workload(
        resolve_model_spec(run), run.data.seq_len, run.plan.global_batch, dtype=run.train.dtype
    )
    layout = Candidate(run.plan, fp8=FP8_SCALING[run.train.float8])
    found = predict_step(job, layout, made.with_size(devices=1))
    return {
        "seconds": found.step_seconds,
        "parts": dict(found.seconds_by_part),
        "memory": found.memory.allocated_bytes,
        "table": found.memory.to_dict(),
    }


class Taken:
    """A configuration that takes steps."""

    def __init__(self, one: Config, device: torch.device, asked: argparse.Namespace) -> None:
        settings = {"data.document_mask": "false", **one.settings}
        shape = shape_of(one.size)
        self.bench = Bench(shape, Config(one.name, one.size, one.batch, settings), device)
        self.device, self.asked = device, asked
        self.run = self.bench.trainer.run

    def step(self) -> None:
        """Takes one optimizer step."""
        trainer = self.bench.trainer
        trainer.take_step(self.bench.batches, RATE, trainer.state.guard.step_limits)
        trainer.grid.trace.waited_events = []

    def facts(self) -> dict[str, Any]:
        """Returns the seconds, bytes and longest kernels of steps."""
        cuda = self.device.type == "cuda"
        for _ in range(3):
            self.step()
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        windows = []
        for _ in range(self.asked.windows):
            begin = DeviceEvent(self.device)
            for _ in range(self.asked.steps):
                self.step()
            end = DeviceEvent(self.device)
            end.synchronize()
            windows.append(end.seconds_since(begin) / self.asked.steps)
        memory = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        found = {"windows": windows, "seconds": statistics.median(windows), "memory": memory}
        return found | {"kernels": self.kernels() if cuda else {}}

    def kernels(self) -> dict[str, Any]:
        """Returns the milliseconds per step by group, and the longest kernels."""
        _annotate_optimizer(self.bench.trainer.state.optimizer)
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with tempfile.TemporaryDirectory() as folder, _record_triton():
            path = Path(folder) / "trace.json.gz"
            with torch.profiler.profile(activities=both, record_shapes=True) as record:
                self.step()
                torch.cuda.synchronize(self.device)
            record.export_chrome_trace(str(path))
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                report = summarize_kernels(
                    read_kernels(json.load(file)), steps=1, peaks=DevicePeaks()
                )
        rows = [
            {"name": row.name[:80], "op": row.op, "group": row.group, "calls": row.calls}
            | {"ms": row.ms, "flops": row.flops, "bytes": row.bytes}
            for row in report.rows[:40]
        ]
        return {"groups": report.groups, "idle": report.idle_ms, "rows": rows}


def one_row(
    one: Config, made: Cluster, device: torch.device, asked: argparse.Namespace
) -> dict[str, Any]:
    """Predicts and measures a configuration."""
    row: dict[str, Any] = {"name": one.name, "settings": dict(one.settings), "batch": one.batch}
    begun, taken = time.perf_counter(), None
    try:
        taken = Taken(one, device, asked)
        row["predicted"] = foretold(taken.run, made)
        row["measured"] = taken.facts()
    except ImportError as error:
        row["failed"] = str(error)
        row["measured"] = taken.facts() if taken is not None else {}
    except (RanvierError, RuntimeError, AssertionError) as error:
        row["failed"] = (str(error).splitlines() or [type(error).__name__])[0][:300]
    if taken is not None:
        taken.bench.close()
    row["took"] = time.perf_counter() - begun
    return row


def format_row(row: Mapping[str, Any]) -> str:
    """Formats a row."""
    words = f"{row['name']:44}"
    measured, predicted = row.get("measured"), row.get("predicted")
    if measured:
        words += f" {measured['seconds'] * 1e3:9.2f} ms {measured['memory'] / GIB:7.2f} GiB"
    if measured and predicted:
        words += f"  predicted {predicted['seconds'] * 1e3:9.2f} ms {errors(row)[0]:+6.1%}"
        words += f" {predicted['memory'] / GIB:7.2f} GiB {errors(row)[1]:+6.1%}"
    return words + f"  ({row['took']:.0f} s)" + (f"  {row['failed']}" if "failed" in row else "")


def errors(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns predicted / measured - 1 of time and memory; memory is not counted on a CPU."""
    measured, predicted = row["measured"], row["predicted"]
    memory = predicted["memory"] / measured["memory"] - 1.0 if measured["memory"] else 0.0
    return predicted["seconds"] / measured["seconds"] - 1.0, memory


def verdict(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Prints which configurations pass; returns whether all do."""
    good = True
    for row in rows:
        fine = "failed" not in row
        if fine:
            late, more = errors(row)
            fine = abs(late) <= TIME and abs(more) <= MEMORY
        good &= fine
        print(f"{'pass' if fine else 'FAIL'}  {format_row(row)}")
    return good


def main() -> int:
    """Measures, predicts and compares; returns 0 if all pass."""
    asked = settings()
    device = torch.device("cpu" if asked.tiny else "cuda")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)
        cache_compiled_kernels()
    begun = time.perf_counter()
    if asked.cluster:
        made = load_cluster(asked.cluster)
    else:
        made = ClusterBenchmark(ProcessInfo(), device).measure_cluster()
    print(*describe_cluster(made), sep="\n")
    print(f"measured in {time.perf_counter() - begun:.0f} s\n", flush=True)
    facts: dict[str, Any] = {"cluster": asdict(made), "rows": []}
    for one in TINY if asked.tiny else CONFIGS:
        if any(word in one.name for word in asked.only.split(",")):
            facts["rows"].append(one_row(one, made, device, asked))
            print(format_row(facts["rows"][-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(facts, indent=1, default=dict))
    print()
    good = verdict(facts["rows"])
    print(f"{time.perf_counter() - begun:.0f} s in total")
    return 0 if good or asked.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
