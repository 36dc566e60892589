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

from ranvier.config.plan import RUNTIME, Plan, divisors
from ranvier.errors import PlanError
from ranvier.planner.baselines import STYLES, Found
from ranvier.planner.cluster import Cluster
from ranvier.planner.predict import Job, Layout, computed, predict, seconds, usual_order
from ranvier.planner.time.compute import Scales
from ranvier.planner.worker_pool import several

States = Literal["device", "host"]

RECOMPUTE = ("none", "selective", "full")
"""From the fastest that keeps most to the slowest that keeps least."""
NEAR = 1.25
"""How much slower than the best of its style a factorisation may be at first and still be searched
in full."""
NEARLY = 1.06
"""Memory over that of a device from which on no number of chunks makes a pipeline fit."""
FULL = 40
"""Factorisations of a style that are searched in full, at most."""
ALIKE = 32
"""Layouts that are carried over from another number of devices."""
CARRIED = 3
"""Degrees that one of them is given there."""
BEST = 40
"""Layouts for which other orders of the axes are tried."""
REFINED = 5
"""Layouts of each style for which all numbers of chunks and other orders are tried."""
MICROS = 6
"""Micro-batches that are tried for a factorisation, at most."""
TOKENS = 2**18
"""Tokens of a micro-batch of a rank, at most, unless fewer samples cannot be."""
CHUNKS = (1, 2, 4, 8)
"""Chunks of a stage that are tried for each factorisation."""
MOST_CHUNKS = 16
"""Chunks of a stage, at most."""
FEW = 150
"""Factorisations that are asked whether anything fits."""
MANY = 100
"""Factorisations from which on a second process is worth its start."""
LAPS = ("compute", "attention", "again", "row", "col", "expert", "context", "depth", "pipe")
"""Parts of a step that each micro-batch has."""
LOOK, LONGEST_LOOK = 0.2, 0.6
"""Seconds in which guesses are tried before a search that is watched: at most, and if none fits."""
ORDERS: tuple[tuple[str, ...], ...] = (
    ("pipe", "depth", "row", "col"),
    ("depth", "data", "row", "col"),
    ("data", "depth", "row", "col"),
    ("col", "row"),
    ("row", "col", "pipe"),
)
"""Placements besides the usual one, innermost last: copies outside of stages; depth outside of
data; both swapped with what lies between; row inside of col; neighbouring stages side by side."""


@dataclass(frozen=True)
class Wish:
    """What is asked: a job, a machine, and what is settled already."""

    job: Job
    cluster: Cluster
    plan: Plan = field(default_factory=Plan)
    """Values of what is settled; its batch is that of the job."""
    fixed: frozenset[str] = frozenset()
    """Fields of the plan that are settled."""
    states: States | None = None
    """Where states rest; None: on the device if they fit."""
    fp8: Scales = ""
    graphs: bool = True
    """Whether blocks may be compiled where a run would not do so by itself."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.cluster.devices

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Units of each dim, as Plan's rules know them."""
        model = self.job.model
        return {**model.units, "seq": self.job.seq, "layers": model.layers}

    @cached_property
    def degrees(self) -> Mapping[str, int]:
        """Degrees that are settled; -1 is not."""
        given = {axis: getattr(self.plan, axis) for axis in RUNTIME if axis in self.fixed}
        return {axis: size for axis, size in given.items() if size != -1}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes that may have several ranks; without experts theirs is but another data."""
        whole = self.sizes.get("expert") or "expert" in self.degrees
        return tuple(axis for axis in RUNTIME if whole or axis != "expert")

    def choices(self, name: str, several: Sequence[Any]) -> Sequence[Any]:
        """What a field of the plan may be: several things, or what is settled."""
        return (getattr(self.plan, name),) if name in self.fixed else several


@dataclass(frozen=True)
class Result:
    """What a search has found."""

    wish: Wish
    found: tuple[Found, ...]
    """Layouts that fit, the best first."""
    tight: tuple[Found, ...]
    """Layouts that need more memory than there is, the one that needs least first."""
    grids: int
    """Factorisations that Plan's rules allow."""
    refused: int
    """Factorisations that they do not."""
    seconds: float
    """Of the search."""
    cached: bool = False
    """Whether it was made earlier (`result_cache`)."""

    @property
    def count(self) -> int:
        """Layouts that were predicted."""
        return len(self.found) + len(self.tight)

    @property
    def best(self) -> Found:
        """The first that fits, or a PlanError with the nearest change that makes one fit."""
        if not self.found:
            from ranvier.planner import suggestions  # which searches, too

            raise PlanError(suggestions.problems(self))
        return self.found[0]


