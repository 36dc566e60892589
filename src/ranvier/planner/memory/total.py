"""Space: the bytes of a rank by category at the moment of a step when most is there; no torch.

Weights and states rest; `peaks` knows the moments at which most is there besides.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ranvier.config.plan import Plan
from ranvier.cost.layers import Flow
from ranvier.planner.comm_volume import KEPT, Spot, cut, stage_of
from ranvier.planner.memory.breakdown import Table
from ranvier.planner.memory.chunks import How
from ranvier.planner.memory.model_states import Moments, Weights, weights_of
from ranvier.planner.memory.peaks import Peak, peaks
from ranvier.planner.model_spec import Model, Part
from ranvier.planner.time.compute import Scales


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
    fp8: Scales = "",
    simulated: bool = True,
) -> Table:
    """Bytes by category of a rank of a stage, of a settled plan; stage: None is the worst one.

    keeps: blocks that compute again keep what they communicated. fp8: as of `Layout`.
    simulated: the policy of a pipeline says what is under way; else 1F1B does.
    """
    how, spot = How(keeps, compiled, fp8, simulated), Spot.of(plan)
    firsts = cut(model, plan, flow.seq)
    shape = plan.pipe, plan.chunks, firsts, plan.spread
    found = list[tuple[int, Weights, Peak]]()
    for i in fullest(model, *shape) if stage is None else (stage,):
        here = stage_of(model, i, *shape)
        own = weights_of(model, here, spot, flow.itemsize, moments)
        peak = max(
            peaks(model, plan, flow, spot, firsts, here, own, how), key=lambda one: one.total
        )
        rests = own.bytes + (0 if states == "host" else own.master + own.moments)
        found.append((rests + peak.total, own, peak))
    _, own, peak = max(found, key=lambda one: one[0])
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


@lru_cache(KEPT)
def fullest(
    model: Model, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> tuple[int, ...]:
    """Stages of which one needs most: those with parts that no earlier one has as well.

    Of two stages with the same parts the earlier has more micro-batches under way.
    """
    found = dict[int, Counter[Part]]()
    for i in range(count):
        parts = Counter(dict(stage_of(model, i, count, chunks, firsts, spread).here))
        if not any(parts <= other for other in found.values()):
            found[i] = parts
    return tuple(found)
