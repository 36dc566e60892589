"""Searches the parallel layouts of a workload on a cluster and ranks them by predicted step time.

A layout is a factorization of the ranks over the axes, together with what `col` splits inside a
layer, the micro-batch, the number of model chunks per stage, whether blocks are compiled, how much
is recomputed or re-gathered, where optimizer states are stored, and the order of the axes. The
rules of `Plan` reject degrees that do not divide. Four heuristics reduce the rest:

    ladder   less recomputation and re-gathering is never slower, so the search of modes stops at
             the first mode that fits; it also stops if the mode that keeps least does not fit
    host     optimizer states are offloaded only if otherwise everything must be recomputed or
             nothing fits
    rough    each factorization is first tried with few micro-batches and one chunk; a full search
             follows for the MAX_FULL_SEARCHES best ones of a style that chunks could bring within
             FULL_SEARCH_RATIO times its best
    orders   other rank orders are tried for the MAX_REORDERED best layouts, and more numbers of
             chunks for the best of each style

The result depends on the request alone: not on processes, clocks or hashes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from ranvier.config.plan import AXES, Plan, WeightSplit, divisors
from ranvier.errors import PlanError
from ranvier.planner.baselines import STYLES, PredictedCandidate, StyleTest
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
"""From the fastest mode, which keeps most, to the slowest, which keeps least."""
FULL_SEARCH_RATIO = 1.25
"""Maximum slowdown of a factorization in the rough pass, relative to the best of its style, to be
searched fully."""
CHUNK_MEMORY_RATIO = 1.06
"""Predicted memory over device memory above which no number of chunks makes a pipeline fit."""
MAX_FULL_SEARCHES = 40
"""Maximum number of factorizations of a style that are searched fully."""
MAX_CARRIED_LAYOUTS = 32
"""Maximum number of layouts carried over from searches with other numbers of devices."""
DEGREES_PER_CARRIED = 3
"""Number of factorizations tried for each layout carried over."""
MAX_REORDERED = 40
"""Number of best layouts for which other orders of the axes are tried."""
REFINED_PER_STYLE = 5
"""Layouts of each style for which all numbers of chunks and other orders are tried."""
MAX_MICRO_BATCHES = 6
"""Maximum number of micro-batch sizes tried for a factorization."""
MAX_MICRO_BATCH_TOKENS = 2**18
"""Maximum tokens per micro-batch and rank, unless the smallest valid micro-batch has more."""
MIN_CONTEXT_TOKENS = {"gpu": 4096, "cpu": 256}
"""Minimum tokens of a sample on a rank of context. A GPU fetches the keys of others while it
computes from about 5,000 tokens on."""
SMALL_WEIGHT_SHARE = 0.08
LARGE_WEIGHT_SHARE = 0.6
"""Shares of device memory that weights and gradients take if they are gathered over depth only.
Below the first they are not gathered over context, above the second only over both."""
LONG_SAMPLE_TOKENS = 2**15
"""Tokens per sample from which on context may save memory even if there are enough samples."""
CHUNK_CHOICES = (1, 2, 4, 8)
"""Numbers of chunks per stage that are tried for each factorization."""
MAX_CHUNKS = 16
"""Maximum number of chunks per stage."""
MAX_FIT_CHECKS = 150
"""Maximum number of factorizations checked by `has_fitting_layout`."""
PARALLEL_THRESHOLD = 100
"""Number of factorizations above which a second process pays off despite its start-up time."""
MICRO_BATCH_PARTS = (
    "compute",
    "attention",
    "recompute",
    "row",
    "col",
    "expert",
    "context",
    "depth",
    "pipe",
)
"""Parts of the step time that recur with each micro-batch."""
FIRST_LOOK_SECONDS = 0.2
MAX_FIRST_LOOK_SECONDS = 0.6
"""Time limits of the first guesses before a search with progress reports: after one fits, and
while none does."""
AXIS_ORDERS: tuple[tuple[str, ...], ...] = (
    ("pipe", "depth", "row", "col"),
    ("depth", "data", "row", "col"),
    ("data", "depth", "row", "col"),
    ("col", "row"),
    ("row", "col", "pipe"),
    ("context", "row", "col"),
)
"""Rank orders tried in addition to the default one, innermost axis last: replicas outside of
stages; depth outside of data; both swapped with the axes between them; row inside of col;
neighboring stages on adjacent ranks; the parts of a sample on adjacent ranks."""


SEARCHED_STYLES: tuple[StyleTest, ...] = (
    *STYLES.values(),
    lambda plan, per_node: plan.context == 1,
)
"""Styles of which the best layouts are searched fully; also those without context, which the best
layout is compared with."""


@dataclass(frozen=True)
class SearchRequest:
    """A workload, a cluster, and the settings that are fixed."""

    workload: Workload
    cluster: Cluster
    plan: Plan = field(default_factory=Plan)
    """Values of the fixed settings. Its batch is replaced by the batch of the workload."""
    fixed_fields: frozenset[str] = frozenset()
    """Fields of the plan that are fixed."""
    states: DeviceOrHost | None = None
    """Where optimizer states are stored; None means on the device if they fit."""
    fp8: Fp8Scaling = ""
    allows_compile: bool = True
    """Whether blocks may be compiled where a run would not compile them by default."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.num_devices

    @cached_property
    def dim_sizes(self) -> Mapping[str, int]:
        """Size of each dim, in the units that Plan's rules use."""
        model = self.workload.model
        return {**model.units, "seq": self.workload.seq, "layers": model.num_layers}

    @cached_property
    def fixed_degrees(self) -> Mapping[str, int]:
        """Degrees that are fixed; -1 means not fixed."""
        given = {axis: getattr(self.plan, axis) for axis in AXES if axis in self.fixed_fields}
        return {axis: size for axis, size in given.items() if size != -1}

    @cached_property
    def searched_axes(self) -> tuple[str, ...]:
        """Axes that may have several ranks; without experts, `expert` is equivalent to `data`."""
        # A given degree is honoured even if it is useless.
        whole = self.dim_sizes.get("expert") or "expert" in self.fixed_degrees
        long = len(self.context_degrees) > 1 or "context" in self.fixed_degrees
        # The core of a recurrent model cannot be split into stages.
        staged = not self.workload.model.is_recurrent or "pipe" in self.fixed_degrees
        useful = {"expert": bool(whole), "context": long, "pipe": staged}
        return tuple(axis for axis in AXES if useful.get(axis, True))

    @cached_property
    def context_degrees(self) -> tuple[int, ...]:
        """Degrees of context that may be useful.

        It splits samples if there are fewer of them than ranks, or if they are so long that one
        does not fit, and if each rank gets enough tokens.
        """
        job = self.workload
        # Only decoders split tokens over context.
        able = job.model.units.get("kv_heads") and any(
            part.layers_of_kind("attention") for part in job.model.parts
        )
        enough = job.batch >= self.world_size and job.seq < LONG_SAMPLE_TOKENS
        if not able or enough:
            return (1,)
        least = MIN_CONTEXT_TOKENS["cpu" if self.cluster.cores else "gpu"]
        return tuple(n for n in divisors(self.world_size) if n == 1 or n * least <= job.seq)

    def field_choices(self, name: str, several: Sequence[Any]) -> Sequence[Any]:
        """Returns the candidate values of a field of the plan: `several`, or only the fixed
        value.
        """
        if name in self.fixed_fields:
            return (getattr(self.plan, name),)
        return several


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    request: SearchRequest
    feasible_candidates: tuple[PredictedCandidate, ...]
    """Layouts that fit, best first."""
    oversized_candidates: tuple[PredictedCandidate, ...]
    """Layouts that do not fit into memory, smallest first."""
    num_grids: int
    """Number of factorizations that the rules of `Plan` allow."""
    num_rejected_grids: int
    """Number of factorizations that the rules of `Plan` reject."""
    search_seconds: float
    """Wall-clock time of the search."""
    from_cache: bool = False
    """Whether the result was loaded from the cache (`result_cache`)."""

    @property
    def num_candidates(self) -> int:
        """Number of layouts that were predicted."""
        return len(self.feasible_candidates) + len(self.oversized_candidates)

    @property
    def best(self) -> PredictedCandidate:
        """The best layout that fits; raises a PlanError with the smallest change that would fit."""
        if not self.feasible_candidates:
            # Imported here because suggestions itself imports this module to search.
            from ranvier.planner import suggestions

            raise PlanError(suggestions.explain_infeasible(self))
        return self.feasible_candidates[0]


