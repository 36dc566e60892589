"""Compares the step time of samples assigned by cost and in their order, on two CPU ranks.

    python benchmarks/window_assignment.py [--runs 5] [--steps 4] [--output FILE.json]

Two ranks with one core each, depth = 2, 8 micro-batches of one sample: ranks meet in the gathers of
every layer. Documents have a long tail of lengths, so that some samples are one document and others
have many. The same model takes the same steps with data.balance = none and cost in turn, as often
as there are runs. The time of a step is the median of the runs, and its gain the ratio of both. The
predicted gain is the ratio of the efficiencies by FLOPs. Prints both in the mean of steps. Exit
status 1 if samples in their order are more than 0.8 efficient, or if the measured gain is below 0.9
of the predicted one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from script_parser import ScriptParser

from ranvier import launch
from ranvier.comm.consensus import max_over_ranks
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, DecoderModelConfig, TrainConfig
from ranvier.data.dataset import TextData, open_data
from ranvier.data.loader import load_micro_batches
from ranvier.data.prepare import prepare_corpus
from ranvier.data.step_work import WorkCounter
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

Balance = Literal["none", "cost"]
BALANCES: tuple[Balance, ...] = ("none", "cost")
SEQ_LEN = 3072
SHORTEST, LONGEST = 128, 16 * SEQ_LEN
"""Tokens of the shortest and of the longest document."""
TAIL = 1.2
"""Exponent of the Pareto distribution of lengths."""
MICRO_BATCHES = 8
EFFICIENCY = 0.8
"""Largest efficiency of samples in their order."""
GAIN = 0.9
"""Least measured gain relative to the predicted one."""


def make_run(balance: Balance, seq_len: int) -> RunConfig:
    """Return the run, whose model is so small that attention takes most of the time."""
    model = DecoderModelConfig(
        layers=2,
        embed=64,
        heads=1,
        kv_heads=1,
        head_dim=64,
        mlp=128,
        vocab=257,
        max_seq=seq_len,
    )
    return RunConfig(
        model=model,
        data=DataConfig(seq_len=seq_len, balance=balance, validation_fraction=0.0),
        plan=Plan(data=1, depth=2, global_batch=2 * MICRO_BATCHES, micro_batch=1),
        train=TrainConfig(device="cpu", dtype="fp32", eval_interval=0),
    )


def write_corpus(folder: Path, tokens: int) -> Path:
    """Write documents with at least this many tokens; returns the prepared directory."""
    drawn = np.random.default_rng(0)
    written = 0
    with (folder / "texts.jsonl").open("w") as file:
        while written < tokens:
            length = min(int(SHORTEST * (drawn.pareto(TAIL) + 1)), LONGEST)
            letters = drawn.integers(97, 123, length).astype(np.uint8).tobytes().decode()
            file.write(json.dumps({"text": letters}) + "\n")
            written += length + 1
    prepare_corpus([folder / "texts.jsonl"], folder / "corpus", ByteTokenizer())
    return folder / "corpus"


def open_corpus(corpus: Path, seq_len: int) -> TextData:
    """Open the data of the run."""
    return open_data([corpus], seq=seq_len, seed=0)


def count_efficiency(corpus: Path, balance: Balance, steps: int, seq_len: int) -> list[float]:
    """Return the efficiency of each step by FLOPs."""
    run = resolve_run(make_run(balance, seq_len), ResolveContext(world_size=2))
    counter = WorkCounter.from_run(run, open_corpus(corpus, seq_len).train, itemsize=4)
    firsts = range(0, steps * run.plan.global_batch, run.plan.global_batch)
    return [counter.count_step(first).efficiency for first in firsts]


def time_rank(
    corpus: Path, output: Path, steps: int, runs: int, seq_len: int, me: ProcessInfo
) -> int:
    """Take all steps as one rank; the first one writes the seconds of each."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    context = ResolveContext(world_size=me.world_size, process=me, device=device)
    run = resolve_run(make_run("none", seq_len), context)
    with launch.join_process_group(me, "gloo", 600.0):
        grid = Grid.from_plan(run.plan, rank=me.rank, connected=True, ranks_per_node=2)
        data = open_corpus(corpus, seq_len)
        trainer = Trainer.from_run(run, grid, device, data, local_ranks=2)
        counter = WorkCounter.from_run(run, data.train, itemsize=4)
        batches = {
            (balance, step): load_micro_batches(
                data.train,
                step * run.plan.global_batch,
                run.plan.global_batch,
                grid,
                run.plan.micro_batch,
                cost=counter.cost if balance == "cost" else None,
            )
            for step in range(steps)
            for balance in BALANCES
        }
        seconds: dict[str, list[list[float]]] = {balance: [] for balance in BALANCES}
        # The first steps include work that is done once.
        for number in range(-1, runs):
            for balance in BALANCES:
                seconds[balance].append([])
            for step in range(steps if number >= 0 else 1):
                for balance in BALANCES:
                    took = _time_step(trainer, batches[balance, step], grid)
                    seconds[balance][-1].append(took)
        if me.rank == 0:
            output.write_text(json.dumps({name: some[1:] for name, some in seconds.items()}))
    return 0


