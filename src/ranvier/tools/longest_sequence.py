"""Memory of a run on device and host in closed form, and the longest sequence that fits.

Unlike a dry run it includes tensors on the host: optimizer states, weights and activations. Open
settings are chosen as in a run (`train.memory.choose`), with rates of a typical device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.memory.host import host_bytes_per_rank
from ranvier.planner import offload_search
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown, format_breakdown
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.offload_search import FitProblem, Placement
from ranvier.sharding import ShardingTable, round_up
from ranvier.system.terminal import print
from ranvier.train.memory.breakdown import TYPICAL_RATES
from ranvier.train.memory.choose import (
    MemoryLimits,
    build_fit_problem,
    choose_memory,
    open_settings,
)

SEQUENCE_STEP = 1024
"""Sequence lengths that are tried are multiples of it."""
MAX_TRIED_TOKENS = 2**20
"""Longest sequence that is tried as the first one in chunks of tokens."""


@dataclass(frozen=True)
class MemoryPrediction:
    """The memory of a run of samples of `seq` tokens, by category."""

    seq: int
    placement: Placement
    memory: MemoryBreakdown
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the choice and the memory as lines of text."""
        return [*self.reasons, "", *format_breakdown(self.memory)]


def uses_host_memory(run: RunConfig) -> bool:
    """Whether a run keeps tensors on the host, or may choose to."""
    memory = run.memory
    return (
        memory.auto
        or memory.optimizer_states != "device"
        or memory.parameters != "device"
        or memory.activation_offload_fraction != 0.0
    )


def predict_memory(run: ResolvedRun) -> MemoryPrediction:
    """Returns the predicted memory of a run, or raises if it does not fit."""
    limits = find_limits(run)
    spec = resolve_model_spec(run)
    if open_settings(run):
        choice = choose_memory(run, spec, limits, TYPICAL_RATES)
        memory = choice.tracker.predicted_usage
        assert memory is not None
        return MemoryPrediction(run.data.seq_len, choice.placement, memory, tuple(choice.reasons))
    case = build_fit_problem(run, spec, limits, TYPICAL_RATES, frozenset())
    placement = replace(case.given_placement, micro_batch=run.plan.micro_batch)
    memory = offload_search.predict_breakdown(case, placement)
    words = offload_search.describe_placement(case, placement)
    return MemoryPrediction(run.data.seq_len, placement, memory, (f"memory: {words}",))


def find_longest_sequence(run: ResolvedRun) -> MemoryPrediction:
    """Returns the memory of a run with the longest samples that fit, by bisection.

    Its open memory settings are chosen for each length.
    """
    if run.memory.device_limit_gib <= 0.0:
        raise PlanError(
            "--longest-sequence without memory.device_limit_gib. The memory of the device must be "
            "known. Use --memory.device-limit-gib 80, and --memory.host-limit-gib for the host."
        )
    plan = run.plan
    step = round_up(SEQUENCE_STEP, ShardingTable.from_plan(plan).seq_multiple(plan.degrees))
    shortest = step
    if not fits(with_sequence(run, shortest)):
        raise PlanError(
            f"Samples of {shortest} tokens do not fit into {run.memory.device_limit_gib:g} GiB. "
            "Weights, gradients, optimizer states and activations must fit. Use --memory.auto, or "
            "more ranks."
        )
    # Blocks of longer samples run in chunks of tokens, so a length may fit although a shorter one
    # does not: the first length in chunks is tried, then powers of two, then bisection.
    in_chunks = step
    while in_chunks < MAX_TRIED_TOKENS and not plan.chunk_of_samples(1, in_chunks):
        in_chunks += step
    if fits(with_sequence(run, in_chunks)):
        shortest = in_chunks
    longest = 2 * shortest
    while fits(with_sequence(run, longest)):
        shortest, longest = longest, 2 * longest
    while longest - shortest > step:
        middle = (shortest + longest) // (2 * step) * step
        if fits(with_sequence(run, middle)):
            shortest = middle
        else:
            longest = middle
    return predict_memory(with_sequence(run, shortest))


def with_sequence(run: ResolvedRun, seq: int) -> ResolvedRun:
    """Returns the run with samples of `seq` tokens; the positions of the model are not checked."""
    return replace(run, data=replace(run.data, seq_len=seq))


def fits(run: ResolvedRun) -> bool:
    """Whether a run fits with a choice of its open memory settings."""
    limits = find_limits(run)
    free = open_settings(run)
    case = build_fit_problem(run, resolve_model_spec(run), limits, TYPICAL_RATES, free)
    if free:
        return next(iter(offload_search.enumerate_fits(case)), None) is not None
    return _placement_fits(case, replace(case.given_placement, micro_batch=run.plan.micro_batch))


def _placement_fits(case: FitProblem, placement: Placement) -> bool:
    """Whether a placement fits on device and host."""
    memory = offload_search.predict_breakdown(case, placement)
    return memory.total_bytes <= case.device_limit and memory.host_bytes <= case.host_limit


def find_limits(run: RunConfig) -> MemoryLimits:
    """Returns the configured limits of a rank; without one, the memory of this machine."""
    memory = run.memory
    host = int(memory.host_limit_gib * GIB) or host_bytes_per_rank(1)
    device = int(memory.device_limit_gib * GIB) or 2**62
    return MemoryLimits(device, host)


def show_memory_prediction(run: ResolvedRun, *, longest: bool) -> int:
    """Prints the memory of a run by category; longest: of the longest samples that fit."""
    found = find_longest_sequence(run) if longest else predict_memory(run)
    if longest:
        print(f"longest sequence that fits: {found.seq:,} tokens")
    else:
        print("predicted in closed form, as a dry run does not count host memory")
    for line in found.lines():
        print(line)
    return 0