def enumerate_degrees(world: int, choices: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yields all degrees whose product is `world`. choices: allowed degrees of each axis."""
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
    """Returns the degrees allowed for each axis on its own, or only the fixed one.

    A degree that is invalid on its own is also invalid in combination with other axes.
    """
    found = {}
    for axis in wish.searched_axes:
        given = wish.fixed_degrees.get(axis)
        if given is None and axis == "context":
            sizes = [*wish.context_degrees]
        elif given is None:
            sizes = divisors(wish.world_size)
        elif given > 0:
            sizes = [given]
        else:
            sizes = []
        found[axis] = [size for size in sizes if _divides_alone(wish, axis, size)]
    return found


def _divides_alone(wish: SearchRequest, axis: str, size: int) -> bool:
    alone = dict.fromkeys(AXES, 1) | {axis: size}
    # The whole share of a replica as one micro-batch is the most permissive choice.
    whole = [
        replace(p, micro_batch=p.global_batch // p.num_replicas)
        for p in plans_of_degrees(wish, alone)
    ]
    # Fixed pipeline settings must not reject degrees of other axes tried with pipe = 1.
    if alone["pipe"] == 1:
        whole = [
            replace(p, virtual_stages=1, vocab_over_pipe=False, stage_starts=()) for p in whole
        ]
    return any(p.micro_batch and not any(p.find_problems(wish.dim_sizes)) for p in whole)


def valid_grids(wish: SearchRequest) -> tuple[list[Plan], int]:
    """Returns plans of all valid factorizations with their smallest micro-batch, and the number of
    invalid ones.
    """
    found = []
    kept = 0
    for sizes in enumerate_degrees(wish.world_size, degree_choices(wish)):
        able = [plan for plan in plans_of_degrees(wish, sizes) if is_allowed(wish, plan)]
        # Both variants of col may be valid, but they are one factorization.
        found += able
        kept += bool(able)
    return found, _count_factorisations(wish) - kept


def _count_factorisations(wish: SearchRequest) -> int:
    """Returns the number of factorizations before any rule: Π binom(e + k - 1, e) over prime
    powers p^e.
    """
    rest = wish.world_size
    count = 1
    free = len(wish.searched_axes) - len(wish.fixed_degrees)
    known = math.prod(wish.fixed_degrees.values())
    # Fixed degrees that do not divide the ranks leave no factorization.
    if known < 1 or rest % known or (free == 0 and rest != known):
        return 0
    rest = rest // known
    # Each prime power p^e is distributed over the k free axes independently of other primes.
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
    """Returns whether the rules of `Plan` allow a plan and its stage starts match its stages."""
    if plan.pipe > 1 and wish.workload.model.is_recurrent:
        return False
    if plan.stage_starts and len(plan.stage_starts) + 1 != plan.pipe * plan.virtual_stages:
        return False
    return next(plan.find_problems(wish.dim_sizes, wish.world_size), None) is None


def plans_of_degrees(wish: SearchRequest, sizes: Mapping[str, int]) -> Iterator[Plan]:
    """Yields a plan with these degrees for each way in which col can split a layer."""
    sizes = {**dict.fromkeys(AXES, 1), **sizes}
    both = ("samples", "features") if sizes["col"] > 1 else ("samples",)
    # The interleaved schedule is not defined for a single chunk per stage.
    if wish.plan.schedule == "interleaved" and sizes["pipe"] > 1:
        chunks = 2
    else:
        chunks = 1
    fixed = {
        "virtual_stages": chunks,
        "reshard_after": "micro_batch",
        "rank_order": (),
        **_fixed_values(wish),
    }
    over = wish.field_choices("shard_weights_over", _weight_splits(wish, sizes))
    for inner, weights in itertools.product(wish.field_choices("col_splits", both), over):
        # col splits the samples of a micro-batch, so there must be at least one per col rank.
        if inner == "samples":
            least = sizes["col"]
        else:
            least = 1
        changes = {"micro_batch": least, **fixed, **sizes, "col_splits": inner}
        changes["shard_weights_over"] = weights
        if "micro_batch" in wish.fixed_fields and wish.plan.micro_batch > 0:
            changes["micro_batch"] = wish.plan.micro_batch
        changes["global_batch"] = wish.workload.batch
        yield replace(wish.plan, **changes)


def _weight_splits(wish: SearchRequest, sizes: Mapping[str, int]) -> Sequence[WeightSplit]:
    """Returns the ranks to gather weights over: also over context where they need much memory."""
    if sizes["context"] == 1:
        return ("depth",)
    ranks = sizes["pipe"] * sizes["depth"] * sizes["row"] * sizes["col"] * sizes["expert"]
    # Weights in 16 bits and their gradients in fp32.
    share = 6 * wish.workload.model.num_parameters / ranks / wish.cluster.device.memory
    if share > LARGE_WEIGHT_SHARE:
        return ("depth_context",)
    if share < SMALL_WEIGHT_SHARE:
        return ("depth",)
    return ("depth", "depth_context")


def _fixed_values(wish: SearchRequest) -> dict[str, Any]:
    names = ("virtual_stages", "reshard_after", "rank_order")
    return {name: getattr(wish.plan, name) for name in names if name in wish.fixed_fields}


def micro_batch_choices(wish: SearchRequest, plan: Plan) -> list[int]:
    """Returns micro-batches to try: divisors of a replica's share, evenly spaced on a log scale."""
    if "micro_batch" in wish.fixed_fields and wish.plan.micro_batch > 0:
        return [wish.plan.micro_batch]
    # Sequences per replica and step; a micro-batch must divide it.
    share = plan.global_batch // plan.num_replicas
    multiple = plan.micro_batch
    most = max(MAX_MICRO_BATCH_TOKENS * plan.context // wish.workload.seq, multiple)
    sizes = [n for n in divisors(share) if n % multiple == 0 and n <= most]
    if len(sizes) <= MAX_MICRO_BATCHES:
        return sizes
    # Geometric spacing between the smallest and the largest; ties go to the smaller size.
    wanted = [
        sizes[0] * (sizes[-1] / sizes[0]) ** (i / (MAX_MICRO_BATCHES - 1))
        for i in range(MAX_MICRO_BATCHES)
    ]
    return sorted({min(sizes, key=lambda n: (abs(math.log(n / w)), n)) for w in wanted})


def plan_variants(wish: SearchRequest, plan: Plan) -> list[Plan]:
    """Returns a factorization with each micro-batch and number of chunks; the rough pass uses the
    first ones.
    """
    sizes = micro_batch_choices(wish, plan)
    # The rough pass takes the first two variants, so these two sizes come first.
    rough = list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2])))
    made = []
    for chunks in wish.field_choices("virtual_stages", CHUNK_CHOICES if plan.pipe > 1 else (1,)):
        # Every virtual stage needs at least one block.
        if chunks > 1 and plan.pipe * chunks > wish.dim_sizes["layers"]:
            continue
        policy = with_schedule(wish, replace(plan, virtual_stages=chunks)).schedule
        for micro in (*rough, *(n for n in sizes if n not in rough)):
            made.append(replace(plan, micro_batch=micro, virtual_stages=chunks, schedule=policy))
    # With one chunk and a default schedule the factorization is already known to be valid.
    plain = "schedule" not in wish.fixed_fields and not plan.stage_starts
    return [one for one in made if (plain and one.virtual_stages == 1) or is_allowed(wish, one)]


