"""Search: the layouts of a job on a cluster that can run, predicted, the fastest that fit first.

A layout is a factorisation of the ranks over the axes, what col splits inside, a micro-batch,
chunks of stages, whether blocks are compiled, what is computed or gathered again, where states
rest, and the order of the axes. Plan's own rules refuse what cannot be divided. Four things keep
the rest short:

    ladder   less computed again and gathered again is never slower: what fits ends the ladder, and
             what keeps least and does not fit ends it, too
    host     states rest there only where else all must be computed again, or nothing fits
    rough    each factorisation is tried with few micro-batches in one chunk first; only the FULL
             best of a style that chunks could bring within NEAR times its best are searched in full
    orders   other placements of the ranks are tried for the BEST layouts, and more numbers of
             chunks for the best of each style

The result depends on the wish alone: not on processes, clocks or hashes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from ranvier.config.plan import RUNNABLE_AXES, Plan, divisors
from ranvier.errors import PlanError
from ranvier.planner.baselines import STYLES, PredictedCandidate
from ranvier.planner.cluster import Cluster
from ranvier.planner.predict import (
    Candidate,
    Workload,
    block_compute_seconds,
    default_schedule,
    predict_step,
    step_seconds_by_part,
)
from ranvier.planner.time.compute import Fp8Scaling
from ranvier.planner.worker_pool import open_worker_pool

DeviceOrHost = Literal["device", "host"]

RECOMPUTE_MODES = ("none", "selective", "full")
"""From the fastest that keeps most to the slowest that keeps least."""
FULL_SEARCH_RATIO = 1.25
"""How much slower than the best of its style a factorisation may be at first and still be searched
in full."""
CHUNK_MEMORY_RATIO = 1.06
"""Memory over that of a device from which on no number of chunks makes a pipeline fit."""
MAX_FULL_SEARCHES = 40
"""Factorisations of a style that are searched in full, at most."""
MAX_CARRIED_LAYOUTS = 32
"""Layouts that are carried over from another number of devices."""
DEGREES_PER_CARRIED = 3
"""Degrees that one of them is given there."""
MAX_REORDERED = 40
"""Layouts for which other orders of the axes are tried."""
REFINED_PER_STYLE = 5
"""Layouts of each style for which all numbers of chunks and other orders are tried."""
MAX_MICRO_BATCHES = 6
"""Micro-batches that are tried for a factorisation, at most."""
MAX_MICRO_BATCH_TOKENS = 2**18
"""Tokens of a micro-batch of a rank, at most, unless fewer samples cannot be."""
CHUNK_CHOICES = (1, 2, 4, 8)
"""Chunks of a stage that are tried for each factorisation."""
MAX_CHUNKS = 16
"""Chunks of a stage, at most."""
MAX_FIT_CHECKS = 150
"""Factorisations that are asked whether anything fits."""
PARALLEL_THRESHOLD = 100
"""Factorisations from which on a second process is worth its start."""
MICRO_BATCH_PARTS = (
    "compute",
    "attention",
    "again",
    "row",
    "col",
    "expert",
    "context",
    "depth",
    "pipe",
)
"""Parts of a step that each micro-batch has."""
FIRST_LOOK_SECONDS = 0.2
MAX_FIRST_LOOK_SECONDS = 0.6
"""Seconds in which guesses are tried before a search that is watched: at most, and if none fits."""
AXIS_ORDERS: tuple[tuple[str, ...], ...] = (
    ("pipe", "depth", "row", "col"),
    ("depth", "data", "row", "col"),
    ("data", "depth", "row", "col"),
    ("col", "row"),
    ("row", "col", "pipe"),
)
"""Placements besides the usual one, innermost last: copies outside of stages; depth outside of
data; both swapped with what lies between; row inside of col; neighbouring stages side by side."""


@dataclass(frozen=True)
class SearchRequest:
    """What is asked: a job, a machine, and what is settled already."""

    workload: Workload
    cluster: Cluster
    plan: Plan = field(default_factory=Plan)
    """Values of what is settled; its batch is that of the job."""
    fixed_fields: frozenset[str] = frozenset()
    """Fields of the plan that are settled."""
    states: DeviceOrHost | None = None
    """Where states rest; None: on the device if they fit."""
    fp8: Fp8Scaling = ""
    allows_compile: bool = True
    """Whether blocks may be compiled where a run would not do so by itself."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.cluster.num_devices

    @cached_property
    def dim_sizes(self) -> Mapping[str, int]:
        """Units of each dim, as Plan's rules know them."""
        model = self.workload.model
        return {**model.units, "seq": self.workload.seq, "layers": model.num_layers}

    @cached_property
    def fixed_degrees(self) -> Mapping[str, int]:
        """Degrees that are settled; -1 is not."""
        given = {
            axis: getattr(self.plan, axis) for axis in RUNNABLE_AXES if axis in self.fixed_fields
        }
        return {axis: size for axis, size in given.items() if size != -1}

    @cached_property
    def searched_axes(self) -> tuple[str, ...]:
        """Axes that may have several ranks; without experts theirs is but another data."""
        whole = self.dim_sizes.get("expert") or "expert" in self.fixed_degrees
        return tuple(axis for axis in RUNNABLE_AXES if whole or axis != "expert")

    def field_choices(self, name: str, several: Sequence[Any]) -> Sequence[Any]:
        """What a field of the plan may be: several things, or what is settled."""
        if name in self.fixed_fields:
            return (getattr(self.plan, name),)
        return several


