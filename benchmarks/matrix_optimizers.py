"""Checks at a small scale what optimizers of whole matrices claim: fewer steps to the same loss.

    python benchmarks/matrix_optimizers.py              both claims, on a GPU if there is one
    python benchmarks/matrix_optimizers.py muon         one of them
    python benchmarks/matrix_optimizers.py --device cpu  on a CPU (two cores: 14 minutes for 8 runs)
    python benchmarks/matrix_optimizers.py --tiny       a few steps, as a check

muon: AdamW trains the default job (model `tiny`) for 300 steps. Muon has 0.8 times as many steps,
with a schedule as long, and must reach the final held-out loss of AdamW. Each has the best of four
learning rates.

jorge: SGD with momentum trains the same decoder for 200 steps, and a small MLP on ill-conditioned
inputs for 400. Jorge has SGD's learning rate and 0.7 times as many steps, and must reach the final
loss of SGD (held-out loss of the decoder, training loss of the MLP). SGD has the best of four
learning rates. Jorge leaves embeddings and norms of the decoder to AdamW, so that it is compared
with two baselines: the SGD of matrices, which leaves the same weights to AdamW (it is Jorge without
its preconditioners), and `optim.name = "sgd"`, which updates all weights.

Learning rates are chosen with a seed that is not one of those compared. Means over three seeds are
compared; a difference counts if it exceeds one standard error. Exit status 1 if a claim does not
hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from job_pool import run_jobs
from script_parser import ScriptParser
from torch import Tensor

from ranvier.config import run as runs
from ranvier.data.run_data import data_source
from ranvier.grid import Grid
from ranvier.optim import jorge, sgd
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

TUNING_SEED = 1000
"""Seed of the runs that choose learning rates."""
DECODER_RATES = {"adamw": (7.5e-4, 1.5e-3, 3e-3, 6e-3), "muon": (1.5e-3, 3e-3, 6e-3, 1.2e-2)}
"""Four for each, so that the best is not at the end of its list."""
MUON_SHARE, JORGE_SHARE = 0.8, 0.7
"""Steps of Muon and Jorge, as a share of those of AdamW and SGD."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Job:
    """A run of one optimizer."""

    problem: str
    """`decoder` or `mlp`."""
    optimizer: str
    lr: float
    seed: int
    steps: int
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other settings of the decoder, by section."""
    device: str = "cpu"
    """Device of the decoder. The MLP is too small for a GPU."""

    @property
    def title(self) -> str:
        """Problem, optimizer, learning rate and seed."""
        return f"{self.problem} {self.optimizer} lr {self.lr:g} seed {self.seed}"


@dataclass(frozen=True)
class Curve:
    """Losses of a run."""

    job: Job
    losses: dict[int, float]
    """Loss after some numbers of steps."""
    seconds: float

    @property
    def final(self) -> float:
        """The last loss; infinite if the run has diverged."""
        loss = self.losses.get(self.job.steps, math.inf)
        return loss if math.isfinite(loss) else math.inf

    def first_below(self, loss: float) -> int | None:
        """Returns the first measured step with at most a loss; None without one."""
        return next((step for step, found in self.losses.items() if found <= loss), None)


# ---- the decoder --------------------------------------------------------------------------------


SGD_OF_MATRICES = "sgd of matrices"
"""SGD with momentum for hidden matrices, and AdamW for the rest."""


SGD_RATES = {
    ("mlp", "sgd"): (0.2, 0.4, 0.8, 1.6),
    ("decoder", SGD_OF_MATRICES): (3e-4, 1e-3, 3e-3, 1e-2),
    ("decoder", "sgd"): (0.1, 0.3, 1.0, 3.0),
}
"""Learning rates by problem and baseline of Jorge."""


def without_preconditioners() -> ExitStack:
    """Makes Jorge the SGD of matrices: grafting gives G the norm of the momentum of SGD."""
    stack = ExitStack()
    keep_side: Any = lambda side, *_, **__: side  # noqa: E731
    stack.enter_context(mock.patch.object(jorge, "precondition_update", keep_side))
    keep_grad: Any = lambda left, grad, right, **_: grad  # noqa: E731
    stack.enter_context(mock.patch.object(jorge, "precondition", keep_grad))
    return stack


def train_decoder(job: Job) -> Curve:
    """Trains the default job with an optimizer."""
    if job.optimizer == SGD_OF_MATRICES:
        with without_preconditioners():
            curve = train_decoder(dataclasses.replace(job, optimizer="jorge"))
        return dataclasses.replace(curve, job=job)
    device = torch.device(job.device)
    tables: dict[str, dict[str, Any]] = {
        "optim": {"name": job.optimizer, "lr": job.lr},
        "train": {
            "steps": job.steps,
            "seed": job.seed,
            "device": job.device,
            # Equal on all devices: learning rates are compared, not speed.
            "dtype": "fp32",
            "eval_interval": max(job.steps // 10, 1),
            "eval_samples": 128,
        },
        "checkpoint": {"interval": -1},
        "plan": {"compile": "off"},
    }
    for section, values in job.overrides.items():
        tables.setdefault(section, {}).update(values)
    run = resolve_run(runs.run_from_tables(tables), ResolveContext(world_size=1, device=device))
    source = data_source(run.model)
    trainer = Trainer.from_run(run, Grid({}), device, source.open(run, source.prepare(run)))
    losses: dict[int, float] = {}
    start = time.perf_counter()
    for row in trainer.run_steps():
        if row["val_loss"] is not None:
            losses[int(row["step"]) + 1] = float(row["val_loss"])
    return Curve(job, losses, time.perf_counter() - start)


# ---- the MLP ------------------------------------------------------------------------------------


def make_mlp_data(seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs `[4096, 64]` whose scales span two decades, and labels of a random network."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, 64, generator=generator) * torch.logspace(0, -2, 64)
    rotation, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator))
    x = x @ rotation
    w1, w2 = (0.6 * torch.randn(shape, generator=generator) for shape in ((128, 64), (10, 128)))
    b1, b2 = (0.6 * torch.randn(size, generator=generator) for size in (128, 10))
    labels = F.linear(torch.tanh(F.linear(8 * x, w1, b1)), w2, b2).argmax(-1)
    return x, labels


class MatrixState:
    """States and update of a matrix or vector under SGD or Jorge."""

    def __init__(self, weight: Tensor, optimizer: str) -> None:
        self.weight = weight
        self.sgd_momentum = torch.zeros_like(weight)
        self.momentum = torch.zeros_like(weight)
        # Jorge leaves vectors to SGD.
        self.is_preconditioned = optimizer == "jorge" and weight.ndim == 2
        if self.is_preconditioned:
            self.left, self.right = (
                jorge.initial_side(1, size, like=weight) for size in weight.shape
            )

    def update(self, grad: Tensor, lr: float) -> None:
        """Updates states and weight."""
        if not self.is_preconditioned:
            self.sgd_momentum = sgd.momentum_update(self.sgd_momentum, grad, beta=MOMENTUM)
            self.weight.copy_(sgd.weight_update(self.weight, self.sgd_momentum, lr=lr))
            return
        batch = grad[None]
        self.left = jorge.precondition_update(self.left, jorge.statistics(batch, "left"))
        self.right = jorge.precondition_update(self.right, jorge.statistics(batch, "right"))
        (preconditioned,) = jorge.precondition(self.left, batch, self.right)
        self.momentum, self.sgd_momentum = jorge.momentum_update(
            self.momentum, self.sgd_momentum, grad, preconditioned, beta=MOMENTUM
        )
        norms = {"norm": self.momentum.norm(), "sgd_norm": self.sgd_momentum.norm()}
        self.weight.copy_(jorge.weight_update(self.weight, self.momentum, **norms, lr=lr))


def train_mlp(job: Job) -> Curve:
    """Trains an MLP of two hidden layers; the learning rate falls by 10 after each third."""
    x, labels = make_mlp_data(job.seed)
    generator = torch.Generator().manual_seed(job.seed + 1)
    widths = (64, 128, 128, 10)
    weights: list[Tensor] = []
    for inputs, outputs in itertools.pairwise(widths):
        # The default range of `torch.nn.Linear`.
        for shape in ((outputs, inputs), (outputs,)):
            draw = torch.rand(shape, generator=generator)
            weights.append(((2 * draw - 1) / inputs**0.5).requires_grad_())
    states = [MatrixState(weight, job.optimizer) for weight in weights]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs
        for i in range(0, len(weights), 2):
            hidden = F.linear(hidden, weights[i], weights[i + 1])
            if i < len(weights) - 2:
                hidden = F.relu(hidden)
        return F.cross_entropy(hidden, targets)

    losses: dict[int, float] = {}
    start = time.perf_counter()
    for step in range(job.steps):
        lr = job.lr * 0.1 ** (3 * step // job.steps)
        chosen = torch.randint(0, len(x), (256,), generator=generator)
        grads = torch.autograd.grad(loss_of(x[chosen], labels[chosen]), weights)
        with torch.no_grad():
            for state, grad in zip(states, grads, strict=True):
                state.update(grad, lr)
            if (step + 1) % max(job.steps // 20, 1) == 0 or step + 1 == job.steps:
                losses[step + 1] = loss_of(x, labels).item()
    return Curve(job, losses, time.perf_counter() - start)


# ---- comparison ---------------------------------------------------------------------------------


def train(job: Job) -> Curve:
    """Trains one job on one core."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    return (train_mlp if job.problem == "mlp" else train_decoder)(job)


