"""Measures the cost of metrics, progress and prefetch: the trainer's loop and a bare loop.

The bare loop takes the same steps (forward, backward, update) on batches that are already on the
device and reads nothing. Both use the same model and optimizer in the same process and alternate;
the medians of many turns are compared. Before that, steps of the model are compared with a plain
twin (`right_step.py`).

    python benchmarks/overhead.py --size llama3-1b --seq 2048 --batch 4 --steps 10 --turns 7
    python benchmarks/overhead.py --smoke
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from one_gpu import TOY_RATE
from peers import RATE, Ours, Shape, Task, rule_of_run, run_of
from right_step import Check, check_step

from ranvier import launch
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, TrainConfig
from ranvier.data.dataset import cache_corpora, open_data
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.models import MODEL_SIZES, DecoderConfig
from ranvier.train.loggers import open_loggers
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import train_step
from ranvier.train.trainer import Trainer


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="llama3-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--warm-up-steps", type=int, default=10, help="before the turns")
    parser.add_argument("--smoke", action="store_true", help="a small model on the CPU, as a check")
    asked = parser.parse_args()
    if asked.smoke:
        asked.size, asked.seq, asked.batch = "tiny", 32, 2
        asked.steps, asked.turns, asked.warm_up_steps = 1, 1, 1
        torch.set_num_threads(1)
    return asked


def check_model(asked: argparse.Namespace) -> Check:
    """Compares the steps of the model with the twin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {one.name: getattr(MODEL_SIZES[asked.size], one.name) for one in fields(DecoderConfig)}
    shape = Shape(**{**sizes, "max_seq": asked.seq})
    rate = TOY_RATE if asked.smoke else RATE
    task = Task.of(shape, asked.batch, device, clip=True, lr=rate)
    reference = task.reference()
    reference.record(rule_of_run(run_of(shape, asked.batch, {}, device.type), rate))
    contestant = Ours(task, {})
    check = check_step("model", contestant, reference)
    contestant.close()
    return check


def trainer_for(asked: argparse.Namespace, out: str) -> Trainer:
    settings = RunConfig(
        model=named_model(asked.size),
        data=DataConfig(seq_len=asked.seq, tokenizer="bytes"),
        plan=Plan(global_batch=asked.batch),
        train=TrainConfig(steps=10**6, output_dir=out, eval_interval=0),
    )
    context = ResolveContext.for_process(settings, ProcessInfo())
    run = resolve_run(settings, context)
    device = context.device
    assert device is not None
    folders = cache_corpora(
        ["stdlib"], cache=launch.cache_dir(), tokenizer="bytes", max_bytes=4_000_000
    )
    data = open_data(folders, seq=asked.seq, seed=0, held_out=0.02)
    return Trainer.from_run(run, Grid({}), device, data)


def wait(trainer: Trainer) -> float:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bare(trainer: Trainer, steps: int) -> float:
    """Returns the seconds per step of the bare loop."""
    load = trainer._batch_maker()
    first = trainer.state.step  # the steps that the trainer takes next
    ready = [[batch.to(trainer.device) for batch in load(first + i)] for i in range(steps)]
    start = wait(trainer)
    for batches in ready:
        train_step(
            trainer.state.model,
            trainer.state.optimizer,
            batches,
            1e-5,
            trainer.state.guard.step_limits,
        )
    return (wait(trainer) - start) / steps


def full(rows: Iterator[dict[str, object]], sink: object, trainer: Trainer, steps: int) -> float:
    """Returns the seconds per step of the trainer's loop, with metrics written and shown."""
    start = wait(trainer)
    for _ in range(steps):
        sink(next(rows))  # type: ignore[operator]
    return (wait(trainer) - start) / steps


def main() -> None:
    asked = settings()
    check = check_model(asked)
    print(check, flush=True)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_for(asked, out)
        trainer.run = replace(
            trainer.run, optim=replace(trainer.run.optim, lr=1e-5, warmup_steps=0)
        )
        rows = trainer.run_steps()
        with open_loggers(trainer.run, Path(out)) as sink:
            bare(trainer, asked.warm_up_steps)
            full(rows, sink, trainer, asked.warm_up_steps)
            times = []
            for turn in range(asked.turns):  # who is first changes, so that a drift cancels
                first = bare(trainer, asked.steps) if turn % 2 == 0 else 0.0
                ours = full(rows, sink, trainer, asked.steps)
                times.append((first or bare(trainer, asked.steps), ours))
        rows.close()
    plain, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    print(f"{asked.size}, {asked.batch} x {asked.seq} tokens, {asked.turns} turns of {asked.steps}")
    print(f"bare loop {plain * 1e3:.2f} ms per step, trainer {ours * 1e3:.2f} ms")
    if not check.passed:
        return
    middle, quarter = statistics.median(ratios) - 1.0, len(ratios) // 4
    print(
        f"overhead {middle:+.2%}, half of the turns {ratios[quarter] - 1:+.2%} to "
        f"{ratios[-1 - quarter] - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