@dataclass(frozen=True)
class SearchResult:
    """What a search has found."""

    request: SearchRequest
    feasible_candidates: tuple[PredictedCandidate, ...]
    """Layouts that fit, the best first."""
    oversized_candidates: tuple[PredictedCandidate, ...]
    """Layouts that need more memory than there is, the one that needs least first."""
    num_grids: int
    """Factorisations that Plan's rules allow."""
    num_rejected_grids: int
    """Factorisations that they do not."""
    search_seconds: float
    """Of the search."""
    from_cache: bool = False
    """Whether it was made earlier (`result_cache`)."""

    @property
    def num_candidates(self) -> int:
        """Layouts that were predicted."""
        return len(self.feasible_candidates) + len(self.oversized_candidates)

    @property
    def best(self) -> PredictedCandidate:
        """The first that fits, or a PlanError with the nearest change that makes one fit."""
        if not self.feasible_candidates:
            from ranvier.planner import suggestions  # which searches, too

            raise PlanError(suggestions.explain_infeasible(self))
        return self.feasible_candidates[0]


def enumerate_degrees(world: int, choices: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """All degrees that multiply to `world`. choices: what the degree of each axis may be."""
    if not choices:
        if world == 1:
            yield {}
        return
    (axis, sizes), *rest = choices.items()
    for size in sizes:
        if world % size == 0:
            for others in enumerate_degrees(world // size, dict(rest)):
                yield {axis: size, **others}


def degree_choices(wish: SearchRequest) -> dict[str, list[int]]:
    """What the degree of each axis may be: what Plan's rules allow it alone, or what is settled.

    An axis that cannot be divided alone cannot be divided beside others.
    """
    found = {}
    for axis in wish.searched_axes:
        given = wish.fixed_degrees.get(axis)
        if given is None:
            sizes = divisors(wish.world_size)
        elif given > 0:
            sizes = [given]
        else:
            sizes = []
        found[axis] = [size for size in sizes if _divides_alone(wish, axis, size)]
    return found


def _divides_alone(wish: SearchRequest, axis: str, size: int) -> bool:
    alone = dict.fromkeys(RUNNABLE_AXES, 1) | {axis: size}
    whole = [
        replace(p, micro_batch=p.batch // p.num_replicas) for p in plans_of_degrees(wish, alone)
    ]
    if alone["pipe"] == 1:  # what is settled of stages is no matter of other axes
        whole = [replace(p, chunks=1, spread=False, stages=()) for p in whole]
    return any(p.micro_batch and not any(p.find_problems(wish.dim_sizes)) for p in whole)


def valid_grids(wish: SearchRequest) -> tuple[list[Plan], int]:
    """Plans of all factorisations that can run at their least micro-batch, and how many cannot."""
    found = []
    kept = 0
    for sizes in enumerate_degrees(wish.world_size, degree_choices(wish)):
        able = [plan for plan in plans_of_degrees(wish, sizes) if is_allowed(wish, plan)]
        found += able
        kept += bool(able)
    return found, _count_factorisations(wish) - kept


def _count_factorisations(wish: SearchRequest) -> int:
    """How many factorisations there are, whatever rules say: Π (e + k - 1 over e) of its primes."""
    rest = wish.world_size
    count = 1
    free = len(wish.searched_axes) - len(wish.fixed_degrees)
    known = math.prod(wish.fixed_degrees.values())
    if known < 1 or rest % known or (free == 0 and rest != known):
        return 0
    rest = rest // known
    prime = 2
    while rest > 1:
        power = 0
        while rest % prime == 0:
            rest = rest // prime
            power = power + 1
        count *= math.comb(power + free - 1, power) if power else 1
        prime += 1
    return count


def is_allowed(wish: SearchRequest, plan: Plan) -> bool:
    """Whether Plan's rules allow it; stages that are given are as many as there are."""
    if plan.stages and len(plan.stages) + 1 != plan.pipe * plan.chunks:
        return False
    return next(plan.find_problems(wish.dim_sizes, wish.world_size), None) is None


def plans_of_degrees(wish: SearchRequest, sizes: Mapping[str, int]) -> Iterator[Plan]:
    """A plan of these degrees for each way in which col may split what is inside."""
    both = ("samples", "features") if sizes["col"] > 1 else ("samples",)
    if wish.plan.policy == "interleaved" and sizes["pipe"] > 1:
        chunks = 2
    else:
        chunks = 1
    fixed = {"chunks": chunks, "gathered": "again", "order": (), **_fixed_values(wish)}
    for inner in wish.field_choices("inner", both):
        if inner == "samples":
            least = sizes["col"]
        else:
            least = 1
        changes = {"micro_batch": least, **fixed, **sizes, "inner": inner}
        if "micro_batch" in wish.fixed_fields and wish.plan.micro_batch > 0:
            changes["micro_batch"] = wish.plan.micro_batch
        changes["batch"] = wish.workload.batch
        yield replace(wish.plan, **changes)


def _fixed_values(wish: SearchRequest) -> dict[str, Any]:
    names = ("chunks", "gathered", "order")
    return {name: getattr(wish.plan, name) for name in names if name in wish.fixed_fields}


def micro_batch_choices(wish: SearchRequest, plan: Plan) -> list[int]:
    """Micro-batches to try, spread evenly over the sizes that divide a rank's share."""
    if "micro_batch" in wish.fixed_fields and wish.plan.micro_batch > 0:
        return [wish.plan.micro_batch]
    share = plan.batch // plan.num_replicas
    multiple = plan.micro_batch
    most = max(MAX_MICRO_BATCH_TOKENS // wish.workload.seq, multiple)
    sizes = [n for n in divisors(share) if n % multiple == 0 and n <= most]
    if len(sizes) <= MAX_MICRO_BATCHES:
        return sizes
    wanted = [
        sizes[0] * (sizes[-1] / sizes[0]) ** (i / (MAX_MICRO_BATCHES - 1))
        for i in range(MAX_MICRO_BATCHES)
    ]
    return sorted({min(sizes, key=lambda n: (abs(math.log(n / w)), n)) for w in wanted})


def plan_variants(wish: SearchRequest, plan: Plan) -> list[Plan]:
    """A factorisation with each micro-batch and each number of chunks; rough ones first."""
    sizes = micro_batch_choices(wish, plan)
    rough = list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2])))
    made = []
    for chunks in wish.field_choices("chunks", CHUNK_CHOICES if plan.pipe > 1 else (1,)):
        if chunks > 1 and plan.pipe * chunks > wish.dim_sizes["layers"]:
            continue
        policy = with_schedule(wish, replace(plan, chunks=chunks)).policy
        for micro in (*rough, *(n for n in sizes if n not in rough)):
            made.append(replace(plan, micro_batch=micro, chunks=chunks, policy=policy))
    plain = "policy" not in wish.fixed_fields and not plan.stages
    return [one for one in made if (plain and one.chunks == 1) or is_allowed(wish, one)]


