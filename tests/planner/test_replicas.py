"""Replicas split states: what the planner predicts of weights is what a rank has and communicates.

Bytes of weights and states, and of their gathers and reductions, on grids with context and expert,
for ranks of a fake process group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from grids import label
from ranvier import launch
from ranvier.buckets.matrix_owners import MatrixOwners
from ranvier.config.plan import Plan, WeightSplit
from ranvier.config.run import RunConfig
from ranvier.config.sections import DecoderModelConfig
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, MatrixRule, Muon
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.comm_volume import (
    STEP_VOTES,
    ShardingKey,
    build_all_stages,
    stage_matrix_owners,
    step_comm_volume,
)
from ranvier.planner.memory.model_states import model_state_sizes
from ranvier.planner.model_spec import resolve_model_spec

SHAPE: dict[str, Any] = {"layers": 2, "embed": 48, "heads": 12, "kv_heads": 3, "head_dim": 4}
SHAPE |= {"mlp": 96, "vocab": 101, "bias": True}
EXPERTS: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "expert_mlp": 48}
GRIDS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 3, "context": 4, "depth": 2}, {}),
    ({"context": 8, "row": 6}, {"tie_embeddings": True}),
    ({"data": 2, "expert": 4, "context": 2, "col": 2}, EXPERTS),
    ({"expert": 2, "context": 3, "depth": 5, "row": 3}, EXPERTS),
]
OVER: tuple[WeightSplit, ...] = ("depth", "depth_context")


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("degrees", "changes"), GRIDS, ids=[label(grid) for grid, _ in GRIDS])
def test_states_and_their_communication_are_those_of_a_rank(
    degrees: dict[str, int], changes: dict[str, Any], over: WeightSplit
) -> None:
    world = math.prod(degrees.values())
    with launch.fake_process_group(world, rank=world // 3):
        grid = Grid(degrees, rank=world // 3, connected=True)
        plan = Plan(shard_weights_over=over, global_batch=world, micro_batch=1, recompute="full")
        plan = plan.with_degrees(grid.degrees)
        config = DecoderConfig(**{**SHAPE, **changes})
        model = parallelize(Decoder(config), grid, plan, dtype=torch.bfloat16)
        parallel = get_parallel_model(model)
        optimizer = Optimizer(parallel.bucket_scheduler)
    spec = resolve_model_spec(
        RunConfig(model=DecoderModelConfig(size="imported", **{**SHAPE, **changes}))
    )
    (stage,) = build_all_stages(spec, plan, 48)
    found = model_state_sizes(spec, stage, ShardingKey.from_plan(plan), 2, ADAMW)
    assert found.weight_bytes == nbytes(b.data for b in parallel.bucket_scheduler.buckets)
    states = optimizer.state_store.states.values()
    assert found.state_bytes == nbytes(x for held in states for x in held.values())
    flow = ActivationShape(1, 48, itemsize=2, statistics_itemsize=4)
    volume = step_comm_volume(spec, plan, flow)
    rows = volume.volumes_of_phases("gather", "scatter", "update")
    gathers, scatters = parallel._depth_events()
    events = (gathers + scatters) * plan.num_micro_batches
    events += parallel.update_events(votes=STEP_VOTES)
    total = Counter[tuple[str, tuple[str, ...]]]()
    for event in events:
        total[event.op, event.axis] += event.bytes
    for row in rows:
        total[row.op, row.axis] -= row.bytes * row.count
    assert not any(total.values()), +total


@pytest.mark.parametrize("rule", [Muon(), Jorge(max_preconditioner_dim=16)], ids=["muon", "jorge"])
@pytest.mark.parametrize(("degrees", "changes"), GRIDS, ids=[label(grid) for grid, _ in GRIDS])
def test_owners_of_matrices_are_those_of_a_rank(
    degrees: dict[str, int], changes: dict[str, Any], rule: MatrixRule
) -> None:
    """The planner repeats kinds of blocks, and a rank has buckets, whose order must be the same."""
    world = math.prod(degrees.values())
    grid = Grid(degrees, rank=world // 3)
    plan = Plan(global_batch=world, micro_batch=1).with_degrees(grid.degrees)
    config = DecoderConfig(**{**SHAPE, **changes})
    parallel = get_parallel_model(parallelize(Decoder(config), grid, plan))
    cost = rule.cost(torch.float32)
    specs = [bucket.spec for bucket in parallel.bucket_scheduler.buckets]
    real = MatrixOwners.assign(specs, grid.degrees, cost)
    spec = resolve_model_spec(
        RunConfig(model=DecoderModelConfig(size="imported", **{**SHAPE, **changes}))
    )
    (stage,) = build_all_stages(spec, plan, 48)
    found = stage_matrix_owners(spec, stage, ShardingKey.from_plan(plan), cost)
    assert found.owners == real.owners and found.matrices == real.matrices
    for rank in (0, world // 3, world - 1):
        assert found.sent_elements(rank) == real.sent_elements(rank)
        assert found.received_elements(rank) == real.received_elements(rank)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(x.nbytes for x in tensors)