@dataclass
class Comparison:
    """Runs jobs in parallel and compares two optimizers."""

    run_all: Callable[[Sequence[tuple[Job]]], list[Curve]]
    seeds: int
    max_rates: int | None = None
    """Number of learning rates to choose from; None: all."""
    curves: list[Curve] = field(default_factory=list)

    def run_jobs(self, jobs: Sequence[Job]) -> list[Curve]:
        """Runs jobs and prints their final losses."""
        found = self.run_all([(job,) for job in jobs])
        self.curves += found
        for curve in found:
            print(
                f"  {curve.job.title:46} {curve.job.steps:4} steps, final loss "
                f"{curve.final:.4f}, {curve.seconds:.0f} s",
                flush=True,
            )
        return found

    def choose_rates(self, groups: Sequence[Sequence[Job]]) -> list[Job]:
        """Returns the job with the lowest final loss of each group."""
        groups = [group[: self.max_rates] for group in groups]
        jobs = [job for group in groups for job in group]
        found = iter(self.run_jobs(jobs))
        best = []
        for group in groups:
            curve = min([next(found) for _ in group], key=lambda curve: curve.final)
            best.append(curve.job)
            if len(group) > 1 and curve.job.lr in (group[0].lr, group[-1].lr):
                print(f"  {curve.job.title}: the best learning rate is at the end of the list")
        return best

    def compare(self, reference: Job, faster: Job) -> bool:
        """Prints whether an optimizer reaches the final loss of the reference in its own steps."""
        seeds = range(self.seeds)
        jobs = [dataclasses.replace(job, seed=s) for job in (reference, faster) for s in seeds]
        curves = self.run_jobs(jobs)
        theirs, ours = curves[: self.seeds], curves[self.seeds :]
        gaps = [a.final - b.final for a, b in zip(theirs, ours, strict=True)]
        gap = statistics.fmean(gaps)
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
        holds = gap > error
        target = statistics.fmean(curve.final for curve in theirs)
        crossings = [curve.first_below(target) for curve in ours]
        print(
            f"{reference.problem}: {reference.optimizer} has a loss of {target:.4f} after "
            f"{reference.steps} steps (lr {reference.lr:g}); {faster.optimizer} has "
            f"{statistics.fmean(curve.final for curve in ours):.4f} after {faster.steps} (lr "
            f"{faster.lr:g}), less by {gap:.4f} with a standard error of {error:.4f}, and falls "
            f"below that of {reference.optimizer} after steps {crossings}: the claim "
            f"{'holds' if holds else 'does not hold'}",
            flush=True,
        )
        return holds