def with_schedule(wish: SearchRequest, plan: Plan) -> Plan:
    """A plan whose stages take turns in an order that keeps what is predicted, unless another is
    asked for; to take what has arrived needs more, and a bound on what stages hold needs it."""
    if is_message_driven(wish) or "policy" in wish.fixed_fields:
        return plan
    return replace(plan, policy=default_schedule(plan.chunks) if plan.pipe > 1 else Plan().policy)


def is_message_driven(wish: SearchRequest) -> bool:
    """Whether stages of its pipelines take what has arrived."""
    asked = "policy" in wish.fixed_fields or wish.plan.credits > 0
    return wish.plan.policy == "message" and asked


def search_recompute(wish: SearchRequest, plan: Plan) -> Iterator[PredictedCandidate]:
    """A plan with more and more computed again, here and elsewhere, up to what fits."""
    again = plan.depth > 1 and plan.num_micro_batches > 1
    if wish.states:
        places: Sequence[DeviceOrHost] = (wish.states,)
    else:
        places = ("device", "host")
    if wish.cluster.cores and not wish.states:  # there device and host are one memory
        places = ("device",)
    ways = wish.field_choices("gathered", ("keep", "again") if again else ("again",))
    kind = wish.field_choices("recompute", RECOMPUTE_MODES)[0]
    plan = _choose_compile(wish, replace(plan, gathered=ways[0], recompute=kind))
    for gathered in ways:
        tried: list[PredictedCandidate] = []
        for where in places:
            if tried and not _should_offload_states(wish, tried):
                break
            tried = _try_recompute_modes(wish, replace(plan, gathered=gathered), where)
            yield from tried
            if tried[0].prediction.fits_memory:
                if gathered == "keep" and where == places[0]:
                    return
                break