def _time_step(trainer: Trainer, batches: Sequence[Any], grid: Grid) -> float:
    """Return the seconds of a step, from when all ranks start until all have ended."""
    moved = [batch.to("cpu") for batch in batches]
    max_over_ranks(0, grid, torch.device("cpu"))
    begun = time.perf_counter()
    trainer.take_step(moved, 1e-4, trainer.state.guard.step_limits)
    max_over_ranks(0, grid, torch.device("cpu"))
    return time.perf_counter() - begun


def compare(
    seconds: dict[str, list[list[float]]], efficiency: Mapping[Balance, list[float]]
) -> dict[str, Any]:
    """Return the measured and the predicted gain. seconds: `[runs][steps]` of both settings."""
    medians = {
        name: [statistics.median(some) for some in zip(*runs, strict=True)]
        for name, runs in seconds.items()
    }
    gains = [a / b for a, b in zip(medians["none"], medians["cost"], strict=True)]
    expected = [a / b for a, b in zip(efficiency["cost"], efficiency["none"], strict=True)]
    gain = statistics.mean(gains)
    predicted = statistics.mean(expected)
    return {
        "efficiency": {name: statistics.mean(some) for name, some in efficiency.items()},
        "seconds": medians,
        "step_gains": gains,
        "predicted_step_gains": expected,
        "gain": gain,
        "predicted_gain": predicted,
        "part_of_prediction": gain / predicted,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Compare both settings and print the result."""
    parser = ScriptParser(
        __doc__, smoke="--runs 1 --steps 1 --seq-len 128 --output {folder}/rows.json"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a sample")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder, options.steps * 2 * MICRO_BATCHES * options.seq_len)
        times = folder / "seconds.json"
        task = partial(time_rank, corpus, times, options.steps, options.runs, options.seq_len)
        if launch.launch_ranks(2, task, preload=[Trainer.__module__]):
            return 1
        efficiency = {
            balance: count_efficiency(corpus, balance, options.steps, options.seq_len)
            for balance in BALANCES
        }
        result = compare(json.loads(times.read_text()), efficiency)
    for balance in BALANCES:
        print(
            f"data.balance={balance}: {result['efficiency'][balance]:.3f} efficient by FLOPs, "
            f"{statistics.mean(result['seconds'][balance]):.3f} s per step"
        )
    print(
        f"gain {result['gain']:.3f}, predicted {result['predicted_gain']:.3f}: "
        f"measured / predicted {result['part_of_prediction']:.3f}"
    )
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    is_long_tailed = result["efficiency"]["none"] <= EFFICIENCY
    failed = not is_long_tailed or result["part_of_prediction"] < GAIN
    return int(failed and not options.smoke)


if __name__ == "__main__":
    sys.exit(main())
