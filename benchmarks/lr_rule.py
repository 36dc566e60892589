"""Learning rates of six small shapes, with and without the rule lr_eff / (width · sqrt(depth)).

Usage: python benchmarks/lr_rule.py [--seeds 3] [--processes 2] [--csv FILE]

Decoders of the Gemstones' proportions (with heads of 16 elements) and six shapes are trained 60
steps on bytes of Python's standard library, with five values of lr_eff under optim.lr_rule =
"gemstone". A run with lr_eff is also the run with the plain rate lr_eff / (width · sqrt(depth)), so
that one set of runs shows both. The best value of a shape is the minimum of a parabola through the
smallest held-out loss and its neighbours, over log lr. The claims, fixed before the first run with
these seeds, about the mean loss over seeds:

* the best lr_eff of the six shapes differ by a factor of at most 2
* the best plain rates differ by a factor of at least 4
* the difference of both factors (their logarithms, by seed) is above one standard error

The exit code is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from job_pool import run_jobs
from script_parser import ScriptParser

from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import (
    CheckpointConfig,
    DataConfig,
    DecoderModelConfig,
    OptimConfig,
    TrainConfig,
)
from ranvier.data.dataset import open_data
from ranvier.errors import RanvierError
from ranvier.grid import Grid
from ranvier.train.prepare_data import tokenize_corpora
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

SHAPES = ((32, 2), (64, 2), (64, 6), (128, 2), (128, 6), (256, 2))
"""Width and depth."""
EFFECTIVE_RATES = tuple(2.0**power for power in range(-2, 3))
HEAD_DIM = 16
SEQ_LEN = 64
BATCH = 4
STEPS = 60
VOCAB = 260
RULE_LIMIT = 2.0
PLAIN_LIMIT = 4.0

Shape = tuple[int, int]


@dataclass(frozen=True)
class Result:
    """The held-out loss of a run; infinite if it diverged."""

    shape: Shape
    rate: float
    """lr_eff."""
    seed: int
    loss: float
    seconds: float


def make_run(shape: Shape, rate: float, seed: int, steps: int, eval_samples: int) -> RunConfig:
    """Returns the settings of a run."""
    width, depth = shape
    heads = width // HEAD_DIM
    return RunConfig(
        model=DecoderModelConfig(
            size="small",
            layers=depth,
            embed=width,
            heads=heads,
            kv_heads=heads // 2,
            head_dim=HEAD_DIM,
            mlp=4 * width,
            vocab=VOCAB,
            max_seq=SEQ_LEN,
            activation="geglu",
            init_std=1.0 / math.sqrt(width),
        ),
        data=DataConfig(
            seq_len=SEQ_LEN, tokenizer="bytes", max_bytes=1_000_000, validation_fraction=0.05
        ),
        optim=OptimConfig(lr=rate, lr_rule="gemstone", warmup_steps=min(10, steps // 2)),
        plan=Plan(global_batch=BATCH),
        train=TrainConfig(
            steps=steps,
            seed=seed,
            device="cpu",
            eval_interval=steps,
            eval_samples=eval_samples,
        ),
        checkpoint=CheckpointConfig(interval=-1),
    )


def train_shape(shape: Shape, rate: float, seed: int, steps: int, eval_samples: int) -> Result:
    """Trains one model, and evaluates."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    device = torch.device("cpu")
    run = resolve_run(
        make_run(shape, rate, seed, steps, eval_samples),
        ResolveContext(world_size=1, device=device),
    )
    data = open_data(
        tokenize_corpora(run), seq=SEQ_LEN, seed=seed, held_out=run.data.validation_fraction
    )
    loss: float | None = None
    try:
        *_, last = Trainer.from_run(run, Grid({}), device, data).run_steps()
        loss = last["val_loss"]
    except RanvierError:
        # A run with too large a rate may be stopped for losses that are not finite.
        pass
    finite = math.inf if loss is None else loss
    return Result(shape, rate, seed, finite, time.perf_counter() - start)