def with_schedule(wish: SearchRequest, plan: Plan) -> Plan:
    """Returns a plan with the schedule whose memory has a closed form, unless another is fixed.

    The message-driven schedule needs more memory, and a limit on the micro-batches in flight
    (`max_in_flight`) needs that schedule.
    """
    if is_message_driven(wish) or "schedule" in wish.fixed_fields:
        return plan
    return replace(
        plan, schedule=default_schedule(plan.virtual_stages) if plan.pipe > 1 else Plan().schedule
    )


def is_message_driven(wish: SearchRequest) -> bool:
    """Returns whether the stages of its pipelines run the message-driven schedule."""
    # It is also the default of a plan, so it counts only if the user has set it.
    asked = "schedule" in wish.fixed_fields or wish.plan.max_in_flight > 0
    return wish.plan.schedule == "message_driven" and asked


def search_recompute(wish: SearchRequest, plan: Plan) -> Iterator[PredictedCandidate]:
    """Yields a plan with increasing recomputation, with and without offload, until one fits."""
    # Keeping gathered weights between micro-batches only differs if there are several of them.
    again = plan.gather_ranks > 1 and plan.num_micro_batches > 1
    if wish.states:
        places: Sequence[DeviceOrHost] = (wish.states,)
    else:
        places = ("device", "host")
    # On CPU clusters device and host are the same memory: offloading saves nothing.
    if wish.cluster.cores and not wish.states:
        places = ("device",)
    ways = wish.field_choices(
        "reshard_after", ("step", "micro_batch") if again else ("micro_batch",)
    )
    kind = wish.field_choices("recompute", RECOMPUTE_MODES)[0]
    plan = _choose_compile(wish, replace(plan, reshard_after=ways[0], recompute=kind))
    for gathered in ways:
        tried: list[PredictedCandidate] = []
        for where in places:
            if tried and not _should_offload_states(wish, tried):
                break
            tried = _try_recompute_modes(wish, replace(plan, reshard_after=gathered), where)
            yield from tried
            # The fastest mode fits. If weights stay gathered as well, nothing below is faster.
            if tried[0].prediction.fits_memory:
                if gathered == "step" and where == places[0]:
                    return
                break


