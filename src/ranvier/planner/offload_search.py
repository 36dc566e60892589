"""Offload search: the fastest placement of a step on a device and its host that fits, as predicted.

A pure search over numbers: the micro-batch, the recompute mode of each block, which optimizer
states, weights and activations are offloaded to the host, and where states are updated. None of
these changes a result but for the order of sums. Settings given by the user are kept: only those in
`open_settings` are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import BudgetPeak, PeakMoment, RecomputeMode, StepMemory
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.planner.memory.measured_states import ModelStateSizes
from ranvier.planner.time import offload
from ranvier.planner.time.offload import StepSeconds, StepTraffic, StepWork

StatesLocation: TypeAlias = Literal["device", "host", "disk", "split"]
UpdateLocation: TypeAlias = Literal["auto", "device", "cpu"]
WeightsLocation: TypeAlias = Literal["device", "host"]

SEARCHABLE_SETTINGS = (
    "micro_batch",
    "recompute",
    "optimizer_states",
    "optimizer_states_on_device_gib",
    "optimizer_step_on",
    "parameters",
    "activation_offload_fraction",
)
"""Settings that may be left open."""
FRAGMENTATION_SHARE = 0.03
"""Share of the temporary memory of a step that the allocator loses to fragmentation."""
MIN_RESIDENT_SHARE = 0.05
"""Minimum share of the optimizer states that is worth keeping on the device."""
WEIGHT_LOCATIONS: tuple[WeightsLocation, ...] = ("device", "host")
OFFLOAD_FRACTIONS = (0.0, 0.5, 1.0)
"""Shares of the activations that are tried on the host."""
MAX_CHANGED_SETTINGS = 2
"""Maximum number of settings that a proposal changes."""
PEAK_LABELS: Mapping[PeakMoment, str] = {
    "head": "in the loss",
    "block": "in the backward pass of a block",
    "leave": "in the backward pass of the embedding",
    "forward": "in the next forward pass, beside gradients that wait for their update",
    "update": "in the update",
}


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a step are stored and what is recomputed."""

    micro_batch: int
    recompute_modes: tuple[RecomputeMode, ...]
    optimizer_states: StatesLocation = "device"
    optimizer_state_bytes_on_device: int = 0
    """Bytes of states on the device if optimizer_states = split."""
    optimizer_step_on: UpdateLocation = "device"
    parameters: WeightsLocation = "device"
    activation_offload_fraction: float = 0.0


@dataclass(frozen=True)
class FitProblem:
    """All inputs of the search."""

    needs: Mapping[int, StepMemory]
    """Memory by micro-batch."""
    sizes: ModelStateSizes
    work: StepWork
    rates: DeviceRates
    device_limit: int
    """Bytes of the device that may be used."""
    host_limit: int
    """Bytes of the host that may be used."""
    given_placement: Placement
    """Values of the settings that are not open."""
    open_settings: frozenset[str]
    library_bytes: int = 0
    """Bytes on the device that are in use in any case."""
    logit_bytes: Mapping[int, int] = field(default_factory=dict)
    """Logits of a chunk, by micro-batch."""
    communicator_bytes: int = 0
    """Bytes of the device in addition to `device_limit`, allocated when a run starts."""


