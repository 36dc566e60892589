"""Compares predictions and measurements of twelve layouts of the default job on this machine.

    python benchmarks/layouts.py                 measure the machine, then all layouts: 5 rounds
    python benchmarks/layouts.py --cluster FILE  with a file of `ranvier measure`
    python benchmarks/layouts.py --rounds 1      a short check
    python benchmarks/layouts.py --context       eight layouts of 4 to 8 ranks with context,
                                                 samples of 2,048 tokens; tau at least 0.6

Runs on a CPU with 2 to 8 ranks over Gloo. A set of ranks of each size exists from the first to the
last round. Each layout is built once and the layouts alternate, so that other load on the machine
affects all of them. The median of the rounds counts. Required: Kendall's tau of predicted and
measured times at least 0.7, where pairs whose medians are within their interquartile ranges are
ties; a median error of at most 25%; the slowest layout takes at least twice as long as the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from script_parser import ScriptParser

from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.launch import ProcessInfo, die_with_parent, init_process_group, local_process_infos
from ranvier.train.resolve import ResolveContext, resolve_run

TAU, ERROR, SPREAD = 0.7, 0.25, 2.0
"""Minimum rank correlation, maximum median error, minimum spread."""
RATE = 1e-4
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"row": 2},
    {"pipe": 2, "micro_batch": 1},
    {"depth": 2, "recompute": "full"},
    {"data": 4},
    {"row": 2, "col": 2},
    {"depth": 4},
    {"data": 2, "row": 2, "micro_batch": 1},
    {"data": 8},
    {"depth": 2, "row": 2, "col": 2},
    {"pipe": 2, "data": 2, "depth": 2, "micro_batch": 1},
    {"data": 4, "col": 2, "col_splits": "features"},
)
CONTEXT_TAU, CONTEXT_SEQ, CONTEXT_BATCH = 0.6, 2048, 2
CONTEXT_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"context": 4},
    {"context": 2, "data": 2},
    {"context": 2, "row": 2},
    {"context": 4, "shard_weights_over": "depth_context", "recompute": "full"},
    {"context": 2, "col": 2, "col_splits": "features"},
    {"context": 8},
    {"context": 4, "row": 2, "recompute": "full"},
    {"context": 2, "row": 2, "col": 2, "col_splits": "features"},
)
"""Layouts of samples of one document."""


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--layouts 2 --cluster perlmutter --rounds 1 --steps 1 --json {folder}/rows.json",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each layout")
    add("--steps", type=int, default=4, help="steps per turn, after one untimed step")
    add("--cluster", default="", help="name or TOML file of the machine (default: measure it)")
    add("--layouts", type=int, help="number of layouts, the first ones (default: all)")
    add("--context", action="store_true", help="layouts with context, of long samples")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser.parse_args()


def named(degrees: Mapping[str, Any]) -> str:
    """Formats a layout."""
    return " ".join(f"{key}={value}" for key, value in degrees.items())


def run_of(degrees: Mapping[str, Any]) -> ResolvedRun:
    """Returns the default job in a layout."""
    plan = Plan(**{"data": 1, **degrees})
    run = RunConfig(plan=plan)
    if plan.context > 1:
        plan = replace(plan, global_batch=CONTEXT_BATCH)
        run = replace(run, data=replace(run.data, seq_len=CONTEXT_SEQ, document_mask=False))
    quiet = replace(run.train, device="cpu", dtype="fp32", backend="gloo")
    compiled = replace(plan, compile="off")
    settings = replace(run, plan=compiled, train=quiet)
    return resolve_run(settings, ResolveContext(world_size=plan.world_size))


# ---- ranks that wait for work -----------------------------------------------------------


@dataclass
class Crew:
    """Ranks of one process group."""

    size: int
    members: list[tuple[BaseProcess, Connection]] = field(default_factory=list)

    def start(self) -> None:
        """Starts the ranks."""
        context = multiprocessing.get_context("spawn")
        for me in local_process_infos(self.size):
            here, there = context.Pipe()
            one = context.Process(target=_serve, args=(me, there), daemon=True)
            one.start()
            there.close()
            self.members.append((one, here))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of `function(worker, *arguments)` on rank 0, after all ranks have
        run it.
        """
        for _, pipe in self.members:
            pipe.send((function, arguments))
        results = [pipe.recv() for _, pipe in self.members]
        for good, value in results:
            if not good:
                raise RuntimeError(value)
        return results[0][1]

    def stop(self) -> None:
        """Stops the ranks."""
        for one, pipe in self.members:
            pipe.close()
            one.kill()
            one.join()


@dataclass
class Worker:
    """The state of a rank between calls."""

    rank: int
    world: int
    seats: dict[str, Any] = field(default_factory=dict)


def _serve(me: ProcessInfo, pipe: Connection) -> None:
    """Runs a rank until it is stopped."""
    import torch

    die_with_parent()
    torch.set_num_threads(max((os.cpu_count() or 1) // me.world_size, 1))
    init_process_group(me, backend="gloo", timeout_seconds=120.0)
    worker = Worker(me.rank, me.world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(worker, *arguments)))
        except BaseException:  # the driver shows it, whatever it is
            pipe.send((False, traceback.format_exc()))


def build(worker: Worker, degrees: Mapping[str, Any]) -> None:
    """Builds a layout and warms it up."""
    import torch

    from ranvier.grid import Grid
    from ranvier.train.trainer import Trainer

    run, device = run_of(degrees), torch.device("cpu")
    grid = Grid.from_plan(run.plan, rank=worker.rank, connected=True)
    nothing: Any = None  # steps are given their batches
    trainer = Trainer.from_run(run, grid, device, nothing, local_ranks=worker.world)
    plan = trainer.run.plan
    batches = _batch(run).split_micro_batches(trainer.grid, plan.micro_batch, plan.token_order)
    worker.seats[named(degrees)] = (trainer, batches)
    turn(worker, degrees, 2)


def _batch(run: RunConfig) -> Any:
    """Returns random tokens, in two documents per sample of different lengths; over context in
    one.
    """
    import torch

    from ranvier.data.batch import Batch

    seq, count = run.data.seq_len, run.plan.global_batch
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, run.model.vocab, (count, seq + 1), generator=source)
    cut = torch.randint(1, seq, (count, 1), generator=source)
    places = torch.arange(seq).expand(count, -1)
    documents = (places >= cut).long()
    positions = places - documents * cut
    samples = torch.arange(count)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if not run.data.document_mask:
        return Batch(tokens, targets, samples=samples)
    return Batch(tokens, targets, positions.contiguous(), documents, samples=samples)