def _should_offload_states(wish: SearchRequest, tried: Sequence[PredictedCandidate]) -> bool:
    """Returns whether optimizer states should be offloaded to the host.

    True if nothing fits with states on the device, or only full recomputation does while another
    mode would fit without them.
    """
    if any(
        one.prediction.fits_memory and one.plan.recompute != RECOMPUTE_MODES[-1] for one in tried
    ):
        return False
    for one in tried:
        device = one.prediction.memory.device
        states = device.get("master", 0) + device.get("moments", 0)
        over = one.prediction.memory.total_bytes - one.prediction.limit
        # Offloading helps only if the excess is at most what it frees.
        if 0 < over <= states <= wish.cluster.host.memory:
            return True
    return False


def _try_recompute_modes(
    wish: SearchRequest, plan: Plan, where: DeviceOrHost
) -> list[PredictedCandidate]:
    """Tries the mode with least recomputation; if it does not fit, the one that keeps least, then
    the others.

    If the mode that keeps least does not fit, the modes in between are not predicted.
    """
    kinds = wish.field_choices("recompute", RECOMPUTE_MODES)
    found = []
    for kind in dict.fromkeys((kinds[0], kinds[-1], *kinds[1:-1])):
        found.append(_predict_candidate(wish, replace(plan, recompute=kind), where))
        # Stop if the fastest mode fits, or if any other mode does not.
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
    """Returns a plan with compiled blocks if they are faster and a run would not compile by
    default.

    A compiled graph does not overlap its communication, but its kernels access memory less often.
    If all degrees are fixed, the request is for exactly that run, which is predicted unchanged.
    """
    split = plan.depth * plan.row * plan.col > 1
    given = math.prod(wish.fixed_degrees.values())
    # With unsplit layers, compile=auto compiles anyway.
    able = wish.allows_compile and plan.compile == "auto" and not wish.cluster.cores
    # Compiled blocks over context are not priced.
    able &= plan.context == 1
    # A compiled recurrent core would gather its weights in each iteration.
    able &= plan.gather_ranks == 1 or not wish.workload.model.is_recurrent
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
    # Compute alone is a lower bound of the eager step: only above it the eager time is needed.
    if spent > block_compute_seconds(wish.workload, plain, wish.cluster):
        if sum(step_seconds_by_part(wish.workload, plain, wish.cluster).values()) <= spent:
            return plan
        return graph
    return graph


