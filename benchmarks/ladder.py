"""Ladder residuals: held-out loss against serial residuals, and how much of a reduction is hidden.

Usage: python benchmarks/ladder.py [--seeds 3] [--processes 2] [--last-half] [--csv FILE]
       python benchmarks/ladder.py --overlap [--row 2] [--backend gloo]

The first form trains the size `tiny` as `ranvier train` does without options (250 steps on the
standard library of Python): with serial residuals, with a ladder in all layers, and optionally with
a ladder in the last half of them. Each case runs with several seeds, which draw weights and order.
The claim, fixed before the first run with these seeds, about means over seeds (a difference counts
if it is above one standard error): the held-out loss of the ladder is at most 1.5 % above that of
serial residuals. The exit code is 1 if it does not hold.

The second form runs training steps of a wider model on several ranks of `row` and measures for how
long a rank is blocked by the reductions of attention and MLP outputs and the gathers of their
gradients: with serial residuals, and with a ladder whose overlap is off and on.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from held_out import HeldOut
from job_pool import run_jobs
from script_parser import ScriptParser

from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import CheckpointConfig, DataConfig, TrainConfig
from ranvier.data.run_data import data_source
from ranvier.grid import Grid
from ranvier.launch import die_with_parent, init_process_group, local_process_infos
from ranvier.models import Decoder, DecoderConfig
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.trace import Event
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer

Backend = Literal["gloo", "nccl"]
MAX_INCREASE = 0.015
"""Largest relative increase of the held-out loss."""
EVAL_SAMPLES = 512
WIDTH = 256
SEQ_LEN = 256
SAMPLES = 2
MEASURED_STEPS = 8


@dataclass(frozen=True)
class Case:
    """Which layers have a ladder residual."""

    name: str
    residual: Literal["serial", "ladder"]
    ladder_layers: tuple[int, ...] = ()


CASES = [Case("serial", "serial"), Case("ladder", "ladder")]
LAST_HALF = Case("ladder, last 2 of 4 layers", "ladder", (2, 3))


@dataclass(frozen=True)
class Result:
    """The held-out loss of a run."""

    case: str
    seed: int
    val_loss: float
    seconds: float


def make_run(case: Case, seed: int, steps: int, held_out: HeldOut) -> RunConfig:
    """Returns the settings of a run: the defaults of `ranvier train`, on one CPU."""
    model = replace(
        named_model("tiny"),
        residual=case.residual,
        ladder_layers=case.ladder_layers,
    )
    return RunConfig(
        model=model,
        data=DataConfig(validation_fraction=held_out.fraction),
        train=TrainConfig(
            steps=steps,
            seed=seed,
            device="cpu",
            eval_interval=steps,
            eval_samples=held_out.samples,
        ),
        checkpoint=CheckpointConfig(interval=-1),
    )


def train_case(case: Case, seed: int, steps: int, held_out: HeldOut, stored: list[str]) -> Result:
    """Trains a model, and evaluates it."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    device = torch.device("cpu")
    run = resolve_run(
        make_run(case, seed, steps, held_out), ResolveContext(world_size=1, device=device)
    )
    data = held_out.open(run, stored)
    *_, last = Trainer.from_run(run, Grid({}), device, data).run_steps()
    return Result(case.name, seed, last["val_loss"], time.perf_counter() - start)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def check_claim(serial: Sequence[float], ladder: Sequence[float]) -> str:
    """Returns why the claim does not hold, or "". The losses have the same seeds in order."""
    # Pairs have the same order of samples, so their difference varies less than each loss.
    excess, error = mean_and_error(
        [b - (1.0 + MAX_INCREASE) * a for a, b in zip(serial, ladder, strict=True)]
    )
    if excess <= error:
        return ""
    change = statistics.fmean(ladder) / statistics.fmean(serial) - 1.0
    return f"the held-out loss of the ladder is {change:+.2%}, above {MAX_INCREASE:+.1%}"


def compare_losses(asked: argparse.Namespace) -> bool:
    """Trains all cases, prints the table and returns whether the claim holds."""
    start = time.perf_counter()
    cases = [*CASES, LAST_HALF] if asked.last_half else CASES
    held_out = HeldOut.from_options(asked)
    run = make_run(cases[0], 0, asked.steps, held_out)
    stored = data_source(run.model).prepare(
        resolve_run(run, ResolveContext(world_size=1, device=torch.device("cpu")))
    )
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    jobs = [(case, seed, asked.steps, held_out, stored) for seed in seeds for case in cases]
    results = run_jobs(train_case, jobs, processes=asked.processes)
    if asked.csv:
        write_csv(Path(asked.csv), results)
    losses = {
        case.name: [one.val_loss for one in results if one.case == case.name] for case in cases
    }
    print(f"{'residual':28}{'held-out loss':20}change")
    for name, mine in losses.items():
        mean, error = mean_and_error(mine)
        change, spread = mean_and_error(
            [b / a - 1.0 for a, b in zip(losses["serial"], mine, strict=True)]
        )
        print(f"{name:28}{f'{mean:.4f} ± {error:.4f}':20}{change:+.2%} ± {spread:.2%}")
    failed = check_claim(losses["serial"], losses["ladder"])
    if failed:
        print(f"does not hold: {failed}")
    print(f"{len(results)} runs in {time.perf_counter() - start:.0f} s")
    print("FAIL" if failed else "pass")
    return not failed


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Writes a row per run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["residual", "seed", "held_out_loss", "seconds"])
        for one in results:
            writer.writerow([one.case, one.seed, f"{one.val_loss:.5f}", f"{one.seconds:.1f}"])