def factorisations(world: int, choices: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """All degrees that multiply to `world`. choices: what the degree of each axis may be."""
    if not choices:
        if world == 1:
            yield {}
        return
    (axis, sizes), *rest = choices.items()
    for size in sizes:
        if world % size == 0:
            for others in factorisations(world // size, dict(rest)):
                yield {axis: size, **others}


def degrees(wish: Wish) -> dict[str, list[int]]:
    """What the degree of each axis may be: what Plan's rules allow it alone, or what is settled.

    An axis that cannot be divided alone cannot be divided beside others.
    """
    found = {}
    for axis in wish.axes:
        given = wish.degrees.get(axis)
        sizes = divisors(wish.world) if given is None else [given] if given > 0 else []
        found[axis] = [size for size in sizes if _alone(wish, axis, size)]
    return found


def _alone(wish: Wish, axis: str, size: int) -> bool:
    alone = dict.fromkeys(RUNTIME, 1) | {axis: size}
    whole = [replace(p, micro_batch=p.batch // p.replicas) for p in plans(wish, alone)]
    if alone["pipe"] == 1:  # what is settled of stages is no matter of other axes
        whole = [replace(p, chunks=1, spread=False, stages=()) for p in whole]
    return any(p.micro_batch and not any(p.problems(wish.sizes)) for p in whole)


def grids(wish: Wish) -> tuple[list[Plan], int]:
    """Plans of all factorisations that can run at their least micro-batch, and how many cannot."""
    found, kept = [], 0
    for sizes in factorisations(wish.world, degrees(wish)):
        able = [plan for plan in plans(wish, sizes) if allowed(wish, plan)]
        found += able
        kept += bool(able)
    return found, _number(wish) - kept


def _number(wish: Wish) -> int:
    """How many factorisations there are, whatever rules say: Π (e + k - 1 over e) of its primes."""
    rest, count, free = wish.world, 1, len(wish.axes) - len(wish.degrees)
    known = math.prod(wish.degrees.values())
    if known < 1 or rest % known or (free == 0 and rest != known):
        return 0
    rest, prime = rest // known, 2
    while rest > 1:
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        count *= math.comb(power + free - 1, power) if power else 1
        prime += 1
    return count


def allowed(wish: Wish, plan: Plan) -> bool:
    """Whether Plan's rules allow it; stages that are given are as many as there are."""
    if plan.stages and len(plan.stages) + 1 != plan.pipe * plan.chunks:
        return False
    return next(plan.problems(wish.sizes, wish.world), None) is None


def plans(wish: Wish, sizes: Mapping[str, int]) -> Iterator[Plan]:
    """A plan of these degrees for each way in which col may split what is inside."""
    both = ("samples", "features") if sizes["col"] > 1 else ("samples",)
    chunks = 2 if wish.plan.policy == "interleaved" and sizes["pipe"] > 1 else 1
    fixed = {"chunks": chunks, "gathered": "again", "order": (), **_settled(wish)}
    for inner in wish.choices("inner", both):
        least = sizes["col"] if inner == "samples" else 1
        changes = {"micro_batch": least, **fixed, **sizes, "inner": inner}
        if "micro_batch" in wish.fixed and wish.plan.micro_batch > 0:
            changes["micro_batch"] = wish.plan.micro_batch
        changes["batch"] = wish.job.batch
        yield replace(wish.plan, **changes)


def _settled(wish: Wish) -> dict[str, Any]:
    names = ("chunks", "gathered", "order")
    return {name: getattr(wish.plan, name) for name in names if name in wish.fixed}


def micros(wish: Wish, plan: Plan) -> list[int]:
    """Micro-batches to try, spread evenly over the sizes that divide a rank's share."""
    if "micro_batch" in wish.fixed and wish.plan.micro_batch > 0:
        return [wish.plan.micro_batch]
    share, multiple = plan.batch // plan.replicas, plan.micro_batch
    most = max(TOKENS // wish.job.seq, multiple)
    sizes = [n for n in divisors(share) if n % multiple == 0 and n <= most]
    if len(sizes) <= MICROS:
        return sizes
    wanted = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / (MICROS - 1)) for i in range(MICROS)]
    return sorted({min(sizes, key=lambda n: (abs(math.log(n / w)), n)) for w in wanted})


def variants(wish: Wish, plan: Plan) -> list[Plan]:
    """A factorisation with each micro-batch and each number of chunks; rough ones first."""
    sizes = micros(wish, plan)
    rough = list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2])))
    made = []
    for chunks in wish.choices("chunks", CHUNKS if plan.pipe > 1 else (1,)):
        if chunks > 1 and plan.pipe * chunks > wish.sizes["layers"]:
            continue
        policy = ordered(wish, replace(plan, chunks=chunks)).policy
        for micro in (*rough, *(n for n in sizes if n not in rough)):
            made.append(replace(plan, micro_batch=micro, chunks=chunks, policy=policy))
    plain = "policy" not in wish.fixed and not plan.stages
    return [one for one in made if (plain and one.chunks == 1) or allowed(wish, one)]


