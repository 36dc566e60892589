"""Checks whether a mixture learns more than the dense model of its active size, and is balanced.

Both have the same depth, width, attention and vocabulary, and the active MLP width per token is the
same (experts_per_token · expert_mlp + shared_expert_mlp = mlp). Both take the same steps with the
same optimizer settings on the same samples of the default corpus, with some documents held out. A
table shows the mean training loss of the last tenth of the steps, the loss of held-out samples, and
for each MoE layer the load of its busiest expert relative to the mean of the layer: the mean over
the steps after warm-up, and the maximum. Seeds determine initial weights and the order of samples.

    python benchmarks/moe_tiny.py                     20 minutes on one core
    python benchmarks/moe_tiny.py --smoke             a few steps, as a check

The mixture passes if the means over seeds of both losses are lower than for the dense model, and in
every layer the mean load over seeds and steps after warm-up is below 1.5.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ranvier.config import run as runs
from ranvier.data.run_data import data_source
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models.config import MODEL_SIZES, DecoderConfig, ExpertConfig
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

LIMIT = 1.5
"""Maximum mean load of the busiest expert, relative to the mean of its layer."""


@dataclass(frozen=True)
class Curve:
    """Measurements of one run."""

    model: str
    seed: int
    losses: list[float]
    """Training loss of each step."""
    held_out: float
    loads: list[list[float]]
    """Load of the busiest expert relative to the mean, of each step after warm-up and each
    layer.
    """
    seconds: float

    @property
    def tail(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(len(self.losses) // 10, 1) :])

    @property
    def layers(self) -> list[float]:
        """Mean load of each MoE layer."""
        return [statistics.fmean(layer) for layer in zip(*self.loads, strict=True)]


def settings(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixture", default="moe-tiny", help="a size with experts")
    parser.add_argument("--dense", default="tiny", help="a size with equal active parameters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--seq", type=int, default=96, help="tokens per sequence")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of held-out documents")
    parser.add_argument("--samples", type=int, default=256, help="number of held-out sequences")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--smoke", action="store_true", help="one seed, three steps, one layer")
    parser.add_argument("--json", help="file to write all measurements to")
    found = parser.parse_args(words)
    if found.smoke:
        torch.set_num_threads(1)
        found.seeds, found.steps, found.batch, found.seq, found.samples = 1, 3, 2, 16, 4
    return found


def check(dense: DecoderConfig, mixture: DecoderConfig) -> None:
    """Raises if the models differ in more than their MLPs, or have different active widths."""
    own = {field.name for field in dataclasses.fields(ExpertConfig)} | {"mlp"}
    one, other = (
        {key: value for key, value in dataclasses.asdict(config).items() if key not in own}
        for config in (dense, mixture)
    )
    width = mixture.experts_per_token * mixture.expert_width + mixture.shared_expert_mlp
    mixed = any(map(mixture.has_experts, range(mixture.layers)))
    rest = mixture.mlp if mixture.moe_layer_interval > 1 or mixture.dense_first_layers else width
    if one != other or dense.experts or not mixed or not width == rest == dense.mlp:
        raise PlanError(
            f"The active MLP width of the mixture is {width}, of the dense model {dense.mlp}. "
            "Both models must be equal except for their experts. Choose experts_per_token · "
            "expert_mlp + shared_expert_mlp = mlp."
        )


def trained(asked: argparse.Namespace, model: str, seed: int) -> Curve:
    """Trains one model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables: dict[str, dict[str, Any]] = {
        "model": {"size": model, **({"layers": 1} if asked.smoke else {})},
        "data": {
            "seq_len": asked.seq,
            "validation_fraction": asked.held_out,
            "sources": [asked.corpus],
        },
        "plan": {"global_batch": asked.batch},
        "train": {"steps": asked.steps, "seed": seed, "device": device.type}
        | {"eval_interval": asked.steps, "eval_samples": asked.samples},
        "checkpoint": {"interval": -1},
    }
    run = resolve_run(runs.run_from_tables(tables), ResolveContext(world_size=1, device=device))
    source = data_source(run.model)
    trainer = Trainer.from_run(run, Grid({}), device, source.open(run, source.prepare(run)))
    balance = trainer.state.parallel.load_balancer
    losses, loads, began = list[float](), list[list[float]](), time.perf_counter()
    for row in trainer.run_steps():
        losses.append(float(row["loss"]))
        if balance is not None and balance.last_stats is not None:
            rows = balance.last_stats[:, : balance.num_experts]
            loads.append((rows.amax(1) / rows.mean(1)).tolist())
    assert trainer.state.val_loss is not None, "no document is held out"
    after = loads[run.optim.warmup_steps if run.optim.warmup_steps < asked.steps else -1 :]
    seconds = time.perf_counter() - began
    return Curve(model, seed, losses, trainer.state.val_loss, after, seconds)


def told(curves: Sequence[Curve], model: str) -> tuple[float, float, list[float]]:
    """Returns means over seeds: training loss, held-out loss, load of each layer; prints them."""
    mine = [curve for curve in curves if curve.model == model]
    tail = statistics.fmean(curve.tail for curve in mine)
    held = statistics.fmean(curve.held_out for curve in mine)
    each = ", ".join(f"{curve.held_out:.3f}" for curve in mine)
    loads = [statistics.fmean(layer) for layer in zip(*(c.layers for c in mine), strict=True)]
    print(f"{model:12} training {tail:.4f}  held out {held:.4f} ({each})", end="")
    if loads:
        worst = max(load for curve in mine for step in curve.loads for load in step)
        words = " ".join(f"{load:.2f}" for load in loads)
        print(f"  load of layers {words}, maximum of a step {worst:.2f}", end="")
    print(flush=True)
    return tail, held, loads


def judged(curves: Sequence[Curve], asked: argparse.Namespace) -> bool:
    """Prints whether the mixture learns more and is balanced; returns whether both hold."""
    dense, mixture = (told(curves, model) for model in (asked.dense, asked.mixture))
    better = mixture[0] < dense[0] and mixture[1] < dense[1]
    balanced = max(mixture[2]) < LIMIT
    print(
        f"{asked.mixture} learns {'more' if better else 'no more'} than {asked.dense}, its experts "
        f"are {'balanced' if balanced else f'not balanced (below {LIMIT})'}"
    )
    return better and balanced


def main(words: Sequence[str] | None = None) -> int:
    """Trains all models and prints a table."""
    asked = settings(words)
    check(MODEL_SIZES[asked.dense], MODEL_SIZES[asked.mixture])
    tokens = asked.steps * asked.batch * asked.seq
    print(f"{asked.steps} steps, {tokens:,} tokens, {asked.held_out:.0%} of the documents held out")
    curves = list[Curve]()
    for seed in range(asked.seeds):
        for model in (asked.dense, asked.mixture):
            curves.append(trained(asked, model, seed))
            one = curves[-1]
            print(
                f"seed {seed} {model:12} training {one.tail:.4f}  held out {one.held_out:.4f}  "
                f"{one.seconds:.0f} s",
                flush=True,
            )
    if asked.json:
        Path(asked.json).write_text(json.dumps([dataclasses.asdict(curve) for curve in curves]))
    return 0 if judged(curves, asked) or asked.smoke else 1


if __name__ == "__main__":
    raise SystemExit(main())