def best_rate(losses: Mapping[float, float]) -> float:
    """Returns the minimum of a parabola through the smallest loss and its neighbours."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda k: losses[rates[k]])
    if not 0 < i < len(rates) - 1:
        return rates[i]
    before, here, after = (losses[rates[i + k]] for k in (-1, 0, 1))
    if math.isinf(before) or math.isinf(after):
        return rates[i]
    bend = before - 2.0 * here + after
    shift = 0.5 * (before - after) / bend if bend > 0.0 else 0.0
    return rates[i] * (rates[i + 1] / rates[i]) ** shift


def rule_divisor(shape: Shape) -> float:
    """Returns width · sqrt(depth)."""
    return shape[0] * math.sqrt(shape[1])


def spreads(best: Mapping[Shape, float]) -> tuple[float, float]:
    """Returns the largest over the smallest best lr_eff, and the same of plain rates."""
    plain = [rate / rule_divisor(shape) for shape, rate in best.items()]
    return max(best.values()) / min(best.values()), max(plain) / min(plain)


def best_by_shape(results: Sequence[Result]) -> dict[Shape, float]:
    """Returns the best lr_eff of each shape, by mean losses."""
    found = {}
    for shape in dict.fromkeys(one.shape for one in results):
        losses = {
            rate: statistics.fmean(
                one.loss for one in results if (one.shape, one.rate) == (shape, rate)
            )
            for rate in EFFECTIVE_RATES
        }
        found[shape] = best_rate(losses)
    return found


def check_claims(mean: tuple[float, float], by_seed: Sequence[tuple[float, float]]) -> list[str]:
    """Returns the claims that do not hold. Spreads of lr_eff and of plain rates."""
    failed = []
    rule, plain = mean
    if rule > RULE_LIMIT:
        failed.append(f"the best lr_eff differ by a factor of {rule:.2f}, above {RULE_LIMIT:g}")
    if plain < PLAIN_LIMIT:
        failed.append(f"the best plain rates differ by a factor of {plain:.2f} only")
    gains = [math.log(theirs / own) for own, theirs in by_seed]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    if statistics.fmean(gains) <= error:
        failed.append("the difference of both is within one standard error")
    return failed


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--seeds 1 --shapes 2 --steps 2 --samples 4 --processes 1 --csv {folder}/rows.csv",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first of the shapes")
    parser.add_argument("--samples", type=int, default=256, help="held-out samples to evaluate")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--csv", help="file to write all results to")
    return parser.parse_args()


def main() -> None:
    """Runs all cases, prints the table and judges the claims."""
    asked = settings()
    start = time.perf_counter()
    shapes = SHAPES[: asked.shapes]
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    # Tokenized once, before processes read it.
    tokenize_corpora(make_run(shapes[0], 1.0, 0, asked.steps, asked.samples))
    jobs = [
        (shape, rate, seed, asked.steps, asked.samples)
        for seed in seeds
        for shape in shapes
        for rate in EFFECTIVE_RATES
    ]
    results = run_jobs(train_shape, jobs, processes=asked.processes)
    if asked.csv:
        write_csv(Path(asked.csv), results)
    best = best_by_shape(results)
    print("shape    " + "".join(f"{rate:>8g}" for rate in EFFECTIVE_RATES) + "   best lr_eff, lr")
    for shape in shapes:
        cells = []
        for rate in EFFECTIVE_RATES:
            losses = [one.loss for one in results if (one.shape, one.rate) == (shape, rate)]
            cells.append(f"{statistics.fmean(losses):>8.3f}")
        name = f"{shape[0]}x{shape[1]}"
        plain = best[shape] / rule_divisor(shape)
        print(f"{name:9}" + "".join(cells) + f"   {best[shape]:.2f}, {plain:.4f}")
    mean = spreads(best)
    by_seed = [
        spreads(best_by_shape([one for one in results if one.seed == seed])) for seed in seeds
    ]
    print(f"spread of the best lr_eff {mean[0]:.2f}, of the best plain lr {mean[1]:.2f}")
    print("by seed: " + ", ".join(f"{own:.2f} and {theirs:.2f}" for own, theirs in by_seed))
    failed = check_claims(mean, by_seed)
    for line in failed:
        print(f"does not hold: {line}")
    print(f"{len(results)} runs in {time.perf_counter() - start:.0f} s")
    print("FAIL" if failed else "pass")
    raise SystemExit(1 if failed and not asked.smoke else 0)


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Writes a row per run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["width", "depth", "lr_eff", "seed", "held_out_loss", "seconds"])
        for one in results:
            loss = f"{one.loss:.5f}" if math.isfinite(one.loss) else ""
            writer.writerow([*one.shape, one.rate, one.seed, loss, f"{one.seconds:.1f}"])


if __name__ == "__main__":
    main()
