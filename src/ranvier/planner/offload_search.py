"""Fit: of all ways to place a step on a device and its host the fastest that fits, as predicted.

A pure search over numbers: the micro-batch, what each block computes again, what of states, weights
and activations rests on the host, and where states are updated. None of these changes a result but
for the order of sums. What a run has settled itself is kept: only what is `open` is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import Kind, Need, Peak, Where
from ranvier.planner.device_rates import Rates
from ranvier.planner.memory.breakdown import GIB, Table
from ranvier.planner.memory.measured_states import Sizes
from ranvier.planner.time import offload
from ranvier.planner.time.offload import Moved, Seconds, Work

States: TypeAlias = Literal["device", "host", "file", "split"]
Update: TypeAlias = Literal["auto", "device", "cpu"]
Weights: TypeAlias = Literal["device", "host"]

OPEN = ("micro_batch", "recompute", "states", "resident", "update", "weights", "activations")
"""What may be left open."""
GAPS = 0.03
"""Share of what comes and goes in a step that the allocator loses between tensors."""
SOME = 0.05
"""Share of the states from which on it is worth keeping them on the device."""
WHERE: tuple[Weights, ...] = ("device", "host")
AWAY = (0.0, 0.5, 1.0)
"""Shares of the activations that are tried on the host."""
MANY = 2
"""Settings that a proposal changes, at most."""
WORDS: Mapping[Where, str] = {
    "head": "in the loss",
    "block": "in the backward pass of a block",
    "leave": "in the backward pass of the embedding",
    "forward": "in the next forward pass, beside gradients that wait for their update",
    "update": "in the update",
}


@dataclass(frozen=True)
class Choice:
    """How a step is placed."""

    micro_batch: int
    kinds: tuple[Kind, ...]
    states: States = "device"
    resident: int = 0
    """Bytes of states on the device, with states = split."""
    update: Update = "device"
    weights: Weights = "device"
    activations: float = 0.0


@dataclass(frozen=True)
class Case:
    """All that a choice depends on."""

    needs: Mapping[int, Need]
    """By micro-batch."""
    sizes: Sizes
    work: Work
    rates: Rates
    limit: int
    """Bytes of the device."""
    host: int
    """Bytes of the host."""
    given: Choice
    """What is not open."""
    open: frozenset[str]
    libraries: int = 0
    """Bytes on the device that are there in any case."""
    logits: Mapping[int, int] = field(default_factory=dict)
    """Of a chunk, by micro-batch."""
    communicators: int = 0
    """Bytes of the device beside those of `limit`, which are taken when a run starts."""


@dataclass(frozen=True)
class Fit:
    """A choice, what it needs and how long it takes."""

    choice: Choice
    device: int
    host: int
    seconds: Seconds

    @property
    def key(self) -> tuple[float, ...]:
        """What is better: less time; of equal times what leaves more where it is."""
        chosen = self.choice
        elsewhere = (chosen.weights == "host", chosen.activations, chosen.states != "device")
        again = recompute_budget.share(chosen.kinds)
        return float(f"{self.seconds.total:.3g}"), *elsewhere, again, -chosen.micro_batch


# ---- bytes ------------------------------------------------------------------------------


def _away(case: Case, choice: Choice) -> int:
    """Bytes of states that rest elsewhere."""
    most = case.sizes.states - case.sizes.small
    kept = {"device": most, "split": min(choice.resident, most)}.get(choice.states, 0)
    return most - kept


def _come(case: Case, choice: Choice, where: Where) -> int:
    """Bytes of weights that have come from the host: those whose turn it is, and the next."""
    if choice.weights == "device":
        return 0
    pair = min(2, case.sizes.count) * case.sizes.block
    return max(case.sizes.head + case.sizes.block, pair) if where == "head" else pair


def _known(case: Case) -> bool:
    """Whether weights rested on the host when passes were measured: what came was measured."""
    return case.given.weights == "host" and "weights" not in case.open


def _weights(case: Case, choice: Choice, where: Where) -> int:
    """Bytes of weights on the device, beside what was measured."""
    sizes = case.sizes
    resting = sizes.weights if choice.weights == "device" else sizes.still
    return resting + (0 if _known(case) else _come(case, choice, where))


def _moments(case: Case, choice: Choice) -> list[tuple[Peak, int]]:
    """When most may be there, and the bytes of weights then."""
    need, hosted = case.needs[choice.micro_batch], choice.weights == "host"
    peaks = need.peaks(choice.kinds, away=choice.activations, stowed=hosted, waits=True)
    return [(peak, _weights(case, choice, peak.where)) for peak in peaks]


def _bytes(moment: tuple[Peak, int]) -> int:
    peak, weights = moment
    return weights + round(peak.total * (1.0 + GAPS))


def _rings(case: Case, choice: Choice) -> tuple[int, int]:
    """Bytes of the tiles of states on their way, on the device and on the host."""
    sizes = case.sizes
    if not _away(case, choice):
        return 0, 0
    if choice.update == "cpu":  # there gradients and new weights are on their way
        return 0, sizes.wide_ring - sizes.ring
    return (sizes.wide_ring if choice.weights == "host" else sizes.ring), 0


def _rests(case: Case, choice: Choice) -> tuple[int, int]:
    """Bytes on the device besides states: where all of them are there, and where some are not."""
    moments, ring = _moments(case, choice), _rings(case, replace(choice, states="host"))[0]
    here = max(_bytes(one) for one in moments if one[0].where != "forward")
    return case.libraries + here, case.libraries + max(map(_bytes, moments)) + ring


def table(case: Case, choice: Choice) -> Table:
    """The predicted table of a choice."""
    sizes, need = case.sizes, case.needs[choice.micro_batch]
    away = _away(case, choice)
    moments = (one for one in _moments(case, choice) if away or one[0].where != "forward")
    peak, weights = max(moments, key=_bytes)
    share = 1.0 - away / sizes.states if sizes.states else 1.0
    come, rest = _come(case, choice, peak.where), peak.activations
    parts = {"gathered weights": come}
    if _known(case):  # in what was measured, with the activations
        parts["gathered weights"] = come = min(come, rest)
        rest, weights = rest - come, weights + come
    for name, size, when in (
        ("logits", case.logits.get(choice.micro_batch, 0), ("head",)),
        ("gathered weights", sizes.gathered, ("head", "block", "forward")),
        ("communication", need.publish, ("update",)),
        ("communication", sizes.communication, ("block", "leave")),
    ):
        if peak.where in when:
            size = min(size, rest)
            parts[name], rest = parts.get(name, 0) + size, rest - size
    device = {
        "weights": weights - come,
        "gradients": peak.gradients,
        "master": round(sizes.master * share),
        "moments": round(sizes.moments * share),
        "activations": rest,
        **parts,
        "staging": _rings(case, choice)[0],
        "libraries": case.libraries,
        "fragmentation": round(GAPS * peak.total),
        "communicators": case.communicators,
    }
    return Table(device, _on_host(case, choice), WORDS[peak.where])


def _on_host(case: Case, choice: Choice) -> dict[str, int]:
    """Bytes on the host by category."""
    sizes, need = case.sizes, case.needs[choice.micro_batch]
    away = _away(case, choice)
    found = {"activations": _sent(need, choice), "staging": _rings(case, choice)[1]}
    if choice.weights == "host":
        found["weights"] = sizes.weights - sizes.still
        found["gradients"] = sizes.returned
    if away and choice.states != "file":
        found["master"] = round(away * sizes.master / sizes.states)
        found["moments"] = away - found["master"]
    return {name: size for name, size in found.items() if size}


def _sent(need: Need, choice: Choice) -> int:
    """Bytes of activations of a micro-batch that wait on the host; the last block's stay."""
    blocks, share = need.passes[0].blocks, need.sent(choice.activations)
    return round(share * sum(blocks[kind].kept for kind in choice.kinds[:-1]))