def _should_offload_states(wish: SearchRequest, tried: Sequence[PredictedCandidate]) -> bool:
    """Whether states had better rest on the host, where they find room.

    So it is if nothing fits beside them, or only what computes all again, and more would without.
    """
    if any(
        one.prediction.fits_memory and one.plan.recompute != RECOMPUTE_MODES[-1] for one in tried
    ):
        return False
    for one in tried:
        device = one.prediction.memory.device
        states = device.get("master", 0) + device.get("moments", 0)
        over = one.prediction.memory.total_bytes - one.prediction.limit
        if 0 < over <= states <= wish.cluster.host.memory:
            return True
    return False


def _try_recompute_modes(
    wish: SearchRequest, plan: Plan, where: DeviceOrHost
) -> list[PredictedCandidate]:
    """What computes least again, then, if that does not fit, what keeps least; then those between.

    What lies between need not be asked if nothing fits.
    """
    kinds = wish.field_choices("recompute", RECOMPUTE_MODES)
    found = []
    for kind in dict.fromkeys((kinds[0], kinds[-1], *kinds[1:-1])):
        found.append(_predict_candidate(wish, replace(plan, recompute=kind), where))
        if found[-1].prediction.fits_memory == (kind == kinds[0]):
            break
    return found


def _predict_candidate(
    wish: SearchRequest, plan: Plan, states: DeviceOrHost, *, played: bool = False
) -> PredictedCandidate:
    layout = _build_candidate(wish, plan, states)
    return PredictedCandidate(
        layout, predict_step(wish.workload, layout, wish.cluster, played=played)
    )


