"""Offload search: the placement of a step on device and host that fits and is predicted fastest.

A pure search over the closed form of memory (`planner.memory`): the micro-batch, the recompute mode
of each block, which optimizer states, weights and activations are offloaded to the host, and where
states are updated. None of these changes a result except for the order of sums. Settings given by
the user are kept: only the settings in `open_settings` are chosen. All stages of a pipeline have
the same placement, but each has as much recomputation as it needs. The slowest stage gives the
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import RECOMPUTE_COST, RecomputeMode
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.planner.memory.peaks import IN_NEXT_FORWARD, PeakUsage
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.time import offload
from ranvier.planner.time.offload import StepSeconds, StepTraffic

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
"""Share of the temporary memory of a step that the allocator loses to fragmentation. It is also the
margin of the closed form, which is up to 3% too low for steps with adapters or experts."""
MIN_RESIDENT_SHARE = 0.05
"""Minimum share of the optimizer states to keep on the device."""
WEIGHT_LOCATIONS: tuple[WeightsLocation, ...] = ("device", "host")
OFFLOAD_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 1.0)
"""Shares of the activations to try on the host; small ones, as the host may not have
memory for all activations of very long samples."""
MAX_CHANGED_SETTINGS = 2
"""Maximum number of settings that a suggestion changes."""


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

    stages: tuple[RankMemory, ...]
    """A rank of each stage."""
    micro_batches: tuple[int, ...]
    """Micro-batches to try, largest first."""
    rates: DeviceRates
    device_limit: int
    """Device bytes that may be used."""
    host_limit: int
    """Host bytes that may be used."""
    given_placement: Placement
    """Values of the settings that are not open."""
    open_settings: frozenset[str]
    library_bytes: int = 0
    """Device bytes that are always in use."""
    communicator_bytes: int = 0
    """Device bytes in addition to `device_limit`, allocated when a run starts."""

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks of the model."""
        return sum(len(stage.block_indices) for stage in self.stages)

    @cached_property
    def block_share(self) -> float:
        """The smallest share of blocks in the work of a stage."""
        return min(stage.work.block_share for stage in self.stages)