def has_fitting_layout(wish: SearchRequest) -> bool:
    """Returns whether a layout with the least memory fits: full recomputation, and states offloaded
    if allowed.

    Only the factorizations with the fewest replicas of the model are checked.
    """
    # Replicas over data do not reduce the memory of weights.
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
    """Returns a factorization with its smallest and a medium micro-batch, with one chunk."""
    some = plan_variants(wish, plan)
    few = [one for one in some[:2] if one.virtual_stages == some[0].virtual_stages]
    return [found for one in few for found in search_recompute(wish, one)]


def _search_fully(wish: SearchRequest, plan: Plan) -> list[PredictedCandidate]:
    """Returns the layouts that `_search_roughly` skips. Where nothing fits, larger micro-batches
    are skipped.
    """
    some = plan_variants(wish, plan)
    # The number of variants that the rough pass has already predicted.
    few = sum(one.virtual_stages == some[0].virtual_stages for one in some[:2])
    found = list[PredictedCandidate]()
    # Smallest micro-batch that did not fit, by number of chunks.
    large = dict[int, int]()
    for one in some[few:]:
        # A single micro-batch needs no gradient accumulation and may fit even if smaller ones
        # did not.
        if one.num_micro_batches > 1 and one.micro_batch >= large.get(
            one.virtual_stages, one.global_batch
        ):
            continue
        tried = [*search_recompute(wish, one)]
        found += tried
        if not any(each.prediction.fits_memory for each in tried):
            large[one.virtual_stages] = min(
                one.micro_batch, large.get(one.virtual_stages, one.global_batch)
            )
    return found


