"""Do the intervals of `ranvier scaling-laws` cover the truth, and do its designs help?

    python benchmarks/scaling_laws.py coverage     about 25 minutes on two cores
    python benchmarks/scaling_laws.py design       a few minutes

coverage: losses of known laws at the shapes and tokens of the 22 runs of the Gemstones suite, 50
each, with independent noise of 1 %. In how many of 100 trials does the 90 % interval of the
exponent x in N ~ C^x contain the true one, and how wide is it?

design: the six runs of `--design 6 --budget 1e17`, against six runs with equal FLOPs and equally
spaced log N between the same smallest and largest model. Losses of known laws with noise of 0.3 %;
root mean square error of x over 100 draws. A design does not assume the third law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from script_parser import ScriptParser

from ranvier.scaling.bootstrap import Interval, draw_runs, resample_law
from ranvier.scaling.design import (
    CHINCHILLA,
    CHINCHILLA_REFITTED,
    HOT_SHARES,
    DesignedRun,
    design_runs,
    equally_spaced_runs,
)
from ranvier.scaling.parametric import LAW_FORMS, LawFitter, ParametricLaw
from ranvier.scaling.rows import LossTable, collect_losses

GEMSTONES = Path(__file__).parents[1] / "examples" / "gemstones_hot.jsonl"
OTHER_LAW = ParametricLaw(
    LAW_FORMS[0], (0.40, 0.38), (math.log(1500.0), math.log(1500.0)), math.log(1.8)
)
LAWS = {
    "Chinchilla": CHINCHILLA,
    "Chinchilla, refitted": CHINCHILLA_REFITTED,
    "a law that designs do not assume": OTHER_LAW,
}
COVERAGE_NOISE = 0.01
DESIGN_NOISE = 0.003
BUDGET = 1e17


def noisy_losses(table: LossTable, law: ParametricLaw, noise: float, seed: int) -> LossTable:
    """Returns the table with the losses of a law, with independent relative noise."""
    generator = np.random.default_rng(seed)
    exact = law.predict(dict(table.values))
    loss = exact * np.exp(noise * generator.standard_normal(len(table)))
    return replace(table, values={**table.values, "loss": loss})


def fit_trial(table: LossTable, seed: int, *, resamples: int) -> tuple[str, float, Interval]:
    """Returns the law of a trial, the error of its exponent, and its interval."""
    name = ("Chinchilla", "Chinchilla, refitted")[seed % 2]
    noisy = noisy_losses(table, LAWS[name], COVERAGE_NOISE, seed)
    fitted = LawFitter(LAW_FORMS[0], noisy).fit(seed=seed)
    again = resample_law(noisy, fitted, draw_runs(noisy, resamples, seed))
    interval = Interval.of(one.compute_exponent for one in again)
    return name, fitted.compute_exponent - LAWS[name].compute_exponent, interval


def measure_coverage(trials: int, resamples: int) -> None:
    """Prints how often intervals cover the true exponent, and their widths."""
    start = time.perf_counter()
    table = collect_losses([GEMSTONES]).hot
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(partial(fit_trial, table, resamples=resamples), range(trials)))
    for law in [*dict.fromkeys(name for name, _, _ in found), "all laws"]:
        own = [one for one in found if law in (one[0], "all laws")]
        inside = sum(bounds.contains(LAWS[name].compute_exponent) for name, _, bounds in own)
        widths = [bounds.width for _, _, bounds in own]
        rmse = math.sqrt(sum(error**2 for _, error, _ in own) / len(own))
        print(
            f"{law}: inside in {inside} of {len(own)} trials, median width "
            f"{np.median(widths):.4f}, RMSE of the exponent {rmse:.4f}"
        )
    print(f"{trials} trials with {resamples} resamples: {time.perf_counter() - start:.0f} s")


def losses_of_runs(runs: Sequence[DesignedRun]) -> LossTable:
    """Returns a table of the losses along runs; the losses themselves are ones."""
    columns = [run.columns() for run in runs]
    values = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
    values["loss"] = np.ones(len(values["tokens"]))
    index = np.repeat(np.arange(len(runs)), len(HOT_SHARES))
    return LossTable(tuple(run.size for run in runs), index, values)


def exponent_error(table: LossTable, law: ParametricLaw, seed: int) -> float:
    """Returns the error of the fitted exponent for one draw of the noise."""
    noisy = noisy_losses(table, law, DESIGN_NOISE, seed)
    return LawFitter(LAW_FORMS[0], noisy).fit(seed=seed).compute_exponent - law.compute_exponent


def compare_designs(draws: int) -> None:
    """Prints the error of the exponent with a design and with equally spaced shapes."""
    runs = design_runs(6, BUDGET)
    spaced = equally_spaced_runs(runs, BUDGET)
    for title, several in (("design", runs), ("equally spaced", spaced)):
        shapes = ", ".join(f"{run.width}x{run.depth} ({run.tokens / 1e6:.0f}M)" for run in several)
        print(f"{title}, {sum(run.flops for run in several):.3g} FLOPs: {shapes}")
    with ProcessPoolExecutor(2) as pool:
        for name, law in LAWS.items():
            found = []
            for several in (runs, spaced):
                task = partial(exponent_error, losses_of_runs(several), law)
                errors = np.array(list(pool.map(task, range(draws))))
                found.append(math.sqrt(float(np.mean(errors**2))))
            print(
                f"{name}: RMSE of the exponent over {draws} draws: design {found[0]:.4f}, "
                f"equally spaced {found[1]:.4f}"
            )


def main() -> None:
    """Runs a comparison."""
    parser = ScriptParser(__doc__, smoke="design --trials 2 --resamples 2")
    parser.add_argument("what", choices=("coverage", "design"))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--resamples", type=int, default=200)
    asked = parser.parse_args()
    if asked.what == "coverage":
        measure_coverage(asked.trials, asked.resamples)
    else:
        compare_designs(asked.trials)


if __name__ == "__main__":
    main()