@dataclass(frozen=True)
class FitResult:
    """A placement, its memory and its predicted time."""

    placement: Placement
    device_bytes: int
    host_bytes: int
    seconds: StepSeconds

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Sort key: least time first; of equal times the one that offloads less."""
        chosen = self.placement
        elsewhere = (
            chosen.parameters == "host",
            chosen.activation_offload_fraction,
            chosen.optimizer_states != "device",
        )
        again = recompute_budget.recompute_fraction(chosen.recompute_modes)
        # Times are rounded to three digits, so that negligible differences do not cause offloading.
        return float(f"{self.seconds.total:.3g}"), *elsewhere, again, -chosen.micro_batch


# ---- bytes ------------------------------------------------------------------------------


def _offloaded_state_bytes(case: FitProblem, choice: Placement) -> int:
    """Bytes of states that are not on the device."""
    # States of vectors always stay on the device.
    most = case.sizes.state_bytes - case.sizes.vector_states
    kept = {"device": most, "split": min(choice.optimizer_state_bytes_on_device, most)}.get(
        choice.optimizer_states, 0
    )
    return most - kept


def _fetched_weight_bytes(case: FitProblem, choice: Placement, where: PeakMoment) -> int:
    """Bytes of weights fetched from the host: of the current block and the prefetched next one."""
    if choice.parameters == "device":
        return 0
    # The next block is prefetched while the current one computes.
    pair = min(2, case.sizes.num_blocks) * case.sizes.block_weights
    if where == "head":
        return max(case.sizes.head_weights + case.sizes.block_weights, pair)
    return pair


def _has_measured_fetches(case: FitProblem) -> bool:
    """Whether weights were on the host in the measured passes, which then include the fetches."""
    return case.given_placement.parameters == "host" and "parameters" not in case.open_settings


def _weight_bytes(case: FitProblem, choice: Placement, where: PeakMoment) -> int:
    """Bytes of weights on the device besides what was measured."""
    sizes = case.sizes
    if choice.parameters == "device":
        resting = sizes.weight_bytes
    else:
        resting = sizes.resident_weights
    return resting + (
        0 if _has_measured_fetches(case) else _fetched_weight_bytes(case, choice, where)
    )


def _peak_moments(case: FitProblem, choice: Placement) -> list[tuple[BudgetPeak, int]]:
    """Candidate memory peaks, and the bytes of weights at each."""
    need = case.needs[choice.micro_batch]
    hosted = choice.parameters == "host"
    peaks = need.memory_peaks(
        choice.recompute_modes, away=choice.activation_offload_fraction, stowed=hosted, waits=True
    )
    return [(peak, _weight_bytes(case, choice, peak.where)) for peak in peaks]


def _moment_bytes(moment: tuple[BudgetPeak, int]) -> int:
    peak, weights = moment
    return weights + round(peak.total_bytes * (1.0 + FRAGMENTATION_SHARE))


def _staging_bytes(case: FitProblem, choice: Placement) -> tuple[int, int]:
    """Bytes of the buffers for state tiles in transfer, on the device and on the host."""
    sizes = case.sizes
    if not _offloaded_state_bytes(case, choice):
        return 0, 0
    # With a CPU update only gradients and new weights are transferred.
    if choice.optimizer_step_on == "cpu":
        return 0, sizes.offload_ring - sizes.state_ring
    return (sizes.offload_ring if choice.parameters == "host" else sizes.state_ring), 0


def _bytes_without_states(case: FitProblem, choice: Placement) -> tuple[int, int]:
    """Bytes on the device besides states: if all of them are there, and if some are not."""
    moments = _peak_moments(case, choice)
    ring = _staging_bytes(case, replace(choice, optimizer_states="host"))[0]
    # The `forward` peak holds gradients of an update that is still running, which happens only if
    # states are offloaded.
    here = max(_moment_bytes(one) for one in moments if one[0].where != "forward")
    return case.library_bytes + here, case.library_bytes + max(map(_moment_bytes, moments)) + ring


def predict_breakdown(case: FitProblem, choice: Placement) -> MemoryBreakdown:
    """The predicted memory breakdown of a placement."""
    sizes = case.sizes
    need = case.needs[choice.micro_batch]
    away = _offloaded_state_bytes(case, choice)
    moments = (one for one in _peak_moments(case, choice) if away or one[0].where != "forward")
    # The breakdown is that of the largest peak.
    peak, weights = max(moments, key=_moment_bytes)
    if sizes.state_bytes:
        share = 1.0 - away / sizes.state_bytes
    else:
        share = 1.0
    come = _fetched_weight_bytes(case, choice, peak.where)
    rest = peak.activations
    parts = {"gathered weights": come}
    # Measured with the activations: move the bytes to their own category.
    if _has_measured_fetches(case):
        parts["gathered weights"] = come = min(come, rest)
        rest = rest - come
        weights = weights + come
    # Categories that the measurement contains as activations, at the peaks where they occur.
    for name, size, when in (
        ("logits", case.logit_bytes.get(choice.micro_batch, 0), ("head",)),
        ("gathered weights", sizes.gathered_weights, ("head", "block", "forward")),
        ("communication", need.weight_gather_bytes, ("update",)),
        ("communication", sizes.communication, ("block", "leave")),
    ):
        if peak.where in when:
            size = min(size, rest)
            parts[name] = parts.get(name, 0) + size
            rest = rest - size
    device = {
        "weights": weights - come,
        "gradients": peak.gradients,
        "master": round(sizes.master * share),
        "moments": round(sizes.moments * share),
        "activations": rest,
        **parts,
        "staging": _staging_bytes(case, choice)[0],
        "libraries": case.library_bytes,
        "fragmentation": round(FRAGMENTATION_SHARE * peak.total_bytes),
        "communicators": case.communicator_bytes,
    }
    return MemoryBreakdown(device, _host_breakdown(case, choice), PEAK_LABELS[peak.where])


def _host_breakdown(case: FitProblem, choice: Placement) -> dict[str, int]:
    """Bytes on the host by category."""
    sizes = case.sizes
    need = case.needs[choice.micro_batch]
    away = _offloaded_state_bytes(case, choice)
    found = {
        "activations": _offloaded_activations(need, choice),
        "staging": _staging_bytes(case, choice)[1],
    }
    if choice.parameters == "host":
        found["weights"] = sizes.weight_bytes - sizes.resident_weights
        found["gradients"] = sizes.host_gradients
    if away and choice.optimizer_states != "disk":
        # Master weights and moments are offloaded in proportion.
        found["master"] = round(away * sizes.master / sizes.state_bytes)
        found["moments"] = away - found["master"]
    return {name: size for name, size in found.items() if size}


def _offloaded_activations(need: StepMemory, choice: Placement) -> int:
    """Bytes of activations of a micro-batch on the host; the last block's stay on the device."""
    blocks = need.passes[0].blocks
    share = need.offloaded_fraction(choice.activation_offload_fraction)
    return round(share * sum(blocks[kind].saved_bytes for kind in choice.recompute_modes[:-1]))