def ordered(wish: Wish, plan: Plan) -> Plan:
    """A plan whose stages take turns in an order that keeps what is predicted, unless another is
    asked for; to take what has arrived needs more, and a bound on what stages hold needs it."""
    if plays(wish) or "policy" in wish.fixed:
        return plan
    return replace(plan, policy=usual_order(plan.chunks) if plan.pipe > 1 else Plan().policy)


def plays(wish: Wish) -> bool:
    """Whether stages of its pipelines take what has arrived."""
    asked = "policy" in wish.fixed or wish.plan.credits > 0
    return wish.plan.policy == "message" and asked


def ladder(wish: Wish, plan: Plan) -> Iterator[Found]:
    """A plan with more and more computed again, here and elsewhere, up to what fits."""
    again = plan.depth > 1 and plan.micro_batches > 1
    places: Sequence[States] = (wish.states,) if wish.states else ("device", "host")
    if wish.cluster.cores and not wish.states:  # there device and host are one memory
        places = ("device",)
    ways = wish.choices("gathered", ("keep", "again") if again else ("again",))
    kind = wish.choices("recompute", RECOMPUTE)[0]
    plan = _compiled(wish, replace(plan, gathered=ways[0], recompute=kind))
    for gathered in ways:
        tried: list[Found] = []
        for where in places:
            if tried and not _moves_out(wish, tried):
                break
            tried = _climbed(wish, replace(plan, gathered=gathered), where)
            yield from tried
            if tried[0].prediction.fits:
                if gathered == "keep" and where == places[0]:
                    return
                break


def _moves_out(wish: Wish, tried: Sequence[Found]) -> bool:
    """Whether states had better rest on the host, where they find room.

    So it is if nothing fits beside them, or only what computes all again, and more would without.
    """
    if any(one.prediction.fits and one.plan.recompute != RECOMPUTE[-1] for one in tried):
        return False
    for one in tried:
        device = one.prediction.memory.device
        states = device.get("master", 0) + device.get("moments", 0)
        over = one.prediction.memory.total - one.prediction.limit
        if 0 < over <= states <= wish.cluster.host.memory:
            return True
    return False


def _climbed(wish: Wish, plan: Plan, where: States) -> list[Found]:
    """What computes least again, then, if that does not fit, what keeps least; then those between.

    What lies between need not be asked if nothing fits.
    """
    kinds = wish.choices("recompute", RECOMPUTE)
    found = []
    for kind in dict.fromkeys((kinds[0], kinds[-1], *kinds[1:-1])):
        found.append(_predicted(wish, replace(plan, recompute=kind), where))
        if found[-1].prediction.fits == (kind == kinds[0]):
            break
    return found


def _predicted(wish: Wish, plan: Plan, states: States, *, played: bool = False) -> Found:
    layout = _laid(wish, plan, states)
    return Found(layout, predict(wish.job, layout, wish.cluster, played=played))


def _laid(wish: Wish, plan: Plan, states: States) -> Layout:
    return Layout(plan=plan, order=plan.placed, states=states, fp8=wish.fp8)


