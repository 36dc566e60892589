"""Fits the constants of the planner to published runs, with whole groups left out.

Three numbers that all runs share are fitted (`Terms`: memory passes of eager kernels, the hidden
share of overlapped communication, stragglers), and four per chip (`Efficiency`), each regularized
towards its default value. Everything else comes from data sheets and facts about code. A left-out
group (a source, framework, machine or chip) is predicted with numbers fitted to the other runs.
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
"""Devices that have the chip of another device."""
MOST = 0.35
"""Maximum error that counts, so that a broken run does not affect all others."""
RUNS = 10
"""Maximum number of runs of a source on a chip in a fit, spread evenly."""
PULL = 0.03
"""Weight of the distance to the default values, on squared logarithms."""
TUNED = 1.3
"""If the layout of a run is not published, it is assumed to be at most this much slower than the
best."""
UNKNOWN_FRAMEWORK = (0.9, 1.35)
"""Measured / predicted, as `predict.INTERVAL`, for frameworks without a profile (--common)."""
BOUNDS = ((1.0, 4.0), (0.05, 0.95), (0.001, 0.04))
REACH_BOUNDS = ((0.6, 1.04), (0.6, 1.04), (0.35, 0.95), (0.5, 0.95))


@dataclass(frozen=True)
class Terms:
    """The fitted numbers; the defaults apply without any data."""

    eager: float = 2.0
    """`frameworks.EAGER`."""
    hidden: float = 0.5
    """`frameworks.HIDDEN`."""
    straggle: float = 0.01
    """`Cluster.straggle`."""
    reach: tuple[tuple[str, Efficiency], ...] = field(default=())
    """Numbers of each chip with runs; other chips have the defaults."""

    def of(self, name: str) -> Efficiency:
        """Returns the numbers of a chip."""
        return dict(self.reach).get(name, Efficiency())


def chip(row: Row) -> str:
    """Returns the chip of a run; variants with other memory or power are the same."""
    assert row.device is not None
    name = row.device.name.split("-")[0]
    return CHIPS.get(name, name)


def framework(row: Row) -> str:
    """Returns the framework of a run; all years of a framework are the same."""
    name = published.framework(row).name
    return "Megatron-LM" if name.startswith("Megatron-LM") else name


def machine(row: Row) -> str:
    """Returns the machine of a run: device, devices per node, network."""
    facts = row.facts
    network = facts["inter_node_gbs_per_node"]
    return f"{facts['gpu']} x {facts['gpus_per_node']}, {network} GB/s" + row.source * (not network)


GROUPS: dict[str, Callable[[Row], str]] = {
    "source": lambda row: row.source,
    "framework": framework,
    "machine": machine,
    "chip": chip,
}
"""Kinds of groups that can be left out."""


def shipped(row: Row) -> Terms:
    """Returns the shipped constants, for a run."""
    assert row.device is not None
    own = ((chip(row), row.device.reach),)
    return Terms(frameworks.EAGER, frameworks.HIDDEN, published.machine(row).straggle, own)


# ---- predictions ------------------------------------------------------------------------


def with_terms(runs: Framework, terms: Terms) -> Framework:
    """Returns a framework with fitted numbers instead of the shipped ones."""
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
    """Returns the recompute mode if a run does not report it: the least that fits."""
    for word in ("none", "selective"):
        layout = published.layout(row, word, way)
        if predict_step(published.job(row), layout, published.machine(row), runs).fits_memory:
            return word
    return "full"


def prediction(row: Row, terms: Terms, runs: Framework) -> Prediction:
    """Predicts a run, over all plausible layouts if its layout is not published."""
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
    """Returns |log(predicted / measured)|, at most `MOST`; None for numbers that are not needed."""
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
    """Returns the mean over sources of their mean error, plus the distance to the defaults."""
    by = defaultdict(list)
    for row in rows:
        by[row.source].append(_own_error(row, terms))
    usual, found = Terms(), statistics.fmean(map(statistics.fmean, by.values()))
    pairs = list(zip(astuple(terms)[:3], astuple(usual)[:3], strict=True))
    for _, reach in terms.reach:
        pairs += zip(astuple(reach), astuple(Efficiency()), strict=True)
    return found + PULL * sum(math.log(a / b) ** 2 for a, b in pairs)


def _spread(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns at most `RUNS` runs of each source on a chip, spread evenly."""
    by = defaultdict(list)
    for row in rows:
        by[row.source, chip(row)].append(row)
    found: list[Row] = []
    for several in by.values():
        count = min(RUNS, len(several))
        found += [several[i * len(several) // count] for i in range(count)]
    return tuple(found)


def _neighbours(terms: Terms, step: float) -> Iterator[Terms]:
    """Yields the terms with one number increased or decreased by a step."""
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
    """Returns the best fit, by coordinate descent with decreasing steps."""
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
"""Maximum share by which the memory of any run may be underestimated, which determines a
reserve.
"""


@cache
def reserve_needed(row: Row) -> float:
    """Returns the reserve with which the memory of a run is underestimated by `UNDER`."""
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