def _build_candidate(wish: SearchRequest, plan: Plan, states: DeviceOrHost) -> Candidate:
    return Candidate(plan=plan, axis_order=plan.axis_order, states=states, fp8=wish.fp8)


def _choose_compile(wish: SearchRequest, plan: Plan) -> Plan:
    """A plan with compiled blocks, if these are faster where a run would not compile by itself.

    A graph does not overlap what it communicates, but its kernels pass over memory less often. Who
    gives all degrees asks about that run, as it is.
    """
    split = plan.depth * plan.row * plan.col > 1
    given = math.prod(wish.fixed_degrees.values())
    able = wish.allows_compile and plan.compile == "auto" and not wish.cluster.cores
    if not able or not split or given == wish.world_size:
        return plan
    graph = replace(plan, compile="on")
    where = wish.states or "device"
    spent = sum(
        step_seconds_by_part(
            wish.workload, _build_candidate(wish, graph, where), wish.cluster
        ).values()
    )
    plain = _build_candidate(wish, plan, where)
    if spent > block_compute_seconds(
        wish.workload, plain, wish.cluster
    ):  # else it hides less than it saves
        if sum(step_seconds_by_part(wish.workload, plain, wish.cluster).values()) <= spent:
            return plan
        return graph
    return graph


def has_fitting_layout(wish: SearchRequest) -> bool:
    """Whether a layout fits that keeps least: all computed again, states elsewhere if allowed.

    Of the factorisations those with the fewest copies of the model are asked.
    """
    least = sorted(valid_grids(wish)[0], key=lambda plan: plan.data)[:MAX_FIT_CHECKS]
    where: DeviceOrHost = wish.states or ("device" if wish.cluster.cores else "host")
    kind = wish.field_choices("recompute", RECOMPUTE_MODES)[-1]
    asked = (
        _predict_candidate(wish, replace(plan, recompute=kind), where).prediction for plan in least
    )
    return any(
        one.fits_memory and one.memory.host_bytes <= wish.cluster.host.memory for one in asked
    )


def _search_roughly(wish: SearchRequest, plan: Plan) -> list[PredictedCandidate]:
    """A factorisation with its least and a middle micro-batch, in one chunk."""
    some = plan_variants(wish, plan)
    few = [one for one in some[:2] if one.chunks == some[0].chunks]
    return [found for one in few for found in search_recompute(wish, one)]


def _search_fully(wish: SearchRequest, plan: Plan) -> list[PredictedCandidate]:
    """What `_rough` left out; where nothing fits, larger micro-batches do not either."""
    some = plan_variants(wish, plan)
    few = sum(one.chunks == some[0].chunks for one in some[:2])
    found = list[PredictedCandidate]()
    large = dict[int, int]()
    for one in some[few:]:
        if one.num_micro_batches > 1 and one.micro_batch >= large.get(one.chunks, one.batch):
            continue  # one micro-batch alone adds up no gradients
        tried = [*search_recompute(wish, one)]
        found += tried
        if not any(each.prediction.fits_memory for each in tried):
            large[one.chunks] = min(one.micro_batch, large.get(one.chunks, one.batch))
    return found


def _try_axis_orders(wish: SearchRequest, found: PredictedCandidate) -> list[PredictedCandidate]:
    """A layout with other orders of its axes, where they make a difference."""
    plan = found.plan
    seen = {_used_axes(found.plan, ())}
    made = []
    for axes in AXIS_ORDERS:
        order = tuple(axis for axis in axes if plan.degrees[axis] > 1)
        shape = _used_axes(plan, order)
        if shape not in seen:
            seen.add(shape)
            made.append(
                _predict_candidate(wish, replace(plan, order=order), found.candidate.states)
            )
    return made