# ---- overlap -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OverlapResult:
    """Medians over steps on rank 0."""

    name: str
    step_seconds: float
    transfer_seconds: float
    """From issue to completion of the reductions and gathers of outputs."""
    blocked_seconds: float
    """In which the rank was blocked by them."""


OVERLAPS: list[tuple[str, Literal["serial", "ladder"], bool]] = [
    ("serial", "serial", True),
    ("ladder, overlap off", "ladder", False),
    ("ladder, overlap on", "ladder", True),
]


def of_outputs(event: Event) -> bool:
    """Whether an event reduces the output of attention or MLP, or gathers its gradient."""
    return event.axis == ("row",) and event.where.endswith((".attention.o", ".mlp.down"))


def measure_overlap(
    grid: Grid, device: torch.device, name: str, residual: Literal["serial", "ladder"], on: bool
) -> OverlapResult:
    """Runs some training steps."""
    config = DecoderConfig(
        layers=4,
        embed=WIDTH,
        heads=8,
        kv_heads=8,
        head_dim=WIDTH // 8,
        mlp=3 * WIDTH,
        vocab=1024,
        residual=residual,
    )
    usual = Plan()
    overlap = usual.overlap if on else tuple(one for one in usual.overlap if one != "residual")
    plan = replace(usual, overlap=overlap).with_degrees(grid.degrees)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = parallelize(Decoder(config), grid, plan, dtype=dtype, device=device)
    optimizer = Optimizer(model.parallel.bucket_scheduler)  # type: ignore[arg-type, union-attr]
    tokens = torch.randint(0, config.vocab, (SAMPLES, SEQ_LEN + 1))
    batch = make_batch(tokens, device)
    seconds: list[tuple[float, float, float]] = []
    for step in range(MEASURED_STEPS + 2):
        synchronize(device)
        start = time.perf_counter()
        with grid.trace.record_events() as events:
            forward_backward(model, [batch])
            optimizer.step()
        synchronize(device)
        whole = time.perf_counter() - start
        mine = [event for event in events if of_outputs(event)]
        # The first step records the order of gathers, and allocates memory.
        if step >= 2:
            transfer = sum(event.seconds for event in mine)
            seconds.append((whole, transfer, sum(event.exposed_seconds for event in mine)))
    return OverlapResult(name, *(statistics.median(some) for some in zip(*seconds, strict=True)))


def make_batch(tokens: torch.Tensor, device: torch.device) -> Any:
    """A batch on a device."""
    from ranvier.data.batch import Batch

    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(inputs, targets, None, None, samples=torch.arange(len(tokens))).to(device)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def serve_rank(me: Any, backend: Backend, rounds: int, share_gpu: bool, pipe: Any) -> None:
    """Measures all cases on one rank, in turns."""
    die_with_parent()
    torch.set_num_threads(1)
    if backend == "nccl":
        device = torch.device("cuda", 0 if share_gpu else me.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    init_process_group(me, backend=backend, timeout_seconds=300.0, share_gpu=share_gpu)
    grid = Grid({"row": me.world_size}, connected=True, timeout_seconds=300.0)
    for _ in range(rounds):
        found = [measure_overlap(grid, device, *one) for one in OVERLAPS]
        if me.rank == 0:
            pipe.send(found)


def compare_overlap(asked: argparse.Namespace) -> None:
    """Measures all cases on several ranks and prints the table."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    workers = [
        context.Process(
            target=serve_rank,
            args=(
                me,
                asked.backend,
                asked.rounds,
                asked.share_gpu,
                there if me.rank == 0 else None,
            ),
        )
        for me in local_process_infos(asked.row)
    ]
    for worker in workers:
        worker.start()
    there.close()
    try:
        rounds = [here.recv() for _ in range(asked.rounds)]
    finally:
        for worker in workers:
            worker.join(timeout=60.0)
            worker.kill()
    print(f"row={asked.row} over {asked.backend}: medians of {asked.rounds} turns, ms per step")
    print(f"{'residual':24}{'step':>10}{'transfers':>12}{'blocked':>10}{'hidden':>9}")
    for place, (name, *_) in enumerate(OVERLAPS):
        mine: list[OverlapResult] = [one[place] for one in rounds]
        step, transfer, blocked = (
            1e3 * statistics.median(getattr(one, field) for one in mine)
            for field in ("step_seconds", "transfer_seconds", "blocked_seconds")
        )
        hidden = 1.0 - blocked / transfer if transfer else 0.0
        print(f"{name:24}{step:10.1f}{transfer:12.1f}{blocked:10.1f}{hidden:9.0%}")


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--seeds 1 --steps 2 --held-out 0.2 --samples 4 --processes 1 --last-half "
        "--csv {folder}/rows.csv",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    usual = RunConfig().train.steps
    parser.add_argument("--steps", type=int, default=usual, help="steps of each run")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    HeldOut.add_options(parser, samples=EVAL_SAMPLES)
    parser.add_argument("--csv", help="file to write all losses to")
    parser.add_argument("--last-half", action="store_true", help="also with half of the layers")
    parser.add_argument("--overlap", action="store_true", help="measure the overlap instead")
    parser.add_argument("--row", type=int, default=2, help="ranks of the overlap")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the overlap")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks of nccl on one GPU")
    return parser.parse_args()


def main() -> None:
    """Compares losses, or measures the overlap."""
    asked = settings()
    if asked.overlap:
        compare_overlap(asked)
        return
    raise SystemExit(0 if compare_losses(asked) or asked.smoke else 1)


if __name__ == "__main__":
    main()