def _try_axis_orders(wish: SearchRequest, found: PredictedCandidate) -> list[PredictedCandidate]:
    """Returns a layout with other orders of its axes, skipping orders that place the ranks
    identically.
    """
    plan = found.plan
    seen = {_used_axes(found.plan, ())}
    made = []
    for axes in AXIS_ORDERS:
        order = tuple(axis for axis in axes if plan.degrees[axis] > 1)
        # Axes with one rank do not matter, so several orders may be the same placement.
        shape = _used_axes(plan, order)
        if shape not in seen:
            seen.add(shape)
            made.append(
                _predict_candidate(wish, replace(plan, rank_order=order), found.candidate.states)
            )
    return made


def _used_axes(plan: Plan, order: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes with several ranks, in their order."""
    return tuple(
        axis for axis in replace(plan, rank_order=order).axis_order if plan.degrees[axis] > 1
    )


@dataclass
class SearchProgress:
    """The best layout of a search so far, updated as results arrive.

    The order of arrival depends on the worker processes; the result of the search does not.
    """

    on_best: Callable[[PredictedCandidate, int], None]
    """Called with the best layout and the number of predicted layouts when results arrive."""
    best: PredictedCandidate | None = None
    num_predicted: int = 0

    def add_results(self, several: Iterable[Sequence[PredictedCandidate]]) -> None:
        """Adds the layouts of some factorizations."""
        for found in several:
            self.num_predicted += len(found)
            for one in _fitting_candidates(found):
                if self.best is None or one.sort_key < self.best.sort_key:
                    self.best = one
        if self.best is not None:
            self.on_best(self.best, self.num_predicted)


def _first_guesses(wish: SearchRequest) -> Iterator[Plan]:
    """Yields plans to start with: rows inside a node, few stages, and the rest over depth or data.

    They do not affect the result. The user sees one of them while the search is running.
    """
    rows = [size for size in divisors(wish.world_size) if size <= wish.cluster.per_node]
    # The largest row degree in a node first, then none, then the others.
    rows = [*dict.fromkeys((rows[-1], 1, *rows))]
    for pipe, row in itertools.product(divisors(wish.world_size)[:8], rows):
        rest, odd = divmod(wish.world_size, pipe * row)
        # All data parallel, all FSDP, or FSDP inside a node (HSDP).
        for copies in (1, rest, wish.cluster.per_node):
            if not odd and rest % copies == 0:
                sizes = {"pipe": pipe, "data": rest // copies, "depth": copies, "row": row}
                yield from plans_of_degrees(
                    wish, {**dict.fromkeys(AXES, 1), **sizes, **wish.fixed_degrees}
                )


def _first_look(wish: SearchRequest, progress: SearchProgress) -> None:
    """Reports a layout within a fraction of a second if one of the guesses fits."""
    began = time.perf_counter()
    for plan in _first_guesses(wish):
        spent = time.perf_counter() - began
        if spent > (MAX_FIRST_LOOK_SECONDS if progress.best is None else FIRST_LOOK_SECONDS):
            break
        if is_allowed(wish, plan):
            progress.add_results([_search_roughly(wish, plan)])
    # The search predicts these layouts again and counts them then.
    progress.num_predicted = 0


def search_layouts(
    wish: SearchRequest,
    *,
    workers: int = 1,
    report: Callable[[PredictedCandidate, int], None] | None = None,
) -> SearchResult:
    """Returns all predicted layouts. None is feasible if none fits or none divides.

    report: called repeatedly with the best layout so far and the number of predicted layouts.
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
        "virtual_stages": partial(_more_chunks, wish),
        "orders": partial(_try_axis_orders, wish),
    }
    # Worker processes take time to start, so small searches stay in this one.
    with open_worker_pool(
        tasks, workers if len(every) >= PARALLEL_THRESHOLD else 1, seen
    ) as mapped:
        rough = mapped("rough", every)
        full = mapped("full", _worth_full_search(wish, every, rough))
        everything = [found for some in (*rough, *full) for found in some]
        # Refine only what is not fixed: fixed chunks, schedule or stage starts leave nothing to
        # vary.
        if (
            "virtual_stages" not in wish.fixed_fields
            and "schedule" not in wish.fixed_fields
            and not wish.plan.stage_starts
        ):
            some = mapped("virtual_stages", _best_of_styles(wish, everything))
            everything += [found for one in some for found in one]
        # Within one node all links are alike, so the rank order makes no difference.
        if wish.cluster.nodes > 1 and "rank_order" not in wish.fixed_fields:
            first = sorted(_fitting_candidates(everything), key=lambda one: one.sort_key)[
                :MAX_REORDERED
            ]
            # A dict, because the best of a style may be among the best of all.
            both = {one.candidate: one for one in (*first, *_best_of_styles(wish, everything))}
            everything += [found for one in mapped("orders", [*both.values()]) for found in one]
    return _build_result(wish, everything, len(every), refused, began)


