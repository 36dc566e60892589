"""Measures the cost of a checkpoint: windows with one background save and without, alternating.

    python benchmarks/saves.py --size llama3-1b --untied --seq 4096 --batch 8 --steps 50 --turns 5

Then the same tensors are saved synchronously by torch's distributed checkpoint and by Ranvier. The
first save, which allocates host memory, is reported separately. Verdicts: the stall of a window is
at most one step, and at most a tenth of torch's synchronous save.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from script_parser import ScriptParser

from ranvier import launch
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import CheckpointConfig, DataConfig, TrainConfig
from ranvier.data.dataset import cache_corpora, open_data
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume import checkpointing
from ranvier.train.trainer import Trainer

NEVER = 10**9


def settings() -> argparse.Namespace:
    parser = ScriptParser(
        __doc__,
        smoke="--size tiny --seq 32 --batch 2 --steps 6 --turns 1 --peers 1 "
        "--json {folder}/rows.json",
    )
    parser.add_argument("--size", default="llama3-1b")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50, help="steps per window")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peers", type=int, default=2, help="number of saves by torch's DCP")
    parser.add_argument("--folder", default=None, help="directory for checkpoints")
    parser.add_argument("--json", default="")
    return parser.parse_args()


def trainer_for(asked: argparse.Namespace, out: str) -> Trainer:
    model = named_model(asked.size)
    settings = RunConfig(
        model=replace(model, tie_embeddings=False) if asked.untied else model,
        data=DataConfig(seq_len=asked.seq, tokenizer="bytes"),
        plan=Plan(global_batch=asked.batch),
        train=TrainConfig(steps=10**6, output_dir=out, eval_interval=0),
        checkpoint=CheckpointConfig(interval=NEVER, keep_latest=1),
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


def now(trainer: Trainer) -> float:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def window(rows: Iterator[object], trainer: Trainer, steps: int, *, save: bool) -> float:
    """Returns the seconds of a window of steps; a save that starts after a fifth may end later."""
    due = trainer.state.step + max(steps // 5, 1) if save else NEVER
    _every(trainer, due)
    start = now(trainer)
    for _ in range(steps):
        next(rows)
        if trainer.state.step > due:
            due = NEVER
            _every(trainer, due)
    return now(trainer) - start


def _every(trainer: Trainer, steps: int) -> None:
    trainer.run = replace(trainer.run, checkpoint=replace(trainer.run.checkpoint, interval=steps))


def written(trainer: Trainer) -> float:
    """Returns the seconds until the background save has ended."""
    start = time.perf_counter()
    trainer.checkpointer.saver.finish_saving()
    return time.perf_counter() - start


def peer(trainer: Trainer, folder: Path) -> float:
    """Returns the seconds of torch's distributed checkpoint of the same tensors."""
    from torch.distributed import checkpoint as dcp  # imports sympy, which takes a while

    tensors = {name: x for name, (x, _) in checkpointing.state_tensors(trainer.state).items()}
    start = now(trainer)
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


def main() -> int:
    asked = settings()
    with tempfile.TemporaryDirectory(dir=asked.folder) as out:
        trainer = trainer_for(asked, out)
        state = checkpointing.state_tensors(trainer.state)
        size = sum(x.numel() * x.element_size() for x, _ in state.values())
        rows = iter(trainer.run_steps())
        window(rows, trainer, 12, save=False)
        first = window(rows, trainer, 10, save=True)
        rest = written(trainer)
        print(
            f"{asked.size}, {asked.batch} x {asked.seq} tokens per step, {size / 1e9:.2f} GB of "
            "state"
        )
        print(f"first save: 10 steps took {first:.2f} s, then {rest:.2f} s to write", flush=True)
        times: list[tuple[float, float]] = []
        for turn in range(asked.turns):
            pair = {}
            for save in (turn % 2 == 0, turn % 2 == 1):
                pair[save] = window(rows, trainer, asked.steps, save=save)
                behind = written(trainer) if save else 0.0
                if save:
                    print(f"  {behind:.2f} s more to write after the window")
            times.append((pair[False], pair[True]))
            print(f"turn {turn}: {pair[False]:.3f} s without, {pair[True]:.3f} s with", flush=True)
        rows.close()  # type: ignore[attr-defined]
        shutil.rmtree(trainer.checkpointer.checkpoint_dir)
        theirs = [peer(trainer, Path(out) / "dcp") for _ in range(asked.peers)]
        good = verdict(asked, times, theirs)
        trainer.checkpointer.checkpoint_dir.mkdir()
        trainer.checkpointer.saver.step = -1
        start = now(trainer)
        trainer.save_checkpoint()
        print(f"Ranvier, synchronous: {time.perf_counter() - start:.2f} s")
    return 0 if good or asked.smoke else 1


def verdict(
    asked: argparse.Namespace, times: list[tuple[float, float]], theirs: list[float]
) -> bool:
    """Prints the results; returns whether all pass."""
    step = statistics.median(a for a, _ in times) / asked.steps
    stall = statistics.median(b - a for a, b in times)
    best = min(theirs)
    print(f"{step * 1e3:.1f} ms per step; a save in {asked.steps} steps costs {stall * 1e3:.1f} ms")
    print(f"synchronous: torch DCP {', '.join(f'{x:.2f}' for x in theirs)} s", flush=True)
    verdicts = {"at most one step": stall <= step, "at most DCP / 10": stall <= best / 10}
    for words, good in verdicts.items():
        print(
            f"{'pass' if good else 'FAIL'}: {words} ({stall / step:.2f} steps, DCP / "
            f"{best / max(stall, 1e-9):.0f})"
        )
    if asked.json:
        found = {"step": step, "stall": stall, "dcp": theirs, "times": times}
        Path(asked.json).write_text(json.dumps(found))
    return all(verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
