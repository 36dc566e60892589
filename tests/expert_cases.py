"""What experts communicate, and routers that send all tokens to one expert or the same to each.

Runs inside workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import Case, batch_of, flow_of, micros_of
from ranvier.data.batch import Batch
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


ALIKE = 3
"""A token that all alike ones are."""


def batch_with_alike(model: str, alike: int) -> Batch:
    """A batch whose sequences begin with so many equal tokens.

    They see nothing but each other, so a router with one choice sends all of them to one expert.
    """
    batch = batch_of(model, samples=16, packed=False)
    tokens = batch.tokens.clone()
    tokens[:, :alike] = ALIKE
    return dataclasses.replace(batch, tokens=tokens)


def exchanged(grid: Grid, case: Case, batch: Batch, dispatch: str = "model") -> dict[str, Any]:
    """Rows that each layer with experts exchanges in a step on this rank, and those chosen."""
    model = case.on(grid, moe_dispatch_dtype=dispatch)
    parallel: Any = model.parallel
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)
    with grid.trace.record_events() as events:
        loss = forward_backward(model, micros_of(batch, grid, case.micro_batches))
        optimizer.step()
    layers = parallel.load_balancer.local_layers
    found: dict[str, Any] = {"loss": loss, "index": dict(grid.index), "layers": {}}
    size = row_bytes(grid)
    for loads, (name, leaf) in zip(
        parallel.load_balancer.last_stats.tolist(), layers.items(), strict=True
    ):
        own = [event for event in communication_events(events) if event.where == name]
        rows = {
            op: [event.bytes / size for event in own if (event.op, event.axis) == (op, axis)]
            for op, axis in (
                ("all_gather", ("row",)),
                ("reduce_scatter", ("row",)),
                ("all_to_all", ("expert",)),
            )
        }
        first = grid.index["expert"] * leaf.num_local_experts
        chosen = sum(loads[first : first + leaf.num_local_experts])
        found["layers"][name] = rows | {"chosen": chosen}
    return found


def row_bytes(grid: Grid) -> int:
    """Bytes of a row: 16 features in float64, split over col."""
    return 16 // grid.degrees["col"] * 8


def reduced_early(grid: Grid, case: Case) -> list[tuple[str, tuple[str, ...]]]:
    """Blocks whose gradients are reduced over replicas in the backward pass, and their axes."""
    model = case.on(grid)
    batch = batch_of(case.model, samples=16, packed=False)
    with grid.trace.record_events() as events:
        forward_backward(model, micros_of(batch, grid, case.micro_batches))
    found = communication_events(events)
    return [(one.where, one.axis) for one in found if one.op == "reduce_scatter"]