def _used_axes(plan: Plan, order: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that are there, as they lie."""
    return tuple(axis for axis in replace(plan, order=order).axis_order if plan.degrees[axis] > 1)


@dataclass
class SearchProgress:
    """The best layout of a search so far, as results come in.

    The order in which they do depends on processes; the result of a search does not.
    """

    on_best: Callable[[PredictedCandidate, int], None]
    """Is told the best layout and how many were predicted, whenever results have come."""
    best: PredictedCandidate | None = None
    num_predicted: int = 0

    def add_results(self, several: Iterable[Sequence[PredictedCandidate]]) -> None:
        """Take in the layouts of some factorisations."""
        for found in several:
            self.num_predicted += len(found)
            for one in _fitting_candidates(found):
                if self.best is None or one.sort_key < self.best.sort_key:
                    self.best = one
        if self.best is not None:
            self.on_best(self.best, self.num_predicted)


def _first_guesses(wish: SearchRequest) -> Iterator[Plan]:
    """Plans to begin with: rows inside a node, few stages, and the rest over depth or data.

    They are of no matter to the result; a user sees one of them while all others are searched.
    """
    rows = [size for size in divisors(wish.world_size) if size <= wish.cluster.per_node]
    rows = [*dict.fromkeys((rows[-1], 1, *rows))]
    for pipe, row in itertools.product(divisors(wish.world_size)[:8], rows):
        rest, odd = divmod(wish.world_size, pipe * row)
        for copies in (1, rest, wish.cluster.per_node):
            if not odd and rest % copies == 0:
                sizes = {"pipe": pipe, "data": rest // copies, "depth": copies, "row": row}
                yield from plans_of_degrees(
                    wish, {**dict.fromkeys(RUNNABLE_AXES, 1), **sizes, **wish.fixed_degrees}
                )


def _first_look(wish: SearchRequest, progress: SearchProgress) -> None:
    """Report a layout that fits within a fraction of a second, if a guess does."""
    began = time.perf_counter()
    for plan in _first_guesses(wish):
        spent = time.perf_counter() - began
        if spent > (MAX_FIRST_LOOK_SECONDS if progress.best is None else FIRST_LOOK_SECONDS):
            break
        if is_allowed(wish, plan):
            progress.add_results([_search_roughly(wish, plan)])
    progress.num_predicted = 0  # they come again


def search_layouts(
    wish: SearchRequest,
    *,
    workers: int = 1,
    report: Callable[[PredictedCandidate, int], None] | None = None,
) -> SearchResult:
    """All layouts that were tried; none of `found` is there if none fits or can be divided.

    report: is told the best layout so far, and how many were predicted, again and again.
    """
    began = time.perf_counter()
    if report is None:
        progress = None
    else:
        progress = SearchProgress(report)
    if progress is not None:
        _first_look(wish, progress)
    if progress is None:
        seen = None
    else:
        seen = progress.add_results
    every, refused = valid_grids(wish)
    tasks = {
        "rough": partial(_search_roughly, wish),
        "full": partial(_search_fully, wish),
        "chunks": partial(_more_chunks, wish),
        "orders": partial(_try_axis_orders, wish),
    }
    with open_worker_pool(
        tasks, workers if len(every) >= PARALLEL_THRESHOLD else 1, seen
    ) as mapped:
        rough = mapped("rough", every)
        full = mapped("full", _worth_full_search(wish, every, rough))
        everything = [found for some in (*rough, *full) for found in some]
        if (
            "chunks" not in wish.fixed_fields
            and "policy" not in wish.fixed_fields
            and not wish.plan.stages
        ):
            some = mapped("chunks", _best_of_styles(wish, everything))
            everything += [found for one in some for found in one]
        if wish.cluster.nodes > 1 and "order" not in wish.fixed_fields:
            first = sorted(_fitting_candidates(everything), key=lambda one: one.sort_key)[
                :MAX_REORDERED
            ]
            both = {one.candidate: one for one in (*first, *_best_of_styles(wish, everything))}
            everything += [found for one in mapped("orders", [*both.values()]) for found in one]
    return _build_result(wish, everything, len(every), refused, began)


def _fitting_candidates(everything: Iterable[PredictedCandidate]) -> list[PredictedCandidate]:
    return [one for one in everything if one.prediction.fits_memory]


def _best_of_styles(
    wish: SearchRequest, everything: Sequence[PredictedCandidate]
) -> list[PredictedCandidate]:
    """The best layouts of each style, of different degrees and micro-batches."""
    found = dict[Candidate, PredictedCandidate]()
    node = wish.cluster.per_node
    fits = sorted(_fitting_candidates(everything), key=lambda one: one.sort_key)
    for of in STYLES.values():
        seen = dict[tuple[object, ...], PredictedCandidate]()
        for one in fits:
            if of(one.plan, node):
                plan = one.plan
                seen.setdefault((*plan.degrees.values(), plan.inner, plan.micro_batch), one)
                if len(seen) == REFINED_PER_STYLE:
                    break
        found |= {one.candidate: one for one in seen.values()}
    return [*found.values()]


def _more_chunks(wish: SearchRequest, found: PredictedCandidate) -> list[PredictedCandidate]:
    """A layout with the numbers of chunks that `variants` leaves out."""
    plan = found.plan
    made = list[Plan]()
    for chunks in range(2, min(wish.dim_sizes["layers"] // plan.pipe, MAX_CHUNKS) + 1):
        if plan.pipe > 1 and chunks not in CHUNK_CHOICES:
            made.append(with_schedule(wish, replace(plan, chunks=chunks)))
    return [one for plan in made if is_allowed(wish, plan) for one in search_recompute(wish, plan)]


def _build_result(
    wish: SearchRequest,
    everything: Sequence[PredictedCandidate],
    grids: int,
    refused: int,
    began: float,
) -> SearchResult:
    """What fits and what does not, each in its order."""
    fits = sorted(
        (one for one in everything if one.prediction.fits_memory), key=lambda one: one.sort_key
    )
    tight = [one for one in everything if not one.prediction.fits_memory]
    if is_message_driven(wish):
        fits, tight = _check_message_driven(wish, fits, tight)
    tight.sort(key=lambda one: (one.prediction.memory.total_bytes, one.sort_key))
    return SearchResult(
        wish, tuple(fits), tuple(tight), grids, refused, time.perf_counter() - began
    )


def _check_message_driven(
    wish: SearchRequest, fits: list[PredictedCandidate], tight: list[PredictedCandidate]
) -> tuple[list[PredictedCandidate], list[PredictedCandidate]]:
    """The first with the memory of its policy as it is played, perhaps with more computed again;
    those before it do not fit so."""
    failed = [*tight]
    for i, one in enumerate(fits[:MAX_REORDERED]):
        plan = one.plan
        where = one.candidate.states
        if plan.pipe == 1:
            return fits[i:], failed
        for kind in wish.field_choices(
            "recompute", RECOMPUTE_MODES[RECOMPUTE_MODES.index(plan.recompute) :]
        ):
            again = _predict_candidate(wish, replace(plan, recompute=kind), where, played=True)
            if again.prediction.fits_memory:
                return [again, *fits[i + 1 :]], failed
            failed.append(again)
    return [], [*failed, *fits[MAX_REORDERED:]]


def carry_over_layouts(wish: SearchRequest, known: Sequence[SearchResult]) -> SearchResult:
    """A quick look: the best layouts of other numbers of devices, carried over to this one.

    What splits a layer stays; pipe, data and depth share the other ranks, each about as before. It
    may find nothing where `search` does.
    """
    began = time.perf_counter()
    plans = dict[Plan, None]()
    for one in [
        one
        for result in known
        for one in result.feasible_candidates[: MAX_CARRIED_LAYOUTS // len(known)]
    ]:
        for sizes in _nearest_degrees(wish, one.plan):
            plan = replace(one.plan, **dict[str, Any](sizes), batch=wish.workload.batch)
            for micro in _nearby_micro_batches(wish, plan, one.plan.num_micro_batches):
                plans[with_schedule(wish, replace(plan, micro_batch=micro))] = None
    able = [plan for plan in plans if is_allowed(wish, plan)]
    everything = [found for plan in able for found in search_recompute(wish, plan)]
    return _build_result(wish, everything, len(able), len(plans) - len(able), began)


def _nearest_degrees(wish: SearchRequest, plan: Plan) -> list[dict[str, int]]:
    """Degrees on the ranks of a wish that are nearest to those of a plan."""
    rest, odd = divmod(wish.world_size, plan.row * plan.col * plan.expert)
    if odd:
        return []
    outer = {axis: plan.degrees[axis] for axis in ("pipe", "data", "depth")}
    choices = {axis: wish.fixed_degrees.get(axis) for axis in outer}
    sizes = enumerate_degrees(rest, {a: [n] if n else divisors(rest) for a, n in choices.items()})

    def far(one: Mapping[str, int]) -> tuple[float, int]:
        steps = {axis: abs(math.log(one[axis] / size)) for axis, size in outer.items()}
        return round(sum(steps.values()) + steps["pipe"], 6), sum(map(bool, steps.values()))

    least = {
        "batch": wish.workload.batch,
        "micro_batch": plan.col if plan.inner == "samples" else 1,
    }
    tried = (replace(plan, **dict[str, Any](one | least)) for one in sorted(sizes, key=far))
    some = itertools.islice((one for one in tried if is_allowed(wish, one)), DEGREES_PER_CARRIED)
    return [{axis: one.degrees[axis] for axis in outer} for one in some]


def _nearby_micro_batches(wish: SearchRequest, plan: Plan, count: int) -> set[int]:
    """Micro-batches near that of a plan: the next to it, the least, and that of so many a step."""
    if plan.inner == "samples":
        least = plan.col
    else:
        least = 1
    sizes = micro_batch_choices(wish, replace(plan, micro_batch=least))
    smaller = [size for size in sizes if size <= plan.micro_batch]
    larger = [size for size in sizes if size >= plan.micro_batch]
    alike = [size for size in sizes if size * count == plan.batch // plan.num_replicas]
    return {*sizes[:1], *smaller[-1:], *larger[:1], *alike}


def _worth_full_search(
    wish: SearchRequest, every: Sequence[Plan], rough: Sequence[Sequence[PredictedCandidate]]
) -> list[Plan]:
    """Factorisations that may still hold the best of a style."""
    node = wish.cluster.per_node
    times = [
        min((_best_case_seconds(wish, one) for one in several), default=math.inf)
        for several in rough
    ]
    found = set[int]()
    for of in STYLES.values():
        own = [i for i, plan in enumerate(every) if of(plan, node) and times[i] < math.inf]
        own.sort(key=lambda i: (times[i], i))
        found.update(
            i for i in own[:MAX_FULL_SEARCHES] if times[i] < FULL_SEARCH_RATIO * times[own[0]]
        )
    return [every[i] for i in sorted(found)]


def _best_case_seconds(wish: SearchRequest, found: PredictedCandidate) -> float:
    """Seconds of a step of a rough layout if chunks shorten what its stages wait as they can.

    Chunks may balance stages better, and so fit where one of them nearly does.
    """
    plan = found.plan
    it = found.prediction
    able = plan.pipe > 1 and plan.chunks == 1 and "chunks" not in wish.fixed_fields
    most = min(wish.dim_sizes["layers"] // plan.pipe, CHUNK_CHOICES[-1])
    if not able or "policy" in wish.fixed_fields or most < 2:
        if it.fits_memory:
            return it.step_seconds
        return math.inf
    if it.memory.total_bytes > CHUNK_MEMORY_RATIO * it.limit:
        return math.inf
    once = sum(it.seconds_by_part[name] for name in MICRO_BATCH_PARTS) / plan.num_micro_batches
    fill = min(
        (plan.pipe - 1) * once, it.seconds_by_part["bubble"]
    )  # the rest is for uneven stages
    return it.step_seconds - fill * (1 - 1 / most)