def turn(worker: Worker, degrees: Mapping[str, Any], steps: int) -> float:
    """Returns the seconds per step, after one untimed step."""
    import torch

    from ranvier.train.step import StepLimits, train_step

    trainer, batches = worker.seats[named(degrees)]
    state, watch = trainer.state, StepLimits.for_device(torch.device("cpu"))
    began = time.perf_counter()
    for i in range(steps + 1):
        train_step(state.model, state.optimizer, batches, RATE, watch)
        trainer.grid.trace.waited_events = []
        if i == 0:
            began = time.perf_counter()
    return (time.perf_counter() - began) / steps


# ---- results ----------------------------------------------------------------------------


@dataclass
class Row:
    """A layout, its prediction and its rounds."""

    degrees: dict[str, Any]
    parts: dict[str, float] = field(default_factory=dict)
    predicted: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Quartiles of the rounds."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.median - 1.0

    def ties(self, other: Row) -> bool:
        """Returns whether the medians are within each other's interquartile range."""
        (a, b), (c, d) = self.quartiles, other.quartiles
        return c <= self.median <= d or a <= other.median <= b


def kendall(rows: Sequence[Row]) -> tuple[float, int]:
    """Returns Kendall's tau over pairs that are not ties, and the number of these pairs."""
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if not a.ties(b)]
    score = sum(
        math.copysign(1.0, (a.predicted - b.predicted) * (a.median - b.median)) for a, b in pairs
    )
    return (score / len(pairs) if pairs else 0.0), len(pairs)


def foretell(rows: Sequence[Row], path: str) -> None:
    """Adds the predictions to the rows."""
    from ranvier.planner import cluster
    from ranvier.tools.local_cluster import predict_run

    made = cluster.load_cluster(path)
    for row in rows:
        found = predict_run(run_of(row.degrees), made)
        row.predicted, row.parts = (
            found.step_seconds,
            {k: v for k, v in found.seconds_by_part.items() if v},
        )


def measured(rows: Sequence[Row], rounds: int, steps: int) -> None:
    """Measures all layouts, alternating between them."""
    worlds = {named(row.degrees): run_of(row.degrees).plan.world_size for row in rows}
    crews = {size: Crew(size) for size in sorted({*worlds.values()})}
    try:
        for crew in crews.values():
            crew.start()
        for row in rows:
            crews[worlds[named(row.degrees)]].call(build, row.degrees)
        for i in range(rounds):
            for row in rows:
                crew = crews[worlds[named(row.degrees)]]
                row.seconds.append(crew.call(turn, row.degrees, steps))
            print(f"round {i + 1} of {rounds} done", flush=True)
    finally:
        for crew in crews.values():
            crew.stop()


def report(rows: Sequence[Row], least: float = TAU) -> bool:
    """Prints the table and the verdict; returns whether all pass. least: minimum tau."""
    for row in sorted(rows, key=lambda row: row.median):
        low, high = row.quartiles
        parts = " ".join(f"{k} {v * 1e3:.0f}" for k, v in row.parts.items() if v > 5e-4)
        print(
            f"{named(row.degrees):40} {row.median * 1e3:8.1f} ms ({low * 1e3:.1f} to "
            f"{high * 1e3:.1f})  predicted {row.predicted * 1e3:8.1f} {row.error:+6.0%}  {parts}"
        )
    tau, pairs = kendall(rows)
    error = statistics.median(abs(row.error) for row in rows)
    spread = max(row.median for row in rows) / min(row.median for row in rows)
    good = [tau >= least, error <= ERROR, spread >= SPREAD]
    words = [
        f"Kendall's tau {tau:.2f} over {pairs} pairs that differ (at least {least})",
        f"median error {error:.1%} (at most {ERROR:.0%})",
        f"slowest over fastest {spread:.2f} (at least {SPREAD})",
    ]
    # Over context only the order counts: layouts are too similar for a spread.
    if least == CONTEXT_TAU:
        good, words = good[:1], words[:1]
    for fine, text in zip(good, words, strict=True):
        print(f"{'pass' if fine else 'FAIL'}  {text}")
    return all(good)


def main() -> int:
    """Measures, predicts and compares; returns 0 if all pass."""
    asked = settings()
    layouts = CONTEXT_LAYOUTS if asked.context else LAYOUTS
    rows = [Row(dict(degrees)) for degrees in layouts[: asked.layouts]]
    with tempfile.TemporaryDirectory() as folder:
        path = asked.cluster
        if not path:
            from ranvier.cli import main as cli

            path = str(Path(folder) / "cluster.toml")
            try:
                cli.main(["measure", "--output", path])
            except SystemExit as end:
                if end.code:
                    return int(end.code)
        foretell(rows, path)
    measured(rows, asked.rounds, asked.steps)
    good = report(rows, CONTEXT_TAU if asked.context else TAU)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if good or asked.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
