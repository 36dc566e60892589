"""Baselines: the best layout of each style that other frameworks support, and the best of all.

All are predicted with the same framework profile, so that only the layout differs:

    ZeRO-1         data                              DDP with sharded optimizer states
    FSDP           depth                             weights sharded over all devices (ZeRO-3)
    HSDP           depth x data                      replicas of an FSDP group
    Megatron-LM    row inside a node x context       1-D tensor parallelism, context parallelism
                   x pipe x data                     and a pipeline
    AxoNN          row x col x depth x data          tensor parallelism in up to three dims
    Ranvier        any layout of the grid
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ranvier.config.plan import Plan
from ranvier.planner.predict import Candidate, Prediction

RANVIER_STYLE = "Ranvier"


@dataclass(frozen=True)
class PredictedCandidate:
    """A layout and its prediction."""

    candidate: Candidate
    prediction: Prediction

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.candidate.plan

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Sort key: the fastest first; of times equal to three digits, the simpler layout first."""
        plan = self.plan
        degrees = self.plan.degrees
        axes = sum(size > 1 for size in degrees.values())
        extras = (
            self.candidate.states != "device",
            plan.virtual_stages,
            plan.col_splits != "samples",
            bool(plan.rank_order),
            plan.reshard_after != "micro_batch",
            plan.shard_weights_over != "depth",
            ("none", "selective", "full", "memory_budget").index(plan.recompute),
        )
        # Three digits: smaller differences must not favor a more complicated layout.
        rounded = float(f"{self.prediction.step_seconds:.3g}")
        # A total order makes the result independent of the order of the search.
        tie = (*(-size for size in degrees.values()), plan.micro_batch, plan.rank_order)
        return (rounded, axes, *extras, self.prediction.step_seconds, *tie)


def _is_data_parallel(plan: Plan) -> bool:
    """Returns whether every rank computes whole layers on its own samples."""
    return plan.pipe == plan.context == plan.row == plan.col == 1


StyleTest = Callable[[Plan, int], bool]
STYLES: Mapping[str, StyleTest] = {
    "ZeRO-1": lambda p, node: _is_data_parallel(p) and p.depth == 1,
    "FSDP": lambda p, node: _is_data_parallel(p) and p.depth > 1 and p.data == 1,
    "HSDP": lambda p, node: _is_data_parallel(p) and p.depth > 1 and p.data > 1,
    "Megatron-LM": lambda p, node: p.gather_ranks == p.col == 1 and p.row <= node,
    "AxoNN": lambda p, node: p.pipe == p.context == 1,
    RANVIER_STYLE: lambda p, node: True,
}
"""Tests whether a plan belongs to a style; the second argument is the devices per node."""


def matching_styles(plan: Plan, per_node: int) -> list[str]:
    """Returns all styles that a plan belongs to."""
    return [name for name, of in STYLES.items() if of(plan, per_node)]


FAMILIES = (
    "one device",
    "DDP",
    "FSDP",
    "HSDP",
    "row",
    "row x depth",
    "2-D, 3-D",
    "context",
    "pipeline",
)
"""Names of layouts by their axes, from simple to mixed. Any layout with stages is a pipeline, and
any other that splits samples is named after context."""


def layout_family(plan: Plan) -> str:
    """Returns the family of a plan by the axes that it uses."""
    if plan.pipe > 1:
        return "pipeline"
    if plan.context > 1:
        return "context"
    if plan.col > 1:
        return "2-D, 3-D"
    if plan.row > 1:
        if plan.depth > 1:
            return "row x depth"
        return "row"
    if plan.depth > 1:
        if plan.data > 1:
            return "HSDP"
        return "FSDP"
    if plan.data > 1:
        return "DDP"
    return "one device"


def find_baselines(
    found: Iterable[PredictedCandidate], per_node: int
) -> dict[str, PredictedCandidate]:
    """Returns the best feasible layout of each style that has one. `found` is sorted, best
    first.
    """
    best: dict[str, PredictedCandidate] = {}
    for one in found:
        for name in matching_styles(one.plan, per_node):
            best.setdefault(name, one)
        if len(best) == len(STYLES):
            break
    return {name: best[name] for name in STYLES if name in best}


def baseline_slowdowns(best: Mapping[str, PredictedCandidate]) -> dict[str, float]:
    """Returns the step time of the best layout of each style relative to ours."""
    ours = best[RANVIER_STYLE].prediction.step_seconds
    return {
        name: one.prediction.step_seconds / ours
        for name, one in best.items()
        if name != RANVIER_STYLE
    }