def _compiled(wish: Wish, plan: Plan) -> Plan:
    """A plan with compiled blocks, if these are faster where a run would not compile by itself.

    A graph does not overlap what it communicates, but its kernels pass over memory less often. Who
    gives all degrees asks about that run, as it is.
    """
    split, given = plan.depth * plan.row * plan.col > 1, math.prod(wish.degrees.values())
    able = wish.graphs and plan.compile == "auto" and not wish.cluster.cores
    if not able or not split or given == wish.world:
        return plan
    graph, where = replace(plan, compile="on"), wish.states or "device"
    spent = sum(seconds(wish.job, _laid(wish, graph, where), wish.cluster).values())
    plain = _laid(wish, plan, where)
    if spent > computed(wish.job, plain, wish.cluster):  # else it hides less than it saves
        return plan if sum(seconds(wish.job, plain, wish.cluster).values()) <= spent else graph
    return graph


def fits(wish: Wish) -> bool:
    """Whether a layout fits that keeps least: all computed again, states elsewhere if allowed.

    Of the factorisations those with the fewest copies of the model are asked.
    """
    least = sorted(grids(wish)[0], key=lambda plan: plan.data)[:FEW]
    where: States = wish.states or ("device" if wish.cluster.cores else "host")
    kind = wish.choices("recompute", RECOMPUTE)[-1]
    asked = (_predicted(wish, replace(plan, recompute=kind), where).prediction for plan in least)
    return any(one.fits and one.memory.on_host <= wish.cluster.host.memory for one in asked)


def _rough(wish: Wish, plan: Plan) -> list[Found]:
    """A factorisation with its least and a middle micro-batch, in one chunk."""
    some = variants(wish, plan)
    few = [one for one in some[:2] if one.chunks == some[0].chunks]
    return [found for one in few for found in ladder(wish, one)]


def _full(wish: Wish, plan: Plan) -> list[Found]:
    """What `_rough` left out; where nothing fits, larger micro-batches do not either."""
    some = variants(wish, plan)
    few = sum(one.chunks == some[0].chunks for one in some[:2])
    found, large = list[Found](), dict[int, int]()
    for one in some[few:]:
        if one.micro_batches > 1 and one.micro_batch >= large.get(one.chunks, one.batch):
            continue  # one micro-batch alone adds up no gradients
        tried = [*ladder(wish, one)]
        found += tried
        if not any(each.prediction.fits for each in tried):
            large[one.chunks] = min(one.micro_batch, large.get(one.chunks, one.batch))
    return found


def _placed(wish: Wish, found: Found) -> list[Found]:
    """A layout with other orders of its axes, where they make a difference."""
    plan, seen, made = found.plan, {_shape(found.plan, ())}, []
    for axes in ORDERS:
        order = tuple(axis for axis in axes if plan.degrees[axis] > 1)
        shape = _shape(plan, order)
        if shape not in seen:
            seen.add(shape)
            made.append(_predicted(wish, replace(plan, order=order), found.layout.states))
    return made