# ---- time -------------------------------------------------------------------------------


def seconds(case: Case, choice: Choice) -> Seconds:
    """The predicted time of a step."""
    sizes, need = case.sizes, case.needs[choice.micro_batch]
    away, blocks = _away(case, choice), need.passes[0].blocks
    hosted = choice.weights == "host"
    moved = Moved(
        kept=need.count * max(block.kept for block in blocks.values()),
        states=sizes.states - away,
        away=away,
        numbers=round(sizes.trained * away / sizes.states) if sizes.states else 0,
        weights=sizes.weights - sizes.still if hosted else 0,
        gradients=need.count * need.passes[-1].gradient if hosted else 0,
        activations=_sent(need, choice),
    )
    return offload.seconds(
        case.work,
        moved,
        case.rates,
        micro=choice.micro_batch,
        share=recompute_budget.share(choice.kinds),
        blocks=need.count,
        cpu=choice.update == "cpu",
    )


# ---- search -----------------------------------------------------------------------------


def fits(case: Case) -> Iterator[Fit]:
    """Choices that fit, among them the fastest with each micro-batch and each place."""
    for one in _places(case):
        yield from _kinds(case, one, _ways(case, one.micro_batch))


def _places(case: Case) -> Iterator[Choice]:
    """Micro-batches, and where weights and activations may lie."""
    given, free = case.given, case.open
    for micro in case.needs:
        for weights in WHERE if "weights" in free else (given.weights,):
            for away in AWAY if "activations" in free else (given.activations,):
                yield replace(given, micro_batch=micro, weights=weights, activations=away)


