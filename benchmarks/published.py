"""The planner against published runs of other frameworks: step time, ranking, memory.

    python benchmarks/published.py [--show SOURCE] [--fit] [--json FILE]

Each source is predicted with constants fitted without it: four for a type of device (`Reach`), by
the other sources that ran on it. A source that alone has its device is predicted from data sheets
only, and reported apart. The null model knows no communication: FLOPs, bubble and one constant for
a device and a precision.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import published_rows as published
from published_rows import Row

from ranvier.planner.cluster import Reach
from ranvier.planner.predict import Prediction, predict

LIMITS = {"16-bit": 10.0, "8-bit": 15.0, "alone": 20.0}
SWEEP = ("2022-02-25", 72, 14336, (2016, 2048))
NOISE = 0.06
GIB = 2**30


@dataclass(frozen=True)
class Guess:
    """A run and what is predicted for it."""

    row: Row
    prediction: Prediction
    bytes: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.prediction.total / self.row.seconds - 1

    @property
    def fits(self) -> bool:
        """Whether it is called to fit."""
        return self.prediction.fits


def family(row: Row) -> str:
    """The type of a device: parts with more memory are the same."""
    assert row.device is not None
    name = row.device.name
    return name.split("-")[0] if name.startswith("A100") else name


@cache
def settled(row: Row) -> str:
    """What is computed again where a run does not say: the least that fits."""
    for word in ("none", "selective"):
        layout = published.layout(row, word)
        if predict(
            published.job(row), layout, published.machine(row), published.framework(row)
        ).fits:
            return word
    return "full"


def guess(row: Row, reach: Reach | None) -> Guess:
    """The prediction for a run; reach: fitted constants, None: those of no fit."""
    machine, runtime = published.machine(row), published.framework(row)
    machine = replace(machine, device=replace(machine.device, reach=reach or Reach()))
    layout = published.layout(row, "" if row.facts["recompute"] else settled(row))
    found = predict(published.job(row), layout, machine, runtime)
    size = found.memory.total
    if "nvidia-smi" in row.facts["mem_basis"]:
        size += runtime.context
    return Guess(row, found, size)


# ---- fit --------------------------------------------------------------------------------

BOUNDS = ((0.6, 1.04), (0.6, 1.04), (0.35, 0.95), (0.5, 0.95))


def loss(rows: Iterable[Row], reach: Reach) -> float:
    """Mean over sources of their mean error, held near usual constants where data say nothing."""
    by = defaultdict(list)
    for row in rows:
        by[row.source].append(abs(math.log1p(guess(row, reach).error)))
    usual, found = astuple(Reach()), astuple(reach)
    pull = sum(math.log(a / b) ** 2 for a, b in zip(found, usual, strict=True))
    return statistics.fmean(map(statistics.fmean, by.values())) + 0.003 * pull


@cache
def fitted(rows: tuple[Row, ...]) -> Reach:
    """The four constants that fit best, by steps along each in turn that get shorter."""
    best = list(astuple(Reach()))
    least, step = loss(rows, Reach(*best)), 0.08
    while step > 0.008:
        better = False
        for i, (low, high) in enumerate(BOUNDS):
            for way in (1 + step, 1 / (1 + step)):
                tried = [*best[:i], min(max(best[i] * way, low), high), *best[i + 1 :]]
                found = loss(rows, Reach(*tried))
                if found < least - 1e-6:
                    best, least, better = tried, found, True
        step = step if better else step / 2
    return Reach(*(round(x, 3) for x in best))


def left_out(rows: Sequence[Row]) -> list[tuple[Guess, bool]]:
    """Each run with its source left out, and whether its source alone has its device."""
    found = []
    for row in rows:
        others = tuple(r for r in rows if family(r) == family(row) and r.source != row.source)
        found.append((guess(row, fitted(others) if others else None), not others))
    return found


# ---- null model -------------------------------------------------------------------------


def work(row: Row) -> float:
    """FLOPs of a device with what is computed again, and the bubble."""
    plan = published.layout(row, "none").plan
    again = 4 / 3 if plan.recompute == "full" else 1.0
    flops = guess(row, None).prediction.flops * again / plan.world
    return flops * (1 + (plan.pipe - 1) / (plan.chunks * plan.micro_batches))


def null_errors(rows: Sequence[Row]) -> dict[str, float]:
    """The null model's error of each run, its constants fitted to all of them."""
    by = defaultdict(list)
    for row in rows:
        by[family(row), row.narrow].append(row)
    found = {}
    for several in by.values():
        rate = statistics.median(work(r) / r.seconds for r in several)
        found |= {r.name: work(r) / rate / r.seconds - 1 for r in several}
    return found


# ---- figures ----------------------------------------------------------------------------


def mape(errors: Iterable[float]) -> float:
    """Mean absolute error in percent."""
    return 100 * statistics.fmean(map(abs, errors))


def tau(measured: Sequence[float], guessed: Sequence[float]) -> float:
    """Kendall's tau over pairs that differ by more than the noise."""
    signs = []
    for i, j in combinations(range(len(measured)), 2):
        one, other = measured[i], measured[j]
        if abs(one - other) > NOISE * min(one, other):
            signs.append(1 if (one - other) * (guessed[i] - guessed[j]) > 0 else -1)
    return statistics.fmean(signs)


def is_sweep(row: Row) -> bool:
    """Whether a run is one of the layout sweep."""
    date, layers, hidden, batches = SWEEP
    same = row.number("layers") == layers and row.number("hidden") == hidden
    dated = date in row.facts["source_locator"] and row.number("heads") == 64
    return row.source == "BLOOM" and same and dated and row.number("global_batch") in batches