def _fitting_candidates(everything: Iterable[PredictedCandidate]) -> list[PredictedCandidate]:
    return [one for one in everything if one.prediction.fits_memory]


def _best_of_styles(
    wish: SearchRequest, everything: Sequence[PredictedCandidate]
) -> list[PredictedCandidate]:
    """Returns the best layouts of each style, with distinct degrees and micro-batches."""
    found = dict[Candidate, PredictedCandidate]()
    node = wish.cluster.per_node
    fits = sorted(_fitting_candidates(everything), key=lambda one: one.sort_key)
    for of in SEARCHED_STYLES:
        seen = dict[tuple[object, ...], PredictedCandidate]()
        for one in fits:
            if of(one.plan, node):
                plan = one.plan
                # Sorted input: the first candidate of each shape is its best.
                splits = (plan.col_splits, plan.shard_weights_over)
                seen.setdefault((*plan.degrees.values(), *splits, plan.micro_batch), one)
                if len(seen) == REFINED_PER_STYLE:
                    break
        found |= {one.candidate: one for one in seen.values()}
    return [*found.values()]


def _more_chunks(wish: SearchRequest, found: PredictedCandidate) -> list[PredictedCandidate]:
    """Returns a layout with the numbers of chunks that `plan_variants` leaves out."""
    plan = found.plan
    made = list[Plan]()
    for chunks in range(2, min(wish.dim_sizes["layers"] // plan.pipe, MAX_CHUNKS) + 1):
        if plan.pipe > 1 and chunks not in CHUNK_CHOICES:
            made.append(with_schedule(wish, replace(plan, virtual_stages=chunks)))
    return [one for plan in made if is_allowed(wish, plan) for one in search_recompute(wish, plan)]


def _build_result(
    wish: SearchRequest,
    everything: Sequence[PredictedCandidate],
    grids: int,
    refused: int,
    began: float,
) -> SearchResult:
    """Returns the layouts that fit and those that do not, each sorted."""
    fits = sorted(
        (one for one in everything if one.prediction.fits_memory), key=lambda one: one.sort_key
    )
    tight = [one for one in everything if not one.prediction.fits_memory]
    # The search assumes the memory of 1F1B; only the final choice is simulated, which is slow.
    if is_message_driven(wish):
        fits, tight = _check_message_driven(wish, fits, tight)
    tight.sort(key=lambda one: (one.prediction.memory.total_bytes, one.sort_key))
    return SearchResult(
        wish, tuple(fits), tuple(tight), grids, refused, time.perf_counter() - began
    )


def _check_message_driven(
    wish: SearchRequest, fits: list[PredictedCandidate], tight: list[PredictedCandidate]
) -> tuple[list[PredictedCandidate], list[PredictedCandidate]]:
    """Replaces the best layout by one whose memory is simulated under the message-driven schedule.

    If it does not fit, more recomputation is tried. Layouts that fail with all modes are moved to
    the ones that do not fit.
    """
    failed = [*tight]
    for i, one in enumerate(fits[:MAX_REORDERED]):
        plan = one.plan
        where = one.candidate.states
        # Without a pipeline the schedule does not matter.
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
    """Returns a quick search, which adapts the best layouts of other numbers of devices.

    The degrees that split a layer stay. pipe, data and depth share the other ranks, each close to
    its former degree. It may find nothing even if `search_layouts` does.
    """
    began = time.perf_counter()
    plans = dict[Plan, None]()
    for one in [
        one
        for result in known
        for one in result.feasible_candidates[: MAX_CARRIED_LAYOUTS // len(known)]
    ]:
        for sizes in _nearest_degrees(wish, one.plan):
            plan = replace(one.plan, **dict[str, Any](sizes), global_batch=wish.workload.batch)
            for micro in _nearby_micro_batches(wish, plan, one.plan.num_micro_batches):
                plans[with_schedule(wish, replace(plan, micro_batch=micro))] = None
    able = [plan for plan in plans if is_allowed(wish, plan)]
    everything = [found for plan in able for found in search_recompute(wish, plan)]
    return _build_result(wish, everything, len(able), len(plans) - len(able), began)


def _nearest_degrees(wish: SearchRequest, plan: Plan) -> list[dict[str, int]]:
    """Returns the degrees for the ranks of a request that are nearest to the degrees of a plan."""
    rest, odd = divmod(wish.world_size, plan.row * plan.col * plan.expert * plan.context)
    if odd:
        return []
    outer = {axis: plan.degrees[axis] for axis in ("pipe", "data", "depth")}
    choices = {axis: wish.fixed_degrees.get(axis) for axis in outer}
    # Only the outer axes change; row, col, expert and context keep their degrees.
    sizes = enumerate_degrees(rest, {a: [n] if n else divisors(rest) for a, n in choices.items()})

    def far(one: Mapping[str, int]) -> tuple[float, int]:
        # Distance in log space. The pipe degree counts twice; ties go to the fewest changed axes.
        steps = {axis: abs(math.log(one[axis] / size)) for axis, size in outer.items()}
        return round(sum(steps.values()) + steps["pipe"], 6), sum(map(bool, steps.values()))

    least = {
        "global_batch": wish.workload.batch,
        "micro_batch": plan.col if plan.col_splits == "samples" else 1,
    }
    tried = (replace(plan, **dict[str, Any](one | least)) for one in sorted(sizes, key=far))
    some = itertools.islice((one for one in tried if is_allowed(wish, one)), DEGREES_PER_CARRIED)
    return [{axis: one.degrees[axis] for axis in outer} for one in some]


def _nearby_micro_batches(wish: SearchRequest, plan: Plan, count: int) -> set[int]:
    """Returns micro-batches near the one of a plan: adjacent sizes, the smallest, and the one with
    `count` micro-batches.
    """
    if plan.col_splits == "samples":
        least = plan.col
    else:
        least = 1
    sizes = micro_batch_choices(wish, replace(plan, micro_batch=least))
    smaller = [size for size in sizes if size <= plan.micro_batch]
    larger = [size for size in sizes if size >= plan.micro_batch]
    alike = [size for size in sizes if size * count == plan.global_batch // plan.num_replicas]
    return {*sizes[:1], *smaller[-1:], *larger[:1], *alike}


def _worth_full_search(
    wish: SearchRequest, every: Sequence[Plan], rough: Sequence[Sequence[PredictedCandidate]]
) -> list[Plan]:
    """Returns the factorizations that may still contain the best layout of a style."""
    node = wish.cluster.per_node
    # Best-case time of each factorization; infinite if it cannot fit.
    times = [
        min((_best_case_seconds(wish, one) for one in several), default=math.inf)
        for several in rough
    ]
    found = set[int]()
    for of in SEARCHED_STYLES:
        own = [i for i, plan in enumerate(every) if of(plan, node) and times[i] < math.inf]
        own.sort(key=lambda i: (times[i], i))
        found.update(
            i for i in own[:MAX_FULL_SEARCHES] if times[i] < FULL_SEARCH_RATIO * times[own[0]]
        )
    return [every[i] for i in sorted(found)]


def _best_case_seconds(wish: SearchRequest, found: PredictedCandidate) -> float:
    """Returns the seconds per step of a rough layout if chunks shorten its pipeline bubble as much
    as possible.

    Chunks may also balance the stages better, so that a layout fits that nearly does.
    """
    plan = found.plan
    it = found.prediction
    able = plan.pipe > 1 and plan.virtual_stages == 1 and "virtual_stages" not in wish.fixed_fields
    most = min(wish.dim_sizes["layers"] // plan.pipe, CHUNK_CHOICES[-1])
    if not able or "schedule" in wish.fixed_fields or most < 2:
        if it.fits_memory:
            return it.step_seconds
        return math.inf
    if it.memory.total_bytes > CHUNK_MEMORY_RATIO * it.limit:
        return math.inf
    once = sum(it.seconds_by_part[name] for name in MICRO_BATCH_PARTS) / plan.num_micro_batches
    # Only the fill and drain time shrinks with chunks; the rest of the bubble is stage imbalance.
    fill = min((plan.pipe - 1) * once, it.seconds_by_part["bubble"])
    return it.step_seconds - fill * (1 - 1 / most)