def check_muon(
    comparison: Comparison, steps: int, overrides: dict[str, dict[str, Any]], device: str
) -> bool:
    """Muon against AdamW on the decoder."""
    fewer = round(MUON_SHARE * steps)
    groups = [
        [
            Job("decoder", name, lr, TUNING_SEED, count, overrides, device)
            for lr in DECODER_RATES[name]
        ]
        for name, count in (("adamw", steps), ("muon", fewer))
    ]
    adamw, muon = comparison.choose_rates(groups)
    return comparison.compare(adamw, muon)


def check_jorge(
    comparison: Comparison,
    steps: dict[str, int],
    overrides: dict[str, dict[str, Any]],
    device: str,
) -> bool:
    """Jorge against SGD on the decoder and on the MLP."""
    # Without decay, whose strength would depend on the learning rate.
    overrides = {**overrides, "optim": {"weight_decay": 0.0}}
    results = []
    for problem, baseline in SGD_RATES:
        count = steps[problem]
        group = [
            Job(problem, baseline, lr, TUNING_SEED, count, overrides, device)
            for lr in SGD_RATES[problem, baseline]
        ]
        (best,) = comparison.choose_rates([group])
        fewer = dataclasses.replace(best, optimizer="jorge", steps=round(JORGE_SHARE * count))
        results.append(comparison.compare(best, fewer))
    return all(results)


