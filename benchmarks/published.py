"""Compares the planner with published runs of other frameworks: step time, ranking, memory.

    python benchmarks/published.py [--data FILE] [--leave source|framework|machine|chip]
                                   [--show SOURCE] [--fit] [--json FILE]

Constants are fitted to the runs in `benchmarks/data` (`published_fit`), for any scored file. Each
run is predicted with constants that were fitted without its whole source (or framework, machine,
chip). A run with a word that is not modeled is reported and not scored. The null model has no
communication: FLOPs, bubble and one constant per device and precision.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import published_fit as fits
import published_rows as published
from published_fit import Terms, chip
from published_frameworks import COMMON, Framework
from published_rows import Row
from script_parser import ScriptParser

from ranvier.planner.predict import Prediction

LIMITS = {"16-bit": 11.0, "8-bit": 15.0}
SWEEP = ("2022-02-25", 72, 14336, (2016, 2048))
NOISE = 0.06
GIB = 2**30


@dataclass(frozen=True)
class Guess:
    """A run and its prediction."""

    row: Row
    prediction: Prediction
    bytes: float

    @property
    def error(self) -> float:
        """Predicted / measured seconds - 1."""
        return self.prediction.step_seconds / self.row.seconds - 1

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.prediction.fits_memory

    @property
    def inside(self) -> bool:
        """Whether the measured time is in the printed interval."""
        low, high = self.prediction.interval
        return low <= self.row.seconds <= high


def guess(row: Row, terms: Terms | None = None, runs: Framework | None = None) -> Guess:
    """Predicts a run. terms: None for the shipped ones. runs: None for its own framework."""
    runs = runs or published.framework(row)
    found = fits.prediction(row, terms or fits.shipped(row), runs)
    size = found.memory.total_bytes
    if "nvidia-smi" in row.facts["mem_basis"]:
        size += runs.context_bytes
    return Guess(row, found, size)


def timed(rows: Iterable[Row]) -> list[Row]:
    """Returns the runs whose step time is scored."""
    return [r for r in rows if r.scored and not r.unknown and r.seconds and not r.oom]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Returns the runs whose memory is scored."""
    known = [r for r in rows if r.scored and not r.unknown and r.gib and not r.oom]
    return [row for row in known if row.number("cp") == 1]


@cache
def given() -> tuple[Row, ...]:
    """Returns the runs that constants are fitted to."""
    return tuple(timed(published.rows()))


@cache
def fitted(group: str, name: str) -> Terms:
    """Returns constants fitted to the runs outside of a group; to all runs if it has none of
    them.
    """
    of = fits.GROUPS[group]
    return _fitted(tuple(row for row in given() if of(row) != name))


@cache
def _fitted(rows: tuple[Row, ...]) -> Terms:
    return fits.fit(rows)


def left_out(
    rows: Sequence[Row], group: str = "source", *, common: bool = False, fit: bool = True
) -> list[tuple[Guess, bool]]:
    """Returns each run with its group left out, and whether no other source has its chip.

    common: its framework counts as unknown. fit: whether constants are fitted, or the default ones.
    """
    of, found = fits.GROUPS[group], []
    for row in rows:
        terms = fitted(group, of(row)) if fit else Terms()
        alone = all(r.source == row.source for r in given() if chip(r) == chip(row))
        runs = published.stated(row, COMMON) if common else None
        found.append((guess(row, terms, runs), alone))
    return found


# ---- null model -------------------------------------------------------------------------


def work(row: Row) -> float:
    """Returns the FLOPs of a device with recomputation and bubble."""
    plan = published.layout(row, "none").plan
    again = 4 / 3 if plan.recompute == "full" else 1.0
    flops = guess(row).prediction.flops * again / plan.world_size
    return flops * (1 + (plan.pipe - 1) / (plan.virtual_stages * plan.num_micro_batches))


