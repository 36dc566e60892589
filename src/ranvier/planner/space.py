"""Space: the bytes of a rank by category at the moment of a step when most is there; no torch.

Weights and states rest; `peaks` knows the moments at which most is there besides.
"""

from __future__ import annotations

from ranvier.layers import Flow
from ranvier.plan import Plan
from ranvier.planner.leaves import Model
from ranvier.planner.moves import Spot, cut, stage_of
from ranvier.planner.peaks import How, peaks
from ranvier.planner.table import Table
from ranvier.planner.weights import Moments, weights_of


def space(
    model: Model,
    plan: Plan,
    flow: Flow,
    *,
    stage: int | None = None,
    states: str = "device",
    moments: Moments = "master",
    keeps: bool = False,
    compiled: bool = False,
    simulated: bool = True,
) -> Table:
    """Bytes by category of a rank of a stage, of a settled plan; stage: None is the worst one.

    keeps: blocks that compute again keep what they communicated. simulated: the policy of a
    pipeline says what is under way; else 1F1B does.
    """
    how = How(keeps, compiled, simulated)
    if stage is None:
        tables = [
            space(model, plan, flow, stage=i, states=states, moments=moments, **how._asdict())
            for i in _worst(model, plan, flow, simulated)
        ]
        return max(tables, key=lambda one: one.total)
    spot = Spot.of(plan)
    here = stage_of(model, stage, plan.pipe, plan.chunks, cut(model, plan, flow.seq), plan.spread)
    own = weights_of(model, here, spot, flow.itemsize, moments)
    peak = max(peaks(model, plan, flow, here, own, how), key=lambda one: one.total)
    device = {
        "weights": own.bytes,
        "gradients": peak.gradients,
        "master": own.master,
        "moments": own.moments,
        "activations": peak.activations,
        "gathered weights": peak.gathered,
        "logits": peak.logits,
        "communication": peak.communication,
    }
    host: dict[str, int] = {}
    if states == "host":
        host = {name: device.pop(name) for name in ("master", "moments")}
    return Table({n: size for n, size in device.items() if size}, host, peak.where)


def _worst(model: Model, plan: Plan, flow: Flow, simulated: bool) -> list[int]:
    """Stages of which one needs most: the ends, and the second.

    Under 1F1B that has one micro-batch less under way than the first, and no embedding.
    """
    if plan.pipe < 3:
        return [*range(plan.pipe)]
    every = cut(model, plan, flow.seq)
    first, second = (
        sum(n for part, n in stage_of(model, i, plan.pipe, plan.chunks, every, plan.spread).here)
        for i in (0, 1)
    )
    return [0, 1, plan.pipe - 1] if simulated or second >= first else [0, plan.pipe - 1]