def _shape(plan: Plan, order: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that are there, as they lie."""
    return tuple(axis for axis in replace(plan, order=order).placed if plan.degrees[axis] > 1)


@dataclass
class Progress:
    """The best layout of a search so far, as results come in.

    The order in which they do depends on processes; the result of a search does not.
    """

    report: Callable[[Found, int], None]
    """Is told the best layout and how many were predicted, whenever results have come."""
    best: Found | None = None
    count: int = 0

    def seen(self, several: Iterable[Sequence[Found]]) -> None:
        """Take in the layouts of some factorisations."""
        for found in several:
            self.count += len(found)
            for one in _fitting(found):
                if self.best is None or one.key < self.best.key:
                    self.best = one
        if self.best is not None:
            self.report(self.best, self.count)


def _guesses(wish: Wish) -> Iterator[Plan]:
    """Plans to begin with: rows inside a node, few stages, and the rest over depth or data.

    They are of no matter to the result; a user sees one of them while all others are searched.
    """
    rows = [size for size in divisors(wish.world) if size <= wish.cluster.per_node]
    rows = [*dict.fromkeys((rows[-1], 1, *rows))]
    for pipe, row in itertools.product(divisors(wish.world)[:8], rows):
        rest, odd = divmod(wish.world, pipe * row)
        for copies in (1, rest, wish.cluster.per_node):
            if not odd and rest % copies == 0:
                sizes = {"pipe": pipe, "data": rest // copies, "depth": copies, "row": row}
                yield from plans(wish, {**dict.fromkeys(RUNTIME, 1), **sizes, **wish.degrees})


def _first_look(wish: Wish, progress: Progress) -> None:
    """Report a layout that fits within a fraction of a second, if a guess does."""
    began = time.perf_counter()
    for plan in _guesses(wish):
        spent = time.perf_counter() - began
        if spent > (LONGEST_LOOK if progress.best is None else LOOK):
            break
        if allowed(wish, plan):
            progress.seen([_rough(wish, plan)])
    progress.count = 0  # they come again


def search(
    wish: Wish, *, workers: int = 1, report: Callable[[Found, int], None] | None = None
) -> Result:
    """All layouts that were tried; none of `found` is there if none fits or can be divided.

    report: is told the best layout so far, and how many were predicted, again and again.
    """
    began = time.perf_counter()
    progress = None if report is None else Progress(report)
    if progress is not None:
        _first_look(wish, progress)
    seen = None if progress is None else progress.seen
    every, refused = grids(wish)
    tasks = {
        "rough": partial(_rough, wish),
        "full": partial(_full, wish),
        "chunks": partial(_more_chunks, wish),
        "orders": partial(_placed, wish),
    }
    with several(tasks, workers if len(every) >= MANY else 1, seen) as mapped:
        rough = mapped("rough", every)
        full = mapped("full", _near(wish, every, rough))
        everything = [found for some in (*rough, *full) for found in some]
        if "chunks" not in wish.fixed and "policy" not in wish.fixed and not wish.plan.stages:
            some = mapped("chunks", _best_of_styles(wish, everything))
            everything += [found for one in some for found in one]
        if wish.cluster.nodes > 1 and "order" not in wish.fixed:
            first = sorted(_fitting(everything), key=lambda one: one.key)[:BEST]
            both = {one.layout: one for one in (*first, *_best_of_styles(wish, everything))}
            everything += [found for one in mapped("orders", [*both.values()]) for found in one]
    return _judged(wish, everything, len(every), refused, began)


def _fitting(everything: Iterable[Found]) -> list[Found]:
    return [one for one in everything if one.prediction.fits]


def _best_of_styles(wish: Wish, everything: Sequence[Found]) -> list[Found]:
    """The best layouts of each style, of different degrees and micro-batches."""
    found, node = dict[Layout, Found](), wish.cluster.per_node
    fits = sorted(_fitting(everything), key=lambda one: one.key)
    for of in STYLES.values():
        seen = dict[tuple[object, ...], Found]()
        for one in fits:
            if of(one.plan, node):
                plan = one.plan
                seen.setdefault((*plan.degrees.values(), plan.inner, plan.micro_batch), one)
                if len(seen) == REFINED:
                    break
        found |= {one.layout: one for one in seen.values()}
    return [*found.values()]


def _more_chunks(wish: Wish, found: Found) -> list[Found]:
    """A layout with the numbers of chunks that `variants` leaves out."""
    plan, made = found.plan, list[Plan]()
    for chunks in range(2, min(wish.sizes["layers"] // plan.pipe, MOST_CHUNKS) + 1):
        if plan.pipe > 1 and chunks not in CHUNKS:
            made.append(ordered(wish, replace(plan, chunks=chunks)))
    return [one for plan in made if allowed(wish, plan) for one in ladder(wish, plan)]


def _judged(
    wish: Wish, everything: Sequence[Found], grids: int, refused: int, began: float
) -> Result:
    """What fits and what does not, each in its order."""
    fits = sorted((one for one in everything if one.prediction.fits), key=lambda one: one.key)
    tight = [one for one in everything if not one.prediction.fits]
    if plays(wish):
        fits, tight = _played(wish, fits, tight)
    tight.sort(key=lambda one: (one.prediction.memory.total, one.key))
    return Result(wish, tuple(fits), tuple(tight), grids, refused, time.perf_counter() - began)


def _played(wish: Wish, fits: list[Found], tight: list[Found]) -> tuple[list[Found], list[Found]]:
    """The first with the memory of its policy as it is played, perhaps with more computed again;
    those before it do not fit so."""
    failed = [*tight]
    for i, one in enumerate(fits[:BEST]):
        plan, where = one.plan, one.layout.states
        if plan.pipe == 1:
            return fits[i:], failed
        for kind in wish.choices("recompute", RECOMPUTE[RECOMPUTE.index(plan.recompute) :]):
            again = _predicted(wish, replace(plan, recompute=kind), where, played=True)
            if again.prediction.fits:
                return [again, *fits[i + 1 :]], failed
            failed.append(again)
    return [], [*failed, *fits[BEST:]]


def alike(wish: Wish, known: Sequence[Result]) -> Result:
    """A quick look: the best layouts of other numbers of devices, carried over to this one.

    What splits a layer stays; pipe, data and depth share the other ranks, each about as before. It
    may find nothing where `search` does.
    """
    began, plans = time.perf_counter(), dict[Plan, None]()
    for one in [one for result in known for one in result.found[: ALIKE // len(known)]]:
        for sizes in _carried(wish, one.plan):
            plan = replace(one.plan, **dict[str, Any](sizes), batch=wish.job.batch)
            for micro in _about(wish, plan, one.plan.micro_batches):
                plans[ordered(wish, replace(plan, micro_batch=micro))] = None
    able = [plan for plan in plans if allowed(wish, plan)]
    everything = [found for plan in able for found in ladder(wish, plan)]
    return _judged(wish, everything, len(able), len(plans) - len(able), began)


def _carried(wish: Wish, plan: Plan) -> list[dict[str, int]]:
    """Degrees on the ranks of a wish that are nearest to those of a plan."""
    rest, odd = divmod(wish.world, plan.row * plan.col * plan.expert)
    if odd:
        return []
    outer = {axis: plan.degrees[axis] for axis in ("pipe", "data", "depth")}
    choices = {axis: wish.degrees.get(axis) for axis in outer}
    sizes = factorisations(rest, {a: [n] if n else divisors(rest) for a, n in choices.items()})

    def far(one: Mapping[str, int]) -> tuple[float, int]:
        steps = {axis: abs(math.log(one[axis] / size)) for axis, size in outer.items()}
        return round(sum(steps.values()) + steps["pipe"], 6), sum(map(bool, steps.values()))

    least = {"batch": wish.job.batch, "micro_batch": plan.col if plan.inner == "samples" else 1}
    tried = (replace(plan, **dict[str, Any](one | least)) for one in sorted(sizes, key=far))
    some = itertools.islice((one for one in tried if allowed(wish, one)), CARRIED)
    return [{axis: one.degrees[axis] for axis in outer} for one in some]


def _about(wish: Wish, plan: Plan, count: int) -> set[int]:
    """Micro-batches near that of a plan: the next to it, the least, and that of so many a step."""
    least = plan.col if plan.inner == "samples" else 1
    sizes = micros(wish, replace(plan, micro_batch=least))
    smaller = [size for size in sizes if size <= plan.micro_batch]
    larger = [size for size in sizes if size >= plan.micro_batch]
    alike = [size for size in sizes if size * count == plan.batch // plan.replicas]
    return {*sizes[:1], *smaller[-1:], *larger[:1], *alike}


def _near(wish: Wish, every: Sequence[Plan], rough: Sequence[Sequence[Found]]) -> list[Plan]:
    """Factorisations that may still hold the best of a style."""
    node = wish.cluster.per_node
    times = [min((_at_best(wish, one) for one in several), default=math.inf) for several in rough]
    found = set[int]()
    for of in STYLES.values():
        own = [i for i, plan in enumerate(every) if of(plan, node) and times[i] < math.inf]
        own.sort(key=lambda i: (times[i], i))
        found.update(i for i in own[:FULL] if times[i] < NEAR * times[own[0]])
    return [every[i] for i in sorted(found)]


def _at_best(wish: Wish, found: Found) -> float:
    """Seconds of a step of a rough layout if chunks shorten what its stages wait as they can.

    Chunks may balance stages better, and so fit where one of them nearly does.
    """
    plan, it = found.plan, found.prediction
    able = plan.pipe > 1 and plan.chunks == 1 and "chunks" not in wish.fixed
    most = min(wish.sizes["layers"] // plan.pipe, CHUNKS[-1])
    if not able or "policy" in wish.fixed or most < 2:
        return it.total if it.fits else math.inf
    if it.memory.total > NEARLY * it.limit:
        return math.inf
    once = sum(it.parts[name] for name in LAPS) / plan.micro_batches
    fill = min((plan.pipe - 1) * once, it.parts["bubble"])  # the rest is for uneven stages
    return it.total - fill * (1 - 1 / most)