def _ways(case: Case, micro: int) -> list[tuple[Kind, ...]]:
    """Kinds of the blocks, those that compute least again first."""
    if "recompute" not in case.open:
        return [case.given.kinds]
    return sorted(recompute_budget.ways(case.needs[micro]), key=recompute_budget.share)


def _kinds(case: Case, choice: Choice, ways: Sequence[tuple[Kind, ...]]) -> Iterator[Fit]:
    """A choice with each of these kinds, as long as less computed again may not be faster."""
    least = seconds(case, replace(choice, kinds=ways[0])).compute
    shortest = math.inf
    for kinds in ways:
        if least * (1.0 + recompute_budget.share(kinds) * case.work.blocks) > shortest:
            return
        for found in _placed(case, replace(choice, kinds=kinds)):
            shortest = min(shortest, found.seconds.total)
            yield found


def _placed(case: Case, choice: Choice) -> Iterator[Fit]:
    """A choice with its states where they fit, and updated where that may be."""
    ways: tuple[Update, ...] = ("device", "cpu")
    if "update" not in case.open:
        ways = ("device" if choice.update == "auto" else choice.update,)
    for way in ways:
        chosen = replace(choice, update=way)
        rests = _rests(case, chosen)
        for one in _states(case, chosen, rests):
            away = _away(case, one)
            device = rests[away > 0] + case.sizes.states - away
            host = sum(_on_host(case, one).values())
            if device <= case.limit and host <= case.host and (away or way == ways[0]):
                yield Fit(one, device, host, seconds(case, one))


def _states(case: Case, choice: Choice, rests: tuple[int, int]) -> Iterator[Choice]:
    """Where the states of a choice may rest: as many on the device as there is room for."""
    states, free = case.sizes.states, "states" in case.open
    if not free and not (choice.states == "split" and "resident" in case.open):
        yield choice
        return
    left = case.limit - rests[1] - case.sizes.small
    if rests[0] + states <= case.limit:
        yield replace(choice, states="device" if free else "split", resident=0 if free else states)
    elif left >= SOME * states or (left >= 0 and not free):
        yield replace(choice, states="split", resident=left)
    elif left >= 0:
        yield replace(choice, states="host", resident=0)


def best(found: Iterable[Fit]) -> Fit | None:
    """The fastest of what fits; None if nothing does."""
    return min(found, key=lambda fit: fit.key, default=None)


def least(case: Case) -> int:
    """Bytes of the device without which nothing fits, as far as the host has room for the rest."""
    tight = replace(case, limit=2**62)
    if "states" in case.open:
        given = replace(case.given, states="host")
        tight = replace(tight, given=given, open=case.open - {"states"})
    return min(
        (
            found.device
            for one in _places(tight)
            for kinds in _ways(tight, one.micro_batch)
            for found in _placed(tight, replace(one, kinds=kinds))
        ),
        default=0,
    )


