"""Constants of the planner fitted to published runs, and runs left out by whole groups.

Fitted are three numbers that all share (`Terms`: passes of eager kernels, the share of overlapped
communication that is hidden, stragglers) and four for a chip (`Reach`), each pulled towards what it
is without data. All else is data sheets and facts about code. A left-out group, a source, a
framework, a machine or a chip, is predicted with numbers fitted to the runs of the others.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache

import published_frameworks as frameworks
import published_rows as published
from published_frameworks import Framework
from published_rows import Row, Ways

from ranvier.planner.cluster import Cluster, Efficiency
from ranvier.planner.predict import Prediction, merge_predictions, predict_step

CHIPS = {"H200": "H100", "GH200": "H100", "GB200": "B200"}
"""Devices with the chip of another one."""
MOST = 0.35
"""An error counts for no more than this, so that a broken run does not move all others."""
RUNS = 10
"""Runs of a source on a chip that a fit reads, spread evenly."""
PULL = 0.03
"""Weight of the distance to what a number is without data, on squared logarithms."""
TUNED = 1.3
"""Where a run does not say how it was laid out, it is no slower than so many times the best."""
UNKNOWN_FRAMEWORK = (0.9, 1.35)
"""Measured over predicted, as `predict.INTERVAL`, where the framework has no row (--common)."""
BOUNDS = ((1.0, 4.0), (0.05, 0.95), (0.001, 0.04))
REACH_BOUNDS = ((0.6, 1.04), (0.6, 1.04), (0.35, 0.95), (0.5, 0.95))


@dataclass(frozen=True)
class Terms:
    """What is fitted; the usual values are those without any data."""

    eager: float = 2.0
    """`frameworks.EAGER`."""
    hidden: float = 0.5
    """`frameworks.HIDDEN`."""
    straggle: float = 0.01
    """`Cluster.straggle`."""
    reach: tuple[tuple[str, Efficiency], ...] = field(default=())
    """Of each chip that there are runs of; others have the usual one."""

    def of(self, name: str) -> Efficiency:
        """Returns the numbers of a chip."""
        return dict(self.reach).get(name, Efficiency())


def chip(row: Row) -> str:
    """Returns the chip of a run: parts with other memory or power are the same."""
    assert row.device is not None
    name = row.device.name.split("-")[0]
    return CHIPS.get(name, name)


def framework(row: Row) -> str:
    """Returns the framework of a run; years of one are the same."""
    name = published.framework(row).name
    return "Megatron-LM" if name.startswith("Megatron-LM") else name


def machine(row: Row) -> str:
    """Returns the machine of a run: device, devices of a node, network."""
    facts = row.facts
    network = facts["inter_node_gbs_per_node"]
    return f"{facts['gpu']} x {facts['gpus_per_node']}, {network} GB/s" + row.source * (not network)


GROUPS: dict[str, Callable[[Row], str]] = {
    "source": lambda row: row.source,
    "framework": framework,
    "machine": machine,
    "chip": chip,
}
"""What may be left out as a whole."""


def shipped(row: Row) -> Terms:
    """Returns the constants of the package, for a run."""
    assert row.device is not None
    own = ((chip(row), row.device.reach),)
    return Terms(frameworks.EAGER, frameworks.HIDDEN, published.machine(row).straggle, own)


# ---- predictions ------------------------------------------------------------------------


def with_terms(runs: Framework, terms: Terms) -> Framework:
    """Returns a runtime with fitted numbers in place of the shipped ones."""
    eager = {frameworks.EAGER: terms.eager, frameworks.PARTLY: (1 + terms.eager) / 2}
    passes = eager.get(runs.elementwise_passes, runs.elementwise_passes)
    row = terms.hidden if runs.row_overlap == frameworks.HIDDEN else runs.row_overlap
    pipe = terms.hidden if runs.pipe_overlap == frameworks.HIDDEN else runs.pipe_overlap
    return replace(runs, elementwise_passes=passes, row_overlap=row, pipe_overlap=pipe)


def place(row: Row, terms: Terms) -> Cluster:
    """Returns the machine of a run with fitted numbers."""
    found = published.machine(row)
    device = replace(found.device, reach=terms.of(chip(row)))
    return replace(found, device=device, straggle=terms.straggle)


@cache
def settled(row: Row, way: Ways, runs: Framework) -> str:
    """Returns what is computed again where a run does not say: the least that fits."""
    for word in ("none", "selective"):
        layout = published.layout(row, word, way)
        if predict_step(published.job(row), layout, published.machine(row), runs).fits_memory:
            return word
    return "full"


def prediction(row: Row, terms: Terms, runs: Framework) -> Prediction:
    """Returns the prediction for a run: over all layouts that it may have had, where it does not
    say.
    """
    cluster, used, found = place(row, terms), with_terms(runs, terms), []
    for way in published.ways(row):
        again = "" if row.facts["recompute"] else settled(row, way, runs)
        layout = published.layout(row, again, way)
        found.append(predict_step(published.job(row), layout, cluster, used))
    found = [one for one in found if one.fits_memory] or found
    fastest = min(one.step_seconds for one in found)
    one = merge_predictions([one for one in found if one.step_seconds <= TUNED * fastest])
    if runs.name == frameworks.COMMON.name:
        one = replace(one, error_factors=UNKNOWN_FRAMEWORK)
    return one


# ---- fit --------------------------------------------------------------------------------


@cache
def _error(
    row: Row, reach: Efficiency, eager: float | None, hidden: float | None, straggle: float
) -> float:
    """|log(predicted / measured)|, at most `MOST`; None: a number that the run does not need."""
    usual = Terms()
    terms = Terms(eager or usual.eager, hidden or usual.hidden, straggle, ((chip(row), reach),))
    spent = prediction(row, terms, published.framework(row)).step_seconds
    return min(abs(math.log(spent / row.seconds)), MOST)


def _own_error(row: Row, terms: Terms) -> float:
    runs = published.framework(row)
    eager = (
        terms.eager if runs.elementwise_passes in (frameworks.EAGER, frameworks.PARTLY) else None
    )
    hidden = terms.hidden if frameworks.HIDDEN in (runs.row_overlap, runs.pipe_overlap) else None
    return _error(row, terms.of(chip(row)), eager, hidden, terms.straggle)


def loss(rows: Iterable[Row], terms: Terms) -> float:
    """Mean over sources of their mean error, and how far the numbers are from usual ones."""
    by = defaultdict(list)
    for row in rows:
        by[row.source].append(_own_error(row, terms))
    usual, found = Terms(), statistics.fmean(map(statistics.fmean, by.values()))
    pairs = list(zip(astuple(terms)[:3], astuple(usual)[:3], strict=True))
    for _, reach in terms.reach:
        pairs += zip(astuple(reach), astuple(Efficiency()), strict=True)
    return found + PULL * sum(math.log(a / b) ** 2 for a, b in pairs)


def _spread(rows: Sequence[Row]) -> tuple[Row, ...]:
    """At most `RUNS` of each source on a chip, evenly."""
    by = defaultdict(list)
    for row in rows:
        by[row.source, chip(row)].append(row)
    found: list[Row] = []
    for several in by.values():
        count = min(RUNS, len(several))
        found += [several[i * len(several) // count] for i in range(count)]
    return tuple(found)


def _neighbours(terms: Terms, step: float) -> Iterator[Terms]:
    """Terms with one number a step up or down."""
    for way in (1 + step, 1 / (1 + step)):
        for name, (low, high) in zip(("eager", "hidden", "straggle"), BOUNDS, strict=True):
            value = min(max(getattr(terms, name) * way, low), high)
            yield replace(terms, **{name: round(value, 4)})
        for i, (name, reach) in enumerate(terms.reach):
            for k, (low, high) in enumerate(REACH_BOUNDS):
                numbers = list(astuple(reach))
                numbers[k] = round(min(max(numbers[k] * way, low), high), 4)
                some = list(terms.reach)
                some[i] = (name, Efficiency(*numbers))
                yield replace(terms, reach=tuple(some))


def fit(rows: Sequence[Row]) -> Terms:
    """Returns the numbers that fit best, by steps along each in turn that get shorter."""
    used = _spread(rows)
    best = Terms(reach=tuple((name, Efficiency()) for name in sorted({chip(row) for row in used})))
    least, step = loss(used, best), 0.16
    while step > 0.015:
        better = False
        for index in range(2 * (3 + 4 * len(best.reach))):
            tried = list(_neighbours(best, step))[index]
            found = loss(used, tried)
            if found < least - 1e-5:
                best, least, better = tried, found, True
        step = step if better else step / 2
    return best


def without(rows: Sequence[Row], group: str) -> dict[str, Terms]:
    """Returns the numbers fitted to the runs outside of each group, by its name."""
    of = GROUPS[group]
    return {
        name: fit([row for row in rows if of(row) != name])
        for name in sorted({of(row) for row in rows})
    }


# ---- memory -----------------------------------------------------------------------------

UNDER = 0.02
"""A framework's reserve is the least with which no run of it is under by more than this share."""


@cache
def reserve_needed(row: Row) -> float:
    """Returns the reserve with which a run's memory is under by `UNDER`: tensors · (1 +
    reserve).
    """
    runs = published.framework(row)
    table = prediction(row, shipped(row), replace(runs, allocator_reserve=0.0)).memory
    fixed = runs.context_bytes if "nvidia-smi" in row.facts["mem_basis"] else 0.0
    return ((1 - UNDER) * row.gib * 2**30 - fixed) / table.total_bytes - 1


def reserves(rows: Iterable[Row]) -> dict[str, float]:
    """Returns the least reserve of each framework, by its name."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        name = published.framework(row).name
        found[name] = max(found[name], reserve_needed(row))
    return dict(found)
