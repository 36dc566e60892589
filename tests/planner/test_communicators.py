"""Communicators: the closed form lists what a rank makes, and what its steps communicate over."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import distributed
from torch.distributed import ProcessGroup

from ranvier import launch
from ranvier.config.plan import AXES, Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, DecoderModelConfig, LoraConfig
from ranvier.errors import PlanError
from ranvier.grid import CONTROL_CHANNEL, GLOO_CHANNELS, HOST_CHANNEL, Communicator, Grid
from ranvier.launch.fake_backend import PROCESS_GROUP_METHODS
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.pipeline.traffic import BACKWARD, FORWARD, channel_links
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster
from ranvier.planner.communicators import (
    FIRST_BYTES,
    FURTHER_BYTES,
    KERNEL_BYTES,
    PEER_BYTES,
    CommunicatorSpec,
    communicator_bytes,
    list_communicators,
    pipe_peers,
    total_bytes,
    worst_stage,
    worst_stage_bytes,
)
from ranvier.planner.frameworks import RANVIER
from ranvier.planner.model_spec import load_shipped_spec, resolve_model_spec
from ranvier.planner.predict import Candidate, Prediction, Workload, predict_step
from ranvier.tools.dry_run import META, _prepare_model, _varying_axes, resolve_dry_run
from ranvier.train.build_model import build_model
from ranvier.train.memory.resolve import build_optimizer, count_peers
from ranvier.train.memory.usage import blank_batch
from ranvier.train.step import StepLimits, train_step

SMALL: dict[str, Any] = {"layers": 6, "embed": 48, "heads": 24, "kv_heads": 2, "head_dim": 4}
SMALL |= {"mlp": 96, "vocab": 101}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_embeddings": True, "kv_heads": 4, "bias": True},
    "norms": {"qk_norm": "full", "kv_heads": 24},
    "experts": {"experts": 4, "experts_per_token": 2, "expert_mlp": 48, "shared_expert_mlp": 24},
    "lora": {"tie_embeddings": True},
}
DEGREES = {"pipe": (1, 1, 2, 3), "data": (1, 1, 2), "expert": (1, 2, 4), "depth": (1, 1, 2)}
DEGREES |= {"row": (1, 2, 4, 8), "col": (1, 1, 2, 4)}
Ranks = tuple[tuple[int, ...], str]
"""Members of a communicator, ascending, and its channel."""


class NcclGrid(Grid):
    """A grid of torch's fake process group that makes the groups of a run over NCCL."""

    @property
    def backend(self) -> str:
        return "nccl"

    def _make_group(self, ranks: list[int], names: tuple[str, ...], channel: str) -> ProcessGroup:
        group = distributed.new_group(ranks, use_local_synchronization=True)
        if len(ranks) > 1:
            backend = "gloo" if channel in GLOO_CHANNELS else self.backend
            self.communicators.append(Communicator(names, channel, len(ranks), backend, 0.0))
        return group


def run_of(kind: str, **plan: Any) -> RunConfig:
    """A small run with a layout, checked."""
    degrees = {axis: plan.get(axis, 1) for axis in AXES}
    share = 4 * degrees["data"] * degrees["expert"] * degrees["depth"]
    given = Plan(**{"data": 1, "global_batch": share, "micro_batch": 4, "schedule": "1f1b", **plan})
    run = RunConfig(
        model=DecoderModelConfig(size="imported", **{**SMALL, **MODELS[kind]}),
        lora=LoraConfig(rank=4 if kind == "lora" else 0),
        plan=given,
        data=DataConfig(seq_len=48),
    )
    world = math.prod(degrees.values())
    return resolve_dry_run(run, world=world, rank=0)