def cheapest(case: Case, now: Choice, count: int = 3) -> list[Fit]:
    """The changes of `now` that fit and cost least: of few settings, and for all blocks alike."""
    found: dict[tuple[str, ...], Fit] = {}
    known = {kind for need in case.needs.values() for kind in need.passes[0].blocks}
    for kind in known:
        alike = replace(now, kinds=(kind,) * len(now.kinds))
        for fit in fits(replace(case, given=alike, open=frozenset(OPEN) - {"recompute"})):
            words = options(now, fit.choice)
            better = words not in found or fit.key < found[words].key
            if 0 < len(words) <= MANY and better:
                found[words] = fit
    order = sorted(found.items(), key=lambda one: (one[1].key[0], len(one[0])))
    return [fit for _, fit in order[:count]]


# ---- words ------------------------------------------------------------------------------


def options(now: Choice, then: Choice) -> tuple[str, ...]:
    """The settings in which a choice differs from what is now, as options of a run."""
    found = []
    if then.micro_batch != now.micro_batch:
        found.append(f"--plan.micro-batch {then.micro_batch}")
    if then.kinds != now.kinds:
        found.append(f"--plan.recompute {then.kinds[0] if len(set(then.kinds)) == 1 else 'budget'}")
    for name in ("states", "weights", "activations"):
        if getattr(then, name) != getattr(now, name):
            found.append(f"--memory.{name} {getattr(then, name)}")
    return tuple(found)


def said(case: Case, fit: Fit, found: Iterable[Fit]) -> list[str]:
    """What was chosen and why: two to four lines. found: all that fits."""
    time, where = fit.seconds, table(case, fit.choice).where
    lines = [
        f"memory: {_gib(fit.device)} of {_gib(case.limit)} GiB, most {where}: "
        f"{described(case, fit.choice)}"
    ]
    parts = {"computing": time.compute, "computing again": time.again}
    parts |= {"updating": time.update, "waiting": time.waiting}
    more = ", ".join(f"{value:.3g} {name}" for name, value in parts.items() if value > 0.0)
    lines.append(f"predicted: {time.total:.3g} s a step: {more}")
    if fit.host:
        lines[-1] += f"; {_gib(fit.host)} of {_gib(case.host)} GiB on the host"
    mine = _kind(fit.choice)
    other = best(one for one in found if _kind(one.choice) != mine)
    if other is not None:
        slower = other.seconds.total / max(time.total, 1e-12) - 1.0
        lines.append(
            f"next best: {described(case, other.choice)}: {_gib(other.device)} GiB, "
            f"{other.seconds.total:.3g} s ({slower:+.1%})"
        )
    free = best(fits(replace(case, limit=2**62, host=2**62)))
    if free is None or free.key >= fit.key:
        lines.append("nothing binds: with more memory it would not be faster")
        return lines
    what, size = (
        ("the device", free.device) if free.device > case.limit else ("the host", free.host)
    )
    lines.append(
        f"what binds is {what}: with {_gib(size)} GiB there, {described(case, free.choice)} would "
        f"take {free.seconds.total:.3g} s"
    )
    return lines


def _kind(choice: Choice) -> tuple[object, ...]:
    """What makes choices different in kind."""
    return choice.micro_batch, choice.states, choice.weights, choice.activations, choice.update


def described(case: Case, choice: Choice) -> str:
    """A choice in words."""
    words: dict[Kind, str] = {"none": "keep all", "selective": "selective", "full": "full"}
    counts = [(choice.kinds.count(kind), word) for kind, word in words.items()]
    blocks = ", ".join(f"{count} {word}" for count, word in counts if count)
    out = [f"micro-batch {choice.micro_batch}", f"recomputation of blocks: {blocks}"]
    away = _away(case, choice)
    if away:
        where = "in a file" if choice.states == "file" else "on the host"
        out.append(f"{_gib(away)} GiB of states {where}, updated on the {choice.update}")
    if choice.weights == "host":
        out.append("weights on the host")
    if choice.activations > 0.0:
        out.append(f"{choice.activations:.0%} of activations on the host")
    return ", ".join(out)


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"