def verdict(text: str, value: float, limit: float, *, least: bool = False) -> bool:
    """Print a figure with its limit."""
    good = value >= limit if least else value <= limit
    sign = ">=" if least else "<="
    print(f"{text:<58}{value:8.2f}  ({sign} {limit:g})  {'pass' if good else 'FAIL'}")
    return good


def times(guesses: Sequence[tuple[Guess, bool]], null: dict[str, float]) -> None:
    """Errors of the step time by source, and their means."""
    by = defaultdict(list)
    for one, alone in guesses:
        kind = "8-bit" if one.row.narrow else "16-bit"
        by["alone" if alone else kind, one.row.source, family(one.row), kind].append(one)
    print(f"\n{'':8}{'source':10}{'device':24}{'':8}runs  MAPE   bias    max   null")
    means = defaultdict(list)
    for (group, source, device, kind), several in sorted(by.items()):
        errors = [one.error for one in several]
        worst = max(errors, key=abs)
        zero = mape(null[one.row.name] for one in several)
        print(
            f"{group:8}{source:10}{device:24}{kind:8}{len(several):4}{mape(errors):6.1f}"
            f"{100 * statistics.fmean(errors):+7.1f}{100 * worst:+7.1f}{zero:7.1f}"
        )
        means[group, source] += errors
    print()
    for group, limit in LIMITS.items():
        found = [mape(some) for (name, _), some in means.items() if name == group]
        if found:
            verdict(f"step time, {group}: mean over sources, %", statistics.fmean(found), limit)
    print(f"null model, all runs: {mape(null.values()):.1f} %")


def ranking(guesses: Sequence[Guess], null: dict[str, float]) -> None:
    """The layout sweep."""
    sweep = [one for one in guesses if is_sweep(one.row)]
    each = [one.row.number("global_batch") for one in sweep]
    measured = [one.row.seconds / n for one, n in zip(sweep, each, strict=True)]
    guessed = [one.prediction.total / n for one, n in zip(sweep, each, strict=True)]
    zero = [m * (1 + null[one.row.name]) for m, one in zip(measured, sweep, strict=True)]
    print(f"\nlayout sweep of {len(sweep)} runs")
    verdict("tau", tau(measured, guessed), 0.7, least=True)
    order = sorted(range(len(sweep)), key=guessed.__getitem__)
    verdict("regret of the first pick, %", 100 * (measured[order[0]] / min(measured) - 1), 5)
    top = min(measured[i] for i in order[:3])
    verdict("best of the first three over the best, %", 100 * (top / min(measured) - 1), 3)
    first = min(range(len(sweep)), key=zero.__getitem__)
    print(
        f"null model: tau {tau(measured, zero):.2f}, "
        f"regret {100 * (measured[first] / min(measured) - 1):.1f} %"
    )


def memory(rows: Sequence[Row]) -> None:
    """Memory, and runs that did not fit."""
    guesses = [guess(row, None) for row in rows]
    known = [one for one in guesses if one.row.gib and not one.row.oom]
    errors = [one.bytes / GIB / one.row.gib - 1 for one in known]
    print(f"\nmemory of {len(known)} runs")
    verdict("MAPE, %", mape(errors), 20)
    verdict("most under, %", -100 * min(errors), 5)
    for one, error in zip(known, errors, strict=True):
        if error < -0.05:
            print(f"  {one.row.name}: {one.row.gib} GiB, predicted {one.bytes / GIB:.1f}")
    failed = [one for one in guesses if one.row.oom]
    called = sum(not one.fits for one in failed)
    verdict(f"runs out of memory called so, of {len(failed)}", called, len(failed), least=True)
    ran = [one for one in guesses if one.row.seconds and not one.row.oom]
    false = [one.row.name for one in ran if not one.fits]
    verdict(f"runs that ran called out of memory, % of {len(ran)}", 100 * len(false) / len(ran), 5)
    print("  ", *false)


def interval(guesses: Sequence[Guess]) -> tuple[float, float]:
    """Measured over predicted, between which 80 % of the runs lie."""
    ratios = sorted(1 / (1 + one.error) for one in guesses)
    low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.1, 0.9))
    return low, high


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--show", default="", help="print each run of a source")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all sources")
    parser.add_argument("--data", type=Path, default=published.DATA / "published_runs.csv")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    scored = [row for row in published.rows(args.data) if row.scored]
    timed = [row for row in scored if row.seconds and not row.oom]
    if args.fit:
        for name in sorted({family(row) for row in timed}):
            several = tuple(row for row in timed if family(row) == name)
            if len({row.source for row in several}) > 1:
                print(name, fitted(several), f"{loss(several, fitted(several)):.4f}")
        return
    guesses, null = left_out(timed), null_errors(timed)
    for one, _ in guesses:
        if one.row.source == args.show:
            parts = {name: round(x, 2) for name, x in one.prediction.parts.items() if x}
            print(
                f"{one.row.name} {one.row.seconds:8.2f} {one.prediction.total:8.2f} "
                f"{100 * one.error:+6.1f} % {parts}"
            )
    times(guesses, null)
    ranking([one for one, _ in guesses], null)
    memory(scored)
    low, high = interval([one for one, _ in guesses])
    print(f"\nmeasured over predicted: 80 % of the runs between {low:.2f} and {high:.2f}")
    if args.json:
        facts = {g.row.name: [g.row.seconds, g.prediction.total] for g, _ in guesses}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