# ---- time -------------------------------------------------------------------------------


def predict_fit_seconds(case: FitProblem, choice: Placement) -> StepSeconds:
    """The predicted time of a step."""
    sizes = case.sizes
    need = case.needs[choice.micro_batch]
    away = _offloaded_state_bytes(case, choice)
    blocks = need.passes[0].blocks
    hosted = choice.parameters == "host"
    moved = StepTraffic(
        saved_activations=need.num_blocks * max(block.saved_bytes for block in blocks.values()),
        device_states=sizes.state_bytes - away,
        host_states=away,
        host_parameters=round(sizes.trained_elements * away / sizes.state_bytes)
        if sizes.state_bytes
        else 0,
        host_weights=sizes.weight_bytes - sizes.resident_weights if hosted else 0,
        host_gradients=need.num_blocks * need.passes[-1].block_grad if hosted else 0,
        host_activations=_offloaded_activations(need, choice),
    )
    return offload.estimate_step_seconds(
        case.work,
        moved,
        case.rates,
        micro=choice.micro_batch,
        share=recompute_budget.recompute_fraction(choice.recompute_modes),
        blocks=need.num_blocks,
        cpu=choice.optimizer_step_on == "cpu",
    )


# ---- search -----------------------------------------------------------------------------


def enumerate_fits(case: FitProblem) -> Iterator[FitResult]:
    """Placements that fit, including the fastest of each micro-batch and location."""
    for one in _enumerate_placements(case):
        yield from _fit_recompute_modes(case, one, _recompute_choices(case, one.micro_batch))


def _enumerate_placements(case: FitProblem) -> Iterator[Placement]:
    """All combinations of micro-batch and locations of weights and activations."""
    given = case.given_placement
    free = case.open_settings
    for micro in case.needs:
        for weights in WEIGHT_LOCATIONS if "parameters" in free else (given.parameters,):
            for away in (
                OFFLOAD_FRACTIONS
                if "activation_offload_fraction" in free
                else (given.activation_offload_fraction,)
            ):
                yield replace(
                    given, micro_batch=micro, parameters=weights, activation_offload_fraction=away
                )


def _recompute_choices(case: FitProblem, micro: int) -> list[tuple[RecomputeMode, ...]]:
    """Recompute modes of the blocks, those with least recomputation first."""
    if "recompute" not in case.open_settings:
        return [case.given_placement.recompute_modes]
    return sorted(
        recompute_budget.candidate_modes(case.needs[micro]), key=recompute_budget.recompute_fraction
    )