def null_errors(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the error of the null model for each run; its constants are fitted to all runs."""
    by = defaultdict(list)
    for row in rows:
        by[chip(row), row.narrow].append(row)
    found = {}
    for several in by.values():
        rate = statistics.median(work(r) / r.seconds for r in several)
        found |= {r.name: work(r) / rate / r.seconds - 1 for r in several}
    return found


# ---- figures ----------------------------------------------------------------------------


def mape(errors: Iterable[float]) -> float:
    """Returns the mean absolute error in percent."""
    return 100 * statistics.fmean(map(abs, errors))


def tau(measured: Sequence[float], guessed: Sequence[float]) -> float:
    """Returns Kendall's tau over pairs that differ by more than the noise."""
    signs = []
    for i, j in combinations(range(len(measured)), 2):
        one, other = measured[i], measured[j]
        if abs(one - other) > NOISE * min(one, other):
            signs.append(1 if (one - other) * (guessed[i] - guessed[j]) > 0 else -1)
    return statistics.fmean(signs)


def is_sweep(row: Row) -> bool:
    """Returns whether a run belongs to the layout sweep."""
    date, layers, hidden, batches = SWEEP
    same = row.number("layers") == layers and row.number("hidden") == hidden
    dated = date in row.facts["source_locator"] and row.number("heads") == 64
    return row.source == "BLOOM" and same and dated and row.number("global_batch") in batches


def verdict(text: str, value: float, limit: float, *, least: bool = False) -> bool:
    """Prints a figure with its limit."""
    good = value >= limit if least else value <= limit
    sign = ">=" if least else "<="
    print(f"{text:<58}{value:8.2f}  ({sign} {limit:g})  {'pass' if good else 'FAIL'}")
    return good


def times(guesses: Sequence[tuple[Guess, bool]], null: dict[str, float]) -> None:
    """Prints the errors of the step time by source, and their means."""
    if not guesses:
        print("no run with a time that can be scored")
        return
    by = defaultdict(list)
    for one, alone in guesses:
        kind = "8-bit" if one.row.narrow else "16-bit"
        by[kind, one.row.source, chip(one.row), "alone" * alone].append(one)
    print(f"\n{'':8}{'source':10}{'chip':8}{'':8}runs  MAPE   bias    max   null  inside")
    means = defaultdict(list)
    for (kind, source, name, alone), several in sorted(by.items()):
        errors = [one.error for one in several]
        worst = max(errors, key=abs)
        zero = mape(null[one.row.name] for one in several)
        print(
            f"{kind:8}{source:10}{name:8}{alone:8}{len(several):4}{mape(errors):6.1f}"
            f"{100 * statistics.fmean(errors):+7.1f}{100 * worst:+7.1f}{zero:7.1f}"
            f"{100 * statistics.fmean(one.inside for one in several):7.0f} %"
        )
        means[kind, source] += errors
    print()
    for kind, limit in LIMITS.items():
        found = [mape(some) for (name, _), some in means.items() if name == kind]
        if found:
            verdict(f"step time, {kind}: mean over sources, %", statistics.fmean(found), limit)
    print(f"null model, all runs: {mape(null.values()):.1f}%")
    wide = [one for one, _ in guesses if not one.row.narrow]
    if wide:
        share = 100 * statistics.fmean(one.inside for one in wide)
        verdict("16-bit runs inside the printed 80% interval, %", share, 72, least=True)
        verdict("the same", share, 90)
        verdict("widest interval, upper / lower", max(map(width, wide)), 1.6)


def width(one: Guess) -> float:
    """Returns the ratio of the upper to the lower end of its interval."""
    low, high = one.prediction.interval
    return high / low


def ranking(guesses: Sequence[Guess], null: dict[str, float]) -> None:
    """Prints the results of the layout sweep."""
    sweep = [one for one in guesses if is_sweep(one.row)]
    if len(sweep) < 3:
        return
    each = [one.row.number("global_batch") for one in sweep]
    measured = [one.row.seconds / n for one, n in zip(sweep, each, strict=True)]
    guessed = [one.prediction.step_seconds / n for one, n in zip(sweep, each, strict=True)]
    zero = [m * (1 + null[one.row.name]) for m, one in zip(measured, sweep, strict=True)]
    print(f"\nlayout sweep of {len(sweep)} runs")
    verdict("tau", tau(measured, guessed), 0.7, least=True)
    order = sorted(range(len(sweep)), key=guessed.__getitem__)
    verdict("regret of the first choice, %", 100 * (measured[order[0]] / min(measured) - 1), 5)
    top = min(measured[i] for i in order[:3])
    verdict("best of the first three relative to the best, %", 100 * (top / min(measured) - 1), 3)
    first = min(range(len(sweep)), key=zero.__getitem__)
    print(
        f"null model: tau {tau(measured, zero):.2f}, regret "
        f"{100 * (measured[first] / min(measured) - 1):.1f}%"
    )


def memory(rows: Sequence[Row]) -> None:
    """Prints the results on memory, and on runs that did not fit."""
    guesses = [guess(row) for row in rows]
    known = [one for one in guesses if one.row.gib and not one.row.oom]
    plain = [one for one in known if one.row.number("cp") == 1]
    if plain:
        errors = [overstated(one) for one in plain]
        print(f"\nmemory of {len(plain)} runs, and {len(known) - len(plain)} with context > 1")
        verdict("MAPE, %", mape(errors), 12)
        verdict("largest underestimate, %", -100 * min(errors), 5)
        alone = [overstated(without_it(one, plain)) for one in plain]
        verdict("largest underestimate, reserves fitted without the run, %", -100 * min(alone), 5)
    for one in known:
        if overstated(one) < -0.05:
            print(f"  {one.row.name}: {one.row.gib} GiB, predicted {one.bytes / GIB:.1f}")
    failed = [one for one in guesses if one.row.oom]
    called = sum(not one.fits for one in failed)
    verdict(f"predicted out of memory, of {len(failed)} such runs", called, len(failed), least=True)
    ran = [one for one in guesses if one.row.seconds and not one.row.oom]
    false = [one.row.name for one in ran if not one.fits]
    if ran:
        share = 100 * len(false) / len(ran)
        verdict(f"wrongly predicted out of memory, % of {len(ran)}", share, 4)
    print("  ", *false)


def without_it(one: Guess, several: Sequence[Guess]) -> Guess:
    """Returns the prediction for a run with the reserve that other runs of its framework need."""
    runs = published.framework(one.row)
    others = [other.row for other in several if other.row.name != one.row.name]
    reserve = fits.reserves(others).get(runs.name, runs.allocator_reserve)
    return guess(one.row, None, replace(runs, allocator_reserve=reserve))


def overstated(one: Guess) -> float:
    """Returns predicted / measured memory - 1."""
    return one.bytes / GIB / one.row.gib - 1


def calibrated(guesses: Sequence[Guess]) -> tuple[float, float]:
    """Returns the bounds of measured / predicted that contain 80% of the runs.

    A run is weighted by the square root of the number of runs of its source: they are similar, but
    not equal.
    """
    count: dict[str, int] = defaultdict(int)
    for one in guesses:
        count[one.row.source] += 1
    ratios = sorted((1 / (1 + one.error), count[one.row.source] ** -0.5) for one in guesses)
    total, seen, found = sum(weight for _, weight in ratios), 0.0, []
    for ratio, weight in ratios:
        seen += weight / total
        if seen >= (0.1, 0.9)[len(found)]:
            found.append(ratio)
            if len(found) == 2:
                break
    return found[0], found[1]


def unknown(rows: Sequence[Row]) -> None:
    """Prints the runs that are not scored, and why, with their errors under the common
    framework.
    """
    several = [row for row in rows if row.scored and row.unknown]
    if not several:
        return
    print(f"\nnot scored: {len(several)} runs")
    for row in several:
        print(f"  {row.name}: unknown {', '.join(row.unknown)}", end="")
        apart = [word for word in row.unknown if not word.startswith("framework")]
        if row.seconds and not row.oom and not apart:
            print(f"; with the common framework {100 * guess(row).error:+.0f}%", end="")
        print()


def main() -> None:
    """Prints all results."""
    parser = ScriptParser(__doc__, smoke="--no-fit --json {folder}/rows.json")
    parser.add_argument("--show", default="", help="print each run of a source")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all sources")
    parser.add_argument("--leave", choices=tuple(fits.GROUPS), default="source")
    parser.add_argument("--common", action="store_true", help="treat every framework as unknown")
    parser.add_argument("--data", type=Path, default=published.DATA / "published_runs.csv")
    parser.add_argument("--no-fit", action="store_true", help="with the default constants")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.fit:
        terms = fits.fit(given())
        print(terms, f"{fits.loss(given(), terms):.4f}")
        print("reserves", fits.reserves(measured(published.rows())))
        return
    rows = published.rows(args.data)
    scored = [row for row in rows if row.scored and not row.unknown]
    guesses = left_out(timed(rows), args.leave, common=args.common, fit=not args.no_fit)
    null = null_errors(timed(rows))
    for one, _ in guesses:
        if one.row.source == args.show:
            parts = {name: round(x, 2) for name, x in one.prediction.seconds_by_part.items() if x}
            print(
                f"{one.row.name} {one.row.seconds:8.2f} {one.prediction.step_seconds:8.2f} "
                f"{100 * one.error:+6.1f}% {parts}"
            )
    times(guesses, null)
    ranking([one for one, _ in guesses], null)
    memory(scored)
    unknown(rows)
    if len(guesses) > 1:
        low, high = calibrated([one for one, _ in guesses if not one.row.narrow])
        print(f"\nmeasured / predicted, 16 bits: 80% between {low:.2f} and {high:.2f}")
    if args.json:
        facts = {
            one.row.name: [one.row.seconds, one.prediction.step_seconds, *one.prediction.interval]
            for one, _ in guesses
        }
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
