"""Predicted bytes and memory of models with streams are those of a dry run of a rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, DecoderModelConfig
from ranvier.cost.layers import ActivationShape
from ranvier.planner import cluster
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.frameworks import RANVIER
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import ModelSpec, resolve_model_spec
from ranvier.planner.time.compute import ComputeContext, block_times
from ranvier.tools.dry_run import dry_run, resolve_dry_run

STREAMS = {"parscale_streams": 4, "parscale_prefix_tokens": 6}
SMALL: dict[str, Any] = {"layers": 4, "embed": 64, "heads": 8, "kv_heads": 2, "head_dim": 8}
SMALL |= {"mlp": 96, "vocab": 200, **STREAMS}
BIG: dict[str, Any] = {"layers": 4, "embed": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64}
BIG |= {"mlp": 2048, "vocab": 4000, **STREAMS}
GRIDS: list[dict[str, Any]] = [
    {"pipe": 2, "row": 2, "col": 2},
    {"context": 2, "depth": 2},
    {"data": 2, "row": 4, "col_splits": "features"},
    {"pipe": 2, "vocab_over_pipe": True},
    {"depth": 2, "col": 2, "recompute": "full"},
]


def lay_out(settings: dict[str, Any], shape: dict[str, Any], seq: int, micro: int) -> Any:
    """A run on a grid, its world and a rank of it."""
    settings = {"data": 1, **settings}
    plan = Plan(micro_batch=micro, **settings)
    world = math.prod(n for n in plan.degrees.values())
    plan = replace(plan, global_batch=2 * micro * plan.num_replicas)
    model = DecoderModelConfig(size="imported", max_seq=seq, **shape)
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=seq))
    return run, world, world * 2 // 3


@pytest.mark.sample(3)
@pytest.mark.parametrize("settings", GRIDS, ids=str)
def test_bytes_are_those_of_a_rank(settings: dict[str, Any]) -> None:
    run, world, rank = lay_out(settings, SMALL, 48, 4)
    found = dry_run(run, world=world, rank=rank, watched=False)
    run = resolve_dry_run(run, world=world, rank=rank)
    flow = ActivationShape(4, 48, 2, statistics_itemsize=4)
    spec = resolve_model_spec(run)
    predicted = step_comm_volume(
        spec, run.plan, flow, stage=found.index["pipe"], context_index=found.index["context"]
    )
    assert found.comm_bytes() == predicted.bytes_by_axis()
    assert spec.streams == 4 and spec.num_parameters > spec.num_layers
    assert ModelSpec.from_dict(spec.to_dict()).to_dict() == spec.to_dict()


@pytest.mark.parametrize(
    "settings",
    [GRIDS[0], *(pytest.param(one, marks=pytest.mark.full) for one in ({}, *GRIDS[1:]))],
    ids=str,
)
def test_memory_is_that_of_a_rank(settings: dict[str, Any]) -> None:
    run, world, rank = lay_out(settings, BIG, 2048, 2)
    found = dry_run(run, world=world, rank=rank)
    run = resolve_dry_run(run, world=world, rank=rank)
    flow = ActivationShape(2, 2048, 2, statistics_itemsize=4)
    predicted = peak_memory(resolve_model_spec(run), run.plan, flow, stage=found.index["pipe"])
    assert predicted.allocated_bytes == pytest.approx(found.memory.allocated_bytes, rel=0.05)
    for name in ("weights", "master", "moments"):
        assert predicted.device[name] == found.memory.device[name], name


def test_streams_multiply_activations_and_time() -> None:
    """Four streams save four times the activations of blocks, and take more than 3.5 times as
    long."""
    runs = [
        RunConfig(model=DecoderModelConfig(size="imported", **{**BIG, "parscale_streams": n}))
        for n in (1, 4)
    ]
    one, four = (resolve_model_spec(run) for run in runs)
    flow = ActivationShape(2, 2048, 2, statistics_itemsize=4)
    plan = Plan(data=1, global_batch=2, micro_batch=2)
    sizes = [peak_memory(spec, plan, flow).device["activations"] for spec in (one, four)]
    assert 3.0 < sizes[1] / sizes[0] < 4.5
    device = cluster.load_cluster("dgx-h100").device
    times = [
        block_times(spec.parts[1], device, ComputeContext(2, 2048), RANVIER).forward
        for spec in (one, four)
    ]
    assert 3.5 < times[1] / times[0] < 4.5