@dataclass(frozen=True)
class FitResult:
    """A placement, its memory and its predicted time."""

    placement: Placement
    device_bytes: int
    host_bytes: int
    seconds: StepSeconds

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Sort key: the fastest first; of equal times, the one that offloads less first."""
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


def _offloaded_state_bytes(stage: RankMemory, choice: Placement) -> int:
    """Returns the bytes of states that are not on the device."""
    # States of vectors, and those of the owners of matrices, always stay on the device.
    most = stage.sizes.state_bytes - stage.sizes.resident_states
    kept = {"device": most, "split": min(choice.optimizer_state_bytes_on_device, most)}.get(
        choice.optimizer_states, 0
    )
    return most - kept


def _resting_weights(stage: RankMemory, choice: Placement) -> int:
    """Returns the bytes of weights that are always on the device."""
    if choice.parameters == "device":
        return stage.sizes.weight_bytes
    return stage.sizes.resident_weights


def _memory_peaks(stage: RankMemory, choice: Placement) -> tuple[PeakUsage, ...]:
    """Returns the candidate memory peaks of a stage, including those while offloaded states are
    updated.
    """
    return stage.peaks(
        choice.micro_batch,
        stage.own_modes(choice.recompute_modes),
        offloaded=choice.activation_offload_fraction,
        weights_on_host=choice.parameters == "host",
        update_continues=True,
    )


def _peak_with_gaps(peak: PeakUsage) -> int:
    return round(peak.total_bytes * (1.0 + FRAGMENTATION_SHARE))


def _staging_bytes(stage: RankMemory, choice: Placement) -> tuple[int, int]:
    """Returns the bytes of the buffers for state tiles in transfer, on device and host."""
    sizes = stage.sizes
    if not _offloaded_state_bytes(stage, choice):
        return 0, 0
    # With a CPU update only gradients and new weights are transferred.
    if choice.optimizer_step_on == "cpu":
        return 0, sizes.offload_ring - sizes.state_ring
    return (sizes.offload_ring if choice.parameters == "host" else sizes.state_ring), 0


def _bytes_without_states(
    case: FitProblem, stage: RankMemory, choice: Placement
) -> tuple[int, int]:
    """Returns the device bytes without states: if all states are on the device, and if not."""
    peaks = _memory_peaks(stage, choice)
    resting = case.library_bytes + _resting_weights(stage, choice)
    ring = _staging_bytes(stage, replace(choice, optimizer_states="host"))[0]
    # Gradients of an update that continues in the next forward exist only if states are offloaded.
    here = max(_peak_with_gaps(one) for one in peaks if one.where != IN_NEXT_FORWARD)
    return resting + here, resting + max(map(_peak_with_gaps, peaks)) + ring


def stage_device_bytes(case: FitProblem, stage: RankMemory, choice: Placement) -> int:
    """Returns the bytes of a stage on its device."""
    away = _offloaded_state_bytes(stage, choice)
    rests = _bytes_without_states(case, stage, choice)
    return rests[away > 0] + stage.sizes.state_bytes - away


def resting_bytes(stage: RankMemory, choice: Placement) -> int:
    """Returns the bytes of weights, states and staging buffers that are always on the device."""
    states = stage.sizes.state_bytes - _offloaded_state_bytes(stage, choice)
    return _resting_weights(stage, choice) + states + _staging_bytes(stage, choice)[0]


def predict_breakdown(
    case: FitProblem, choice: Placement, stage: int | None = None
) -> MemoryBreakdown:
    """Returns the predicted memory breakdown of a placement; by default of the largest stage."""
    if stage is None:
        one = max(case.stages, key=lambda one: stage_device_bytes(case, one, choice))
    else:
        one = case.stages[stage]
    sizes = one.sizes
    away = _offloaded_state_bytes(one, choice)
    peaks = (p for p in _memory_peaks(one, choice) if away or p.where != IN_NEXT_FORWARD)
    # The breakdown at the largest peak.
    peak = max(peaks, key=_peak_with_gaps)
    if sizes.state_bytes:
        share = 1.0 - away / sizes.state_bytes
    else:
        share = 1.0
    device = {
        "weights": _resting_weights(one, choice),
        "gradients": peak.gradients,
        "master": round(sizes.master * share),
        "moments": round(sizes.moments * share),
        "activations": peak.activations,
        "gathered weights": peak.gathered_weights,
        "logits": peak.logits,
        "communication": peak.communication,
        "staging": _staging_bytes(one, choice)[0],
        "libraries": case.library_bytes,
        "fragmentation": round(FRAGMENTATION_SHARE * peak.total_bytes),
        "communicators": case.communicator_bytes,
    }
    return MemoryBreakdown(device, _host_breakdown(one, choice), peak.where)


def _host_breakdown(stage: RankMemory, choice: Placement) -> dict[str, int]:
    """Returns the bytes of a stage on the host by category."""
    sizes = stage.sizes
    away = _offloaded_state_bytes(stage, choice)
    found = {
        "activations": _offloaded_activations(stage, choice),
        "staging": _staging_bytes(stage, choice)[1],
    }
    if choice.parameters == "host":
        found["weights"] = sizes.host_weights
        found["gradients"] = sizes.host_gradients
    if away and choice.optimizer_states != "disk":
        # Master weights and moments are offloaded in proportion.
        found["master"] = round(away * sizes.master / sizes.state_bytes)
        found["moments"] = away - found["master"]
    return {name: size for name, size in found.items() if size}


def _offloaded_activations(stage: RankMemory, choice: Placement) -> int:
    """Returns the bytes of activations of a micro-batch on the host."""
    share = stage.offloaded_fraction(choice.activation_offload_fraction)
    if share == 0.0:
        return 0
    saved = stage.saved_bytes(choice.micro_batch, stage.own_modes(choice.recompute_modes))
    # The last block of the model stays on the device.
    if stage.stage == stage.plan.pipe - 1:
        saved = saved[:-1]
    return round(share * sum(saved))


# ---- time -------------------------------------------------------------------------------


def predict_fit_seconds(case: FitProblem, choice: Placement) -> StepSeconds:
    """Returns the predicted time of a step: the slowest stage, plus the pipeline bubble."""
    return max(
        (_stage_seconds(case, stage, choice) for stage in case.stages), key=lambda one: one.total
    )


def _stage_seconds(case: FitProblem, stage: RankMemory, choice: Placement) -> StepSeconds:
    sizes = stage.sizes
    away = _offloaded_state_bytes(stage, choice)
    hosted = choice.parameters == "host"
    modes = stage.own_modes(choice.recompute_modes)
    all_saved: list[RecomputeMode] = ["none" for _ in modes]
    moved = StepTraffic(
        saved_activations=sum(stage.saved_bytes(choice.micro_batch, all_saved)),
        device_states=sizes.state_bytes - away,
        # Each pass of the optimizer over its states moves them.
        host_states=away * stage.optimizer.num_passes,
        host_parameters=round(sizes.trained_elements * away / sizes.state_bytes)
        if sizes.state_bytes
        else 0,
        host_weights=sizes.host_weights if hosted else 0,
        host_gradients=sizes.host_gradients if hosted else 0,
        host_activations=_offloaded_activations(stage, choice),
    )
    found = offload.estimate_step_seconds(
        stage.work,
        moved,
        case.rates,
        micro=choice.micro_batch,
        share=recompute_budget.recompute_fraction(modes),
        blocks=max(len(modes), 1),
        cpu=choice.optimizer_step_on == "cpu",
    )
    # Fill and drain, which virtual stages shorten.
    passes = stage.work.samples // choice.micro_batch
    busy = 1.0 + (stage.plan.pipe - 1) / (stage.plan.virtual_stages * passes)
    return replace(
        found,
        compute=found.compute * busy,
        recompute=found.recompute * busy,
    )


# ---- search -----------------------------------------------------------------------------


def enumerate_fits(case: FitProblem) -> Iterator[FitResult]:
    """Yields placements that fit, including the fastest for each micro-batch and location."""
    for one in _enumerate_placements(case):
        yield from _fit_recompute_modes(case, one, _recompute_choices(case, one))


def _enumerate_placements(case: FitProblem) -> Iterator[Placement]:
    """Yields all combinations of micro-batch and locations of weights and activations."""
    given = case.given_placement
    free = case.open_settings
    for micro in case.micro_batches:
        for weights in WEIGHT_LOCATIONS if "parameters" in free else (given.parameters,):
            for away in (
                OFFLOAD_FRACTIONS
                if "activation_offload_fraction" in free
                else (given.activation_offload_fraction,)
            ):
                yield replace(
                    given, micro_batch=micro, parameters=weights, activation_offload_fraction=away
                )


def _recompute_choices(case: FitProblem, choice: Placement) -> list[tuple[RecomputeMode, ...]]:
    """Returns recompute modes of the blocks, least recomputation first."""
    if "recompute" not in case.open_settings:
        return [case.given_placement.recompute_modes]
    if len(case.stages) == 1:
        return _stage_candidates(case.stages[0], choice.micro_batch)
    # Each stage gets the least recomputation with which it fits, for either location of the states.
    if "optimizer_states" in case.open_settings:
        places: tuple[StatesLocation, ...] = ("device", "host")
    else:
        places = (choice.optimizer_states,)
    found = [_modes_of_stages(case, replace(choice, optimizer_states=place)) for place in places]
    return sorted(dict.fromkeys(found), key=recompute_budget.recompute_fraction)


def _stage_candidates(stage: RankMemory, micro: int) -> list[tuple[RecomputeMode, ...]]:
    """Returns modes of the blocks of a stage, least recomputation first."""
    saved = {kind: sum(sizes) for kind, sizes in stage.saved_bytes_by_mode(micro).items()}
    return recompute_budget.candidate_modes(saved, len(stage.block_indices))


def _modes_of_stages(case: FitProblem, choice: Placement) -> tuple[RecomputeMode, ...]:
    """Returns modes of all blocks with which each stage fits; the smallest ones if none fits."""
    found = dict[int, RecomputeMode]()
    for stage in case.stages:
        sizes = dict[int, tuple[RecomputeMode, ...]]()
        for kinds in _stage_candidates(stage, choice.micro_batch):
            tried = with_stage_modes(case, choice, stage, kinds)
            size = stage_device_bytes(case, stage, tried)
            sizes.setdefault(size, kinds)
            if size <= case.device_limit:
                break
        found.update(zip(stage.block_indices, sizes[min(sizes)], strict=True))
    return tuple(found[i] for i in range(case.num_blocks))


def with_stage_modes(
    case: FitProblem, choice: Placement, stage: RankMemory, kinds: Sequence[RecomputeMode]
) -> Placement:
    """Returns a placement with the modes of one stage; the modes of other stages do not matter."""
    modes: list[RecomputeMode] = ["none"] * case.num_blocks
    for i, kind in zip(stage.block_indices, kinds, strict=True):
        modes[i] = kind
    return replace(choice, recompute_modes=tuple(modes))


def _fit_recompute_modes(
    case: FitProblem, choice: Placement, ways: Sequence[tuple[RecomputeMode, ...]]
) -> Iterator[FitResult]:
    """Yields a placement with each of these modes, until more recomputation cannot be faster."""
    least = predict_fit_seconds(case, replace(choice, recompute_modes=ways[0])).compute
    shortest = math.inf
    for kinds in ways:
        # Lower bound of the time with these modes. The modes are sorted, so later ones are slower.
        if least * (1.0 + recompute_budget.recompute_fraction(kinds) * case.block_share) > shortest:
            return
        for found in _fit_update_locations(case, replace(choice, recompute_modes=kinds)):
            shortest = min(shortest, found.seconds.total)
            yield found


def _fit_update_locations(case: FitProblem, choice: Placement) -> Iterator[FitResult]:
    """Yields a placement with states where they fit, updated on the device or on the CPU."""
    ways: tuple[UpdateLocation, ...] = ("device", "cpu")
    if "optimizer_step_on" not in case.open_settings:
        ways = ("device" if choice.optimizer_step_on == "auto" else choice.optimizer_step_on,)
    for way in ways:
        chosen = replace(choice, optimizer_step_on=way)
        rests = [_bytes_without_states(case, stage, chosen) for stage in case.stages]
        for one in _state_placements(case, chosen, rests):
            away = [_offloaded_state_bytes(stage, one) for stage in case.stages]
            device = max(
                rest[gone > 0] + stage.sizes.state_bytes - gone
                for stage, rest, gone in zip(case.stages, rests, away, strict=True)
            )
            host = max(sum(_host_breakdown(stage, one).values()) for stage in case.stages)
            # Where states are updated matters only if some are offloaded; skip duplicates.
            if (
                device <= case.device_limit
                and host <= case.host_limit
                and (any(away) or way == ways[0])
            ):
                yield FitResult(one, device, host, predict_fit_seconds(case, one))


def _state_placements(
    case: FitProblem, choice: Placement, rests: Sequence[tuple[int, int]]
) -> Iterator[Placement]:
    """Yields locations of the states of a placement: as many on the device as fit.

    The last argument has the bytes of each stage without states.
    """
    free = "optimizer_states" in case.open_settings
    if not free and not (
        choice.optimizer_states == "split"
        and "optimizer_states_on_device_gib" in case.open_settings
    ):
        yield choice
        return
    # The most bytes of states of a rank, and the least free memory of a stage for them.
    states = max(stage.sizes.state_bytes for stage in case.stages)
    # rest[1] includes the staging buffers, needed as soon as any state is offloaded.
    left = min(
        case.device_limit - rest[1] - stage.sizes.resident_states
        for stage, rest in zip(case.stages, rests, strict=True)
    )
    fits = all(
        rest[0] + stage.sizes.state_bytes <= case.device_limit
        for stage, rest in zip(case.stages, rests, strict=True)
    )
    if fits:
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
    """Returns the fastest placement that fits; None if none does."""
    return min(found, key=lambda fit: fit.sort_key, default=None)


def min_device_bytes(case: FitProblem) -> int:
    """Returns the least device memory with which a placement fits, given the host memory."""
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
            for kinds in _least_memory_modes(tight, one)
            for found in _fit_update_locations(tight, replace(one, recompute_modes=kinds))
        ),
        default=0,
    )


def _least_memory_modes(case: FitProblem, choice: Placement) -> list[tuple[RecomputeMode, ...]]:
    """Returns recompute modes that include the one with the least memory."""
    if "recompute" in case.open_settings and len(case.stages) > 1:
        return [_modes_of_stages(replace(case, device_limit=0), choice)]
    return _recompute_choices(case, choice)


def cheapest_changes(case: FitProblem, now: Placement, count: int = 3) -> list[FitResult]:
    """Returns the cheapest changes of `now` that fit. They change few settings, and all blocks have
    the same mode.
    """
    found: dict[tuple[str, ...], FitResult] = {}
    for kind in RECOMPUTE_COST:
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
            # Of placements with the same changed options, only the best is suggested.
            if 0 < len(words) <= MAX_CHANGED_SETTINGS and better:
                found[words] = fit
    order = sorted(found.items(), key=lambda one: (one[1].sort_key[0], len(one[0])))
    return [fit for _, fit in order[:count]]


# ---- words ------------------------------------------------------------------------------


def diff_options(now: Placement, then: Placement) -> tuple[str, ...]:
    """Returns the settings in which a placement differs from the current one, as options."""
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
    """Returns the choice and its reason in two to four lines. found: all placements that fit."""
    time = fit.seconds
    where = predict_breakdown(case, fit.placement).where
    lines = [
        f"memory: {_format_gib(fit.device_bytes)} of {_format_gib(case.device_limit)} GiB, "
        f"peak {where}: {describe_placement(case, fit.placement)}"
    ]
    parts = {"compute": time.compute, "recomputation": time.recompute}
    parts |= {"optimizer update": time.update, "waiting": time.waiting}
    more = ", ".join(f"{name} {value:.3g} s" for name, value in parts.items() if value > 0.0)
    lines.append(f"predicted: {time.total:.3g} s per step: {more}")
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
    # The fastest placement with unlimited memory shows which limit is the bottleneck, if any.
    free = fastest_fit(enumerate_fits(replace(case, device_limit=2**62, host_limit=2**62)))
    if free is None or free.sort_key >= fit.sort_key:
        lines.append("bottleneck: none. More memory would not make it faster")
        return lines
    what, size = (
        ("device memory", free.device_bytes)
        if free.device_bytes > case.device_limit
        else ("host memory", free.host_bytes)
    )
    lines.append(
        f"bottleneck: {what}. With {_format_gib(size)} GiB, "
        f"{describe_placement(case, free.placement)} would take {free.seconds.total:.3g} s"
    )
    return lines


def _comparison_key(choice: Placement) -> tuple[object, ...]:
    """Returns the settings in which placements must differ to count as alternatives."""
    return (
        choice.micro_batch,
        choice.optimizer_states,
        choice.parameters,
        choice.activation_offload_fraction,
        choice.optimizer_step_on,
    )


def describe_placement(case: FitProblem, choice: Placement) -> str:
    """Describes a placement in words."""
    words: dict[RecomputeMode, str] = {"none": "none", "selective": "selective", "full": "full"}
    counts = [(choice.recompute_modes.count(kind), word) for kind, word in words.items()]
    blocks = ", ".join(f"{count} {word}" for count, word in counts if count)
    out = [f"micro-batch {choice.micro_batch}", f"recomputation per block: {blocks}"]
    away = max(_offloaded_state_bytes(stage, choice) for stage in case.stages)
    if away:
        if choice.optimizer_states == "disk":
            where = "on disk"
        else:
            where = "on the host"
        out.append(
            f"{_format_gib(away)} GiB of optimizer states {where}, updated on the "
            f"{choice.optimizer_step_on}"
        )
    if choice.parameters == "host":
        out.append("weights on the host")
    if choice.activation_offload_fraction > 0.0:
        out.append(f"{choice.activation_offload_fraction:.0%} of activations on the host")
    return ", ".join(out)


def _format_gib(size: int) -> str:
    return f"{size / GIB:.3g}"
