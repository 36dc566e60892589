"""What experts communicate, and routers that send all tokens to one expert or the same to each.

Runs inside workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import Case, batch_of, flow_of, micros_of
from ranvier.grid import Grid
from ranvier.models.moe import Router, Routes
from ranvier.optim.optimizer import Optimizer
from ranvier.tools.verify import predict_events
from ranvier.trace import communication_events, diff_events
from ranvier.train.step import forward_backward


class Even(Router):
    """Choices in turn, whatever the logits are: every expert gets equally many of each rank."""

    def route_tokens(self, logits: Tensor, bias: Tensor | None = None) -> Routes:
        routes = super().route_tokens(logits, bias)
        turn = torch.arange(logits.shape[0] * self.top_k, device=logits.device)
        experts = (turn % self.num_experts).view(-1, self.top_k)
        return dataclasses.replace(routes, experts=experts)


def even(model: nn.Module) -> None:
    """Let all layers with experts route so."""
    for leaf in model.parallel.load_balancer.local_layers.values():  # type: ignore[union-attr]
        leaf.rule = Even(**dataclasses.asdict(leaf.rule))


def traced(grid: Grid, case: Case, duplicated: bool = False) -> dict[str, Any]:
    """Bytes of a step of balanced experts on this rank, and what was not predicted."""
    model = case.on(grid)
    even(model)
    parallel: Any = model.parallel
    for leaf in parallel.load_balancer.local_layers.values():
        leaf.duplicate_tokens = duplicated
    batch = batch_of(case.model, samples=16, packed=False)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)
    with grid.trace.record_events() as events:
        forward_backward(model, micros_of(batch, grid, case.micro_batches))
        optimizer.step()
    flow = flow_of(batch, grid, case.micro_batches)
    found = communication_events(events)
    sent = [event.bytes for event in found if event.op == "all_to_all"]
    inside = [event for event in found if ".mlp" in event.where]
    loads = parallel.load_balancer.last_stats[:, : parallel.load_balancer.num_experts]
    return {
        "lines": diff_events(predict_events(parallel, flow, case.micro_batches), events),
        "all_to_all": sum(sent),
        "calls": len(inside),
        "loads": loads.tolist(),
    }


def reduced_early(grid: Grid, case: Case) -> list[str]:
    """Blocks whose gradients set out over data in the backward pass, before the step ends."""
    model = case.on(grid)
    batch = batch_of(case.model, samples=16, packed=False)
    with grid.trace.record_events() as events:
        forward_backward(model, micros_of(batch, grid, case.micro_batches))
    found = communication_events(events)
    return [one.where for one in found if (one.op, one.axis) == ("reduce_scatter", ("data",))]