def sample(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Models and layouts that can run, the same on every machine."""
    draw, found = random.Random(3), list[tuple[str, dict[str, Any]]]()
    while len(found) < count:
        kind = [*MODELS][len(found) % len(MODELS)]
        plan: dict[str, Any] = {axis: draw.choice(sizes) for axis, sizes in DEGREES.items()}
        plan["col_splits"] = draw.choice(("samples", "features"))
        if plan["pipe"] > 1:
            plan["virtual_stages"], plan["vocab_over_pipe"] = (
                draw.choice((1, 2)),
                draw.choice((False, True)),
            )
            plan["schedule"] = "1f1b" if plan["virtual_stages"] == 1 else "interleaved"
        with suppress(PlanError):
            run_of(kind, **plan)
            found.append((kind, plan))
    return found


def members(spec: CommunicatorSpec, plan: Plan, rank: int) -> Ranks:
    """The ranks of a communicator of a plan, as one of them sees it."""
    grid, counts = Grid.from_plan(plan, rank=rank), dict(spec.degrees)
    if counts.get("pipe", plan.pipe) < plan.pipe:  # a tied weight: of the first and the last stage
        axis = grid.axis_subset("pipe", [0, plan.pipe - 1])
    else:
        axis = grid.axis(share=counts)
    return tuple(sorted(axis.ranks)), spec.channel


def make(run: RunConfig, rank: int) -> tuple[Grid, set[Ranks], int]:
    """What one rank of a run makes, and how many ranks it sends to point to point."""
    with launch.fake_process_group(run.plan.world_size, rank):
        grid = NcclGrid.from_plan(run.plan, rank=rank, connected=True)
        model = build_model(run, grid, META, local_ranks=1)
        build_optimizer(run, model, META, local_ranks=1)
    made = {(ranks, channel) for ranks, channel in grid.groups if len(ranks) > 1}
    assert len(made) == len(grid.communicators)
    return grid, made, count_peers(run, get_parallel_model(model))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "plan"), sample(16), ids=str)
def test_a_rank_makes_the_listed_communicators(kind: str, plan: dict[str, Any]) -> None:
    run = run_of(kind, **plan)
    for rank in {0, run.plan.world_size - 1}:
        grid, made, peers = make(run, rank)
        specs = list_communicators(resolve_model_spec(run), run.plan, stage=grid.index["pipe"])
        found = [members(one, run.plan, rank) for one in specs]
        assert len({*found}) == len(found) and {*found} == made, (grid.index, specs)
        assert sum(one.peers for one in specs) == peers
        sizes = sorted((one.axis_names, one.channel, one.size, one.backend) for one in specs)
        own = [
            one for one in grid.communicators if run.plan.pipe > 1 or one.channel != HOST_CHANNEL
        ]
        assert sizes == sorted((one.names, one.channel, one.size, one.backend) for one in own)


def step(run: RunConfig, rank: int) -> set[tuple[tuple[str, ...], int, str]]:
    """Axes, size and channel of what one rank communicates over in a step."""
    used = set[str]()

    def noting(call: Any) -> Any:
        def noted(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            used.add(group.group_name)
            return call(group, *arguments, **options)

        return noted

    names = [name for name in vars(ProcessGroup) if name in PROCESS_GROUP_METHODS]
    calls = {name: noting(getattr(ProcessGroup, name)) for name in names}
    with (
        launch.fake_process_group(run.plan.world_size, rank),
        mock.patch.multiple(ProcessGroup, **calls),
    ):
        grid = Grid.from_plan(run.plan, rank=rank, connected=True)
        model = build_model(run, grid, META, local_ranks=1)
        _prepare_model(run, model, 1.0)
        optimizer = build_optimizer(run, model, META, local_ranks=1)
        batches = [
            blank_batch(run, run.plan.micro_batch, grid, META)
            for _ in range(run.plan.num_micro_batches)
        ]
        grid.seal_groups()
        train_step(model, optimizer, batches, run.peak_lr, StepLimits.for_device(META))
        keys = [key for key, group in grid.groups.items() if group.group_name in used]
    return {(_varying_axes(ranks, grid), len(ranks), channel) for ranks, channel in keys}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("dense", {"data": 2, "depth": 2, "row": 4, "col": 2}),
        ("dense", {"row": 4, "col": 2, "col_splits": "features"}),
        ("tied", {"pipe": 3, "row": 2, "col_splits": "features", "col": 2}),
        ("experts", {"data": 2, "expert": 4, "row": 2, "col": 2}),
    ],
    ids=str,
)
def test_steps_communicate_over_all_that_is_listed(kind: str, plan: dict[str, Any]) -> None:
    """Of transfers between stages and orders inside of them a fake world has others."""
    run = run_of(kind, **plan)
    used, wanted = set(), set()
    for stage in range(run.plan.pipe):
        used |= step(run, stage * run.plan.world_size // run.plan.pipe)
        specs = list_communicators(resolve_model_spec(run), run.plan, stage=stage)
        wanted |= {(one.axis_names, one.size, one.channel) for one in specs}
    assert {one for one in used if one[2] not in (FORWARD, BACKWARD)} == {
        one for one in wanted if one[2] not in (*TRANSFERS, CONTROL_CHANNEL, HOST_CHANNEL)
    }


TRANSFERS = [*channel_links(3, 2, spread=True)]
"""All channels of transfers between stages."""


def test_stages_have_neighbours() -> None:
    def peers(stage: int, count: int, **how: Any) -> dict[str, int]:
        return pipe_peers(stage, count, **{"chunks": 1, "spread": False, **how})

    assert peers(0, 2) == peers(1, 2, spread=True, chunks=2) == {"up": 1, "down": 1}
    assert [peers(i, 4)["up"] for i in range(4)] == [1, 2, 2, 1]
    assert [peers(i, 4, chunks=2)["wrap down"] for i in range(4)] == [1, 0, 0, 1]
    assert [peers(i, 4, spread=True)["rows"] for i in range(4)] == [3, 1, 1, 1]


def test_bytes_follow_from_the_constants() -> None:
    assert communicator_bytes(0) == 0
    assert communicator_bytes(1) == FIRST_BYTES + KERNEL_BYTES
    assert communicator_bytes(3, 2) - communicator_bytes(1) == 2 * FURTHER_BYTES + 2 * PEER_BYTES
    model, plan = load_shipped_spec("llama3-8b"), Plan(pipe=4, data=2, row=2, micro_batch=1)
    made = list_communicators(model, plan, stage=2)
    over = [one for one in made if one.backend == "nccl"]
    assert {one.channel for one in made if one.backend == "gloo"} == {CONTROL_CHANNEL, HOST_CHANNEL}
    assert total_bytes(made) == communicator_bytes(len(over), 4) == worst_stage_bytes(model, plan)
    assert worst_stage(model, plan) == 2 and list_communicators(model, Plan(data=1)) == ()


def test_the_planner_counts_them_on_gpus() -> None:
    gpus = cluster.load_cluster("dgx-h100")
    job = Workload(load_shipped_spec("llama3-1b"), 2048, 64)

    def held(ranks: int, machine: Cluster = gpus) -> Prediction:
        plan = Plan(data=ranks, global_batch=64, micro_batch=1)
        return predict_step(job, Candidate(plan), machine)

    alone, pair = held(1).memory, held(2).memory
    assert alone.device["communicators"] == 0 < pair.device["communicators"]
    assert pair.total_bytes - pair.allocated_bytes > pair.device["communicators"], (
        "no tensor has them"
    )
    assert "communicators" not in held(2, replace(gpus, cores=8)).memory.device
    # one communicator takes what was once part of the context
    assert RANVIER.context_bytes + communicator_bytes(1) <= 1.0e9