def _fit_recompute_modes(
    case: FitProblem, choice: Placement, ways: Sequence[tuple[RecomputeMode, ...]]
) -> Iterator[FitResult]:
    """A placement with each of these modes, until more recomputation cannot be faster."""
    least = predict_fit_seconds(case, replace(choice, recompute_modes=ways[0])).compute
    shortest = math.inf
    for kinds in ways:
        # Lower bound of the time with these modes. They are sorted, so later ones are slower.
        if (
            least * (1.0 + recompute_budget.recompute_fraction(kinds) * case.work.block_share)
            > shortest
        ):
            return
        for found in _fit_update_locations(case, replace(choice, recompute_modes=kinds)):
            shortest = min(shortest, found.seconds.total)
            yield found


def _fit_update_locations(case: FitProblem, choice: Placement) -> Iterator[FitResult]:
    """A placement with states where they fit, updated on the device or on the CPU."""
    ways: tuple[UpdateLocation, ...] = ("device", "cpu")
    if "optimizer_step_on" not in case.open_settings:
        ways = ("device" if choice.optimizer_step_on == "auto" else choice.optimizer_step_on,)
    for way in ways:
        chosen = replace(choice, optimizer_step_on=way)
        rests = _bytes_without_states(case, chosen)
        for one in _state_placements(case, chosen, rests):
            # Where states are updated matters only if some are offloaded; skip duplicates.
            away = _offloaded_state_bytes(case, one)
            device = rests[away > 0] + case.sizes.state_bytes - away
            host = sum(_host_breakdown(case, one).values())
            if device <= case.device_limit and host <= case.host_limit and (away or way == ways[0]):
                yield FitResult(one, device, host, predict_fit_seconds(case, one))


def _state_placements(
    case: FitProblem, choice: Placement, rests: tuple[int, int]
) -> Iterator[Placement]:
    """Where the states of a placement may be stored: as many on the device as fit."""
    states = case.sizes.state_bytes
    free = "optimizer_states" in case.open_settings
    if not free and not (
        choice.optimizer_states == "split"
        and "optimizer_states_on_device_gib" in case.open_settings
    ):
        yield choice
        return
    # rests[1] includes the staging buffers, needed as soon as any state is offloaded.
    left = case.device_limit - rests[1] - case.sizes.vector_states
    if rests[0] + states <= case.device_limit:
        yield replace(
            choice,
            optimizer_states="device" if free else "split",
            optimizer_state_bytes_on_device=0 if free else states,
        )
    elif left >= MIN_RESIDENT_SHARE * states or (left >= 0 and not free):
        yield replace(choice, optimizer_states="split", optimizer_state_bytes_on_device=left)
    elif left >= 0:
        yield replace(choice, optimizer_states="host", optimizer_state_bytes_on_device=0)


def fastest_fit(found: Iterable[FitResult]) -> FitResult | None:
    """The fastest placement that fits; None if none does."""
    return min(found, key=lambda fit: fit.sort_key, default=None)


def min_device_bytes(case: FitProblem) -> int:
    """Least device memory with which a placement fits, given the host memory."""
    # Without a limit states would stay on the device, so they are moved to the host explicitly.
    tight = replace(case, device_limit=2**62)
    if "optimizer_states" in case.open_settings:
        given = replace(case.given_placement, optimizer_states="host")
        tight = replace(
            tight, given_placement=given, open_settings=case.open_settings - {"optimizer_states"}
        )
    return min(
        (
            found.device_bytes
            for one in _enumerate_placements(tight)
            for kinds in _recompute_choices(tight, one.micro_batch)
            for found in _fit_update_locations(tight, replace(one, recompute_modes=kinds))
        ),
        default=0,
    )


def cheapest_changes(case: FitProblem, now: Placement, count: int = 3) -> list[FitResult]:
    """The cheapest changes of `now` that fit: of few settings, the same mode for all blocks."""
    found: dict[tuple[str, ...], FitResult] = {}
    known = {kind for need in case.needs.values() for kind in need.passes[0].blocks}
    for kind in known:
        alike = replace(now, recompute_modes=(kind,) * len(now.recompute_modes))
        for fit in enumerate_fits(
            replace(
                case,
                given_placement=alike,
                open_settings=frozenset(SEARCHABLE_SETTINGS) - {"recompute"},
            )
        ):
            words = diff_options(now, fit.placement)
            better = words not in found or fit.sort_key < found[words].sort_key
            # Of placements with the same changed options only the best is offered.
            if 0 < len(words) <= MAX_CHANGED_SETTINGS and better:
                found[words] = fit
    order = sorted(found.items(), key=lambda one: (one[1].sort_key[0], len(one[0])))
    return [fit for _, fit in order[:count]]


