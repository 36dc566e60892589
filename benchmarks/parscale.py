"""ParScale at small scale: the held-out loss of four streams against one, at equal tokens.

Usage: python benchmarks/parscale.py [--seeds 3] [--processes 2] [--csv FILE]

The size `tiny` (3.2M parameters) is trained on the text of Python's standard library, with one
stream and with four, for the same 200 steps of the same samples, with the same settings. Each case
runs with several seeds, which draw weights and the order of samples. The claim, fixed before the
first run: the mean held-out loss of four streams is below that of one stream by more than one
standard error of the difference.

The exit code is 1 if the claim does not hold.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from held_out import HeldOut
from job_pool import run_jobs
from script_parser import ScriptParser

from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import CheckpointConfig, DataConfig, DecoderModelConfig, TrainConfig
from ranvier.data.run_data import data_source
from ranvier.grid import Grid
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

STREAMS = (1, 4)
STEPS = 200
BATCH = 4
EVAL_SAMPLES = 256


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    streams: int
    seed: int
    val_loss: float
    num_parameters: int
    seconds: float


def make_run(streams: int, seed: int, steps: int, held_out: HeldOut) -> RunConfig:
    """Returns the settings of a run: defaults, except the streams."""
    model = named_model("tiny")
    assert isinstance(model, DecoderModelConfig)
    return RunConfig(
        model=replace(model, parscale_streams=streams),
        data=DataConfig(validation_fraction=held_out.fraction),
        plan=Plan(global_batch=BATCH),
        train=TrainConfig(
            steps=steps,
            seed=seed,
            device="cpu",
            eval_interval=steps,
            eval_samples=held_out.samples,
        ),
        checkpoint=CheckpointConfig(interval=-1),
    )


def train_case(streams: int, seed: int, steps: int, held_out: HeldOut, stored: list[str]) -> Result:
    """Trains with a number of streams, and evaluates."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    device = torch.device("cpu")
    run = resolve_run(
        make_run(streams, seed, steps, held_out), ResolveContext(world_size=1, device=device)
    )
    data = held_out.open(run, stored)
    trainer = Trainer.from_run(run, Grid({}), device, data)
    *_, last = trainer.run_steps()
    seconds = time.perf_counter() - start
    return Result(streams, seed, last["val_loss"], run.model.num_parameters, seconds)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def is_below(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a mean is below another one by more than the standard error of the difference."""
    return other[0] - one[0] > math.hypot(one[1], other[1])


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--seeds 1 --steps 2 --held-out 0.2 --samples 4 --processes 1 "
        "--csv {folder}/rows.csv",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    HeldOut.add_options(parser, samples=EVAL_SAMPLES)
    parser.add_argument("--csv", help="file to write all results to")
    return parser.parse_args()


def main() -> None:
    """Runs all cases, prints the table and judges the claim."""
    asked = settings()
    start = time.perf_counter()
    held_out = HeldOut.from_options(asked)
    run = make_run(1, 0, asked.steps, held_out)
    # The corpus is tokenized once, before the processes read it.
    stored = data_source(run.model).prepare(run)
    jobs = [
        (streams, seed, asked.steps, held_out, stored)
        # Long runs first, so that both processes end together.
        for streams in sorted(STREAMS, reverse=True)
        for seed in range(asked.seeds)
    ]
    results = run_jobs(train_case, jobs, processes=asked.processes)
    if asked.csv:
        write_csv(Path(asked.csv), results)
    print("streams  parameters  held-out loss     seconds per run")
    found = {}
    for streams in STREAMS:
        mine = [one for one in results if one.streams == streams]
        found[streams] = mean, error = mean_and_error([one.val_loss for one in mine])
        seconds = statistics.fmean(one.seconds for one in mine)
        size = mine[0].num_parameters
        print(f"{streams:>7}  {size:>10,}  {mean:.4f} ± {error:.4f}  {seconds:>15.0f}")
    one, four = (found[streams] for streams in STREAMS)
    holds = is_below(four, one)
    print(f"difference {four[0] - one[0]:+.4f}, standard error {math.hypot(one[1], four[1]):.4f}")
    print(f"{len(results)} runs in {time.perf_counter() - start:.0f} s")
    print("pass" if holds else "FAIL")
    raise SystemExit(0 if holds or asked.smoke else 1)


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Writes a row per run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["streams", "seed", "held_out_loss", "seconds"])
        for one in results:
            writer.writerow([one.streams, one.seed, f"{one.val_loss:.5f}", f"{one.seconds:.1f}"])


if __name__ == "__main__":
    main()