def main(words: Sequence[str] | None = None) -> int:
    """Checks the claims."""
    parser = ScriptParser(
        __doc__, smoke="jorge --tiny --device cpu --processes 1 --json {folder}/rows.json"
    )
    parser.add_argument("claims", nargs="*", help="muon, jorge; both by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few steps, one seed, two rates")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the decoder"
    )
    # More processes than 8 only wait for one GPU.
    cores = min(len(os.sched_getaffinity(0)), 8)
    parser.add_argument("--processes", type=int, default=cores, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="file to write all losses to")
    asked = parser.parse_args(words)
    claims = asked.claims or ["muon", "jorge"]
    for name in claims:
        if name not in ("muon", "jorge"):
            parser.error(f"{name!r} is not a claim. Use muon or jorge.")
    steps = {"adamw": 300, "decoder": 200, "mlp": 400}
    overrides: dict[str, dict[str, Any]] = {}
    if asked.tiny:
        steps = dict.fromkeys(steps, 5)
        overrides = {"model": {"layers": 1, "vocab": 260}, "plan": {"global_batch": 2}}
        overrides["data"] = {"seq_len": 16, "tokenizer": "bytes"}
        # The few documents of a small corpus may have none in a small fraction.
        overrides["data"]["validation_fraction"] = 0.2
        overrides["train"] = {"eval_samples": 4, "eval_interval": 5}
        asked.seeds = 1
    start = time.perf_counter()
    comparison = Comparison(
        partial(run_jobs, train, processes=asked.processes),
        asked.seeds,
        max_rates=2 if asked.tiny else None,
    )
    results = []
    if "muon" in claims:
        results.append(check_muon(comparison, steps["adamw"], overrides, asked.device))
    if "jorge" in claims:
        results.append(check_jorge(comparison, steps, overrides, asked.device))
    print(f"{time.perf_counter() - start:.0f} s, {asked.processes} processes")
    if asked.json is not None:
        rows = [dataclasses.asdict(curve) for curve in comparison.curves]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(results) or asked.tiny else 1


if __name__ == "__main__":
    raise SystemExit(main())