# ---- words ------------------------------------------------------------------------------


def diff_options(now: Placement, then: Placement) -> tuple[str, ...]:
    """The settings in which a placement differs from the current one, as options of a run."""
    found = []
    if then.micro_batch != now.micro_batch:
        found.append(f"--plan.micro-batch {then.micro_batch}")
    if then.recompute_modes != now.recompute_modes:
        found.append(
            "--plan.recompute "
            f"{then.recompute_modes[0] if len(set(then.recompute_modes)) == 1 else 'memory_budget'}"
        )
    for name in ("optimizer_states", "parameters", "activation_offload_fraction"):
        if getattr(then, name) != getattr(now, name):
            found.append(f"--memory.{name.replace('_', '-')} {getattr(then, name)}")
    return tuple(found)


def explain_fit(case: FitProblem, fit: FitResult, found: Iterable[FitResult]) -> list[str]:
    """What was chosen and why, in two to four lines. found: all placements that fit."""
    time = fit.seconds
    where = predict_breakdown(case, fit.placement).where
    lines = [
        f"memory: {_format_gib(fit.device_bytes)} of {_format_gib(case.device_limit)} GiB, "
        f"most {where}: {describe_placement(case, fit.placement)}"
    ]
    parts = {"computing": time.compute, "computing again": time.recompute}
    parts |= {"updating": time.update, "waiting": time.waiting}
    more = ", ".join(f"{value:.3g} {name}" for name, value in parts.items() if value > 0.0)
    lines.append(f"predicted: {time.total:.3g} s a step: {more}")
    if fit.host_bytes:
        lines[-1] += (
            f"; {_format_gib(fit.host_bytes)} of {_format_gib(case.host_limit)} GiB on the host"
        )
    # The runner-up must differ in more than its recompute modes.
    mine = _comparison_key(fit.placement)
    other = fastest_fit(one for one in found if _comparison_key(one.placement) != mine)
    if other is not None:
        slower = other.seconds.total / max(time.total, 1e-12) - 1.0
        lines.append(
            f"next best: {describe_placement(case, other.placement)}: "
            f"{_format_gib(other.device_bytes)} GiB, {other.seconds.total:.3g} s ({slower:+.1%})"
        )
    # The fastest placement with unlimited memory shows which limit binds, if any.
    free = fastest_fit(enumerate_fits(replace(case, device_limit=2**62, host_limit=2**62)))
    if free is None or free.sort_key >= fit.sort_key:
        lines.append("nothing binds: with more memory it would not be faster")
        return lines
    what, size = (
        ("the device", free.device_bytes)
        if free.device_bytes > case.device_limit
        else ("the host", free.host_bytes)
    )
    lines.append(
        f"what binds is {what}: with {_format_gib(size)} GiB there, "
        f"{describe_placement(case, free.placement)} would take {free.seconds.total:.3g} s"
    )
    return lines


def _comparison_key(choice: Placement) -> tuple[object, ...]:
    """The settings in which placements must differ to count as alternatives."""
    return (
        choice.micro_batch,
        choice.optimizer_states,
        choice.parameters,
        choice.activation_offload_fraction,
        choice.optimizer_step_on,
    )


def describe_placement(case: FitProblem, choice: Placement) -> str:
    """A placement in words."""
    words: dict[RecomputeMode, str] = {"none": "keep all", "selective": "selective", "full": "full"}
    counts = [(choice.recompute_modes.count(kind), word) for kind, word in words.items()]
    blocks = ", ".join(f"{count} {word}" for count, word in counts if count)
    out = [f"micro-batch {choice.micro_batch}", f"recomputation of blocks: {blocks}"]
    away = _offloaded_state_bytes(case, choice)
    if away:
        if choice.optimizer_states == "disk":
            where = "in a file"
        else:
            where = "on the host"
        out.append(
            f"{_format_gib(away)} GiB of states {where}, updated on the {choice.optimizer_step_on}"
        )
    if choice.parameters == "host":
        out.append("weights on the host")
    if choice.activation_offload_fraction > 0.0:
        out.append(f"{choice.activation_offload_fraction:.0%} of activations on the host")
    return ", ".join(out)


def _format_gib(size: int) -> str:
    return f"{size / GIB:.3g}"
