"""Mixtures: what the planner predicts is what a rank does, under any load; the search."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import call
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, DecoderModelConfig, MemoryConfig
from ranvier.cost.layers import ActivationShape
from ranvier.planner import cluster
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import load_shipped_spec, resolve_model_spec
from ranvier.planner.predict import Candidate, Workload, predict_step
from ranvier.planner.search import SearchRequest, search_layouts
from ranvier.planner.time import links
from ranvier.planner.time.links import RankGroup
from ranvier.tools.dry_run import dry_run, resolve_dry_run

AXES = ("pipe", "data", "expert", "depth", "row", "col")
SMALL: dict[str, Any] = {"layers": 4, "embed": 48, "heads": 24, "kv_heads": 6, "head_dim": 4}
SMALL |= {"mlp": 96, "vocab": 101, "experts": 8, "experts_per_token": 2, "expert_mlp": 48}
Layouts = list[tuple[dict[str, Any], dict[str, Any], float]]
BYTES: Layouts = [
    ({"expert": 4, "row": 2, "col": 2}, {"shared_expert_mlp": 24}, 1.5),
    ({"expert": 8, "data": 2, "depth": 2}, {"moe_layer_interval": 2, "experts_per_token": 3}, 1.0),
    (
        {"pipe": 2, "expert": 2, "row": 2, "col": 2, "depth": 2, "moe_dispatch_dtype": "bf16"},
        {"shared_expert_mlp": 24, "activation": "gelu"},
        1.3,
    ),
    ({"data": 4, "row": 6}, {"capacity_factor": 1.0}, 1.0),
    (
        {"expert": 2, "depth": 4, "row": 2, "recompute": "full", "moe_dispatch_dtype": "fp8"},
        {},
        1.25,
    ),
    ({"expert": 2, "col": 4, "data": 4, "recompute": "full", "keep": True}, {}, 2.0),
]
"""Degrees and settings of the plan, changes of the model, and the load of the busiest rank."""


def laid(
    settings: dict[str, Any], shape: dict[str, Any], seq: int, micro: int
) -> tuple[RunConfig, int, int]:
    """A run, its world and one of its ranks."""
    given = {"data": 1, **settings}
    keep, passes = given.pop("keep", False), given.pop("passes", 1)
    degrees = {axis: given.get(axis, 1) for axis in AXES}
    replicas = degrees["data"] * degrees["expert"] * degrees["depth"]
    plan = Plan(**given, micro_batch=micro, global_batch=replicas * micro * passes, schedule="1f1b")
    run = RunConfig(
        model=DecoderModelConfig(size="imported", **shape),
        plan=plan,
        data=DataConfig(seq_len=seq),
        memory=MemoryConfig(recompute_collectives="save" if keep else "rerun"),
    )
    world = math.prod(degrees.values())
    return run, world, world * 2 // 3


@pytest.mark.sample(3)
@pytest.mark.parametrize(("settings", "changes", "load"), BYTES, ids=str)
def test_bytes_are_those_of_a_rank(
    settings: dict[str, Any], changes: dict[str, Any], load: float
) -> None:
    run, world, rank = laid({"passes": 2, **settings}, {**SMALL, **changes}, 48, 4)
    found = dry_run(run, world=world, rank=rank, load=load, watched=False)
    run = resolve_dry_run(run, world=world, rank=rank, load=load)
    flow, stage = (
        ActivationShape(4, 48, 2, statistics_itemsize=4, expert_load=load),
        found.index["pipe"],
    )
    kept = run.memory.recompute_collectives == "save"
    predicted = step_comm_volume(resolve_model_spec(run), run.plan, flow, stage=stage, kept=kept)
    assert found.comm_bytes() == predicted.bytes_by_axis()
    assert sum(row.calls for row in found.collectives) == sum(row.count for row in predicted.rows)


BIG: dict[str, Any] = {"layers": 4, "embed": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64}
BIG |= {"mlp": 2048, "vocab": 4000, "experts": 8, "experts_per_token": 2, "expert_mlp": 1024}
MEMORY: Layouts = [
    ({"expert": 4, "row": 2}, {"shared_expert_mlp": 512}, 1.5),
    ({}, {}, 1.0),
    ({"expert": 8, "data": 2, "depth": 2}, {"moe_layer_interval": 2}, 1.0),
    ({"data": 4, "row": 2}, {"shared_expert_mlp": 512}, 1.0),
    ({"data": 4, "col": 2, "expert": 2}, {"layers": 8}, 1.0),
    ({"expert": 4, "recompute": "full"}, {}, 1.0),
    ({"expert": 2, "row": 2, "recompute": "selective"}, {"shared_expert_mlp": 512}, 1.0),
    ({"expert": 4, "passes": 2}, {"moe_layer_interval": 2}, 2.0),
    ({"pipe": 2, "expert": 2, "passes": 4}, {}, 1.0),
    ({"expert": 2, "depth": 4, "row": 2, "col": 2}, {"layers": 8, "shared_expert_mlp": 512}, 1.0),
]
SLOW = [pytest.param(*one, marks=pytest.mark.full) for one in MEMORY[1:]]


@pytest.mark.parametrize(("settings", "changes", "load"), [MEMORY[0], *SLOW], ids=str)
def test_memory_is_that_of_a_rank(
    settings: dict[str, Any], changes: dict[str, Any], load: float
) -> None:
    run, world, rank = laid(settings, {**BIG, **changes}, 2048, 2)
    found = dry_run(run, world=world, rank=rank, load=load)
    run = resolve_dry_run(run, world=world, rank=rank, load=load)
    flow = ActivationShape(2, 2048, 2, statistics_itemsize=4, expert_load=load)
    predicted = peak_memory(resolve_model_spec(run), run.plan, flow, stage=found.index["pipe"])
    assert predicted.allocated_bytes == pytest.approx(found.memory.allocated_bytes, rel=0.05)
    for name in ("weights", "master", "moments"):
        assert predicted.device[name] == found.memory.device[name], name


def test_a_load_is_told_and_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry-run", "--model.size", "moe-tiny", "--world", "8", "--plan.expert", "4"]
    file = tmp_path / "dry.json"
    assert call(*words, "--expert-imbalance", "1.5", "--output", str(file)) == 0
    assert "assumed: expert imbalance 1.5" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert facts["expert_imbalance"] == 1.5
    assert call(*words, "--expert-imbalance", "5") != 0
    assert "expert_imbalance=5 is out of range for plan.expert=4" in capsys.readouterr().err


# ---- the search -------------------------------------------------------------------------

TED = "ted-6.7b-16e"


@pytest.mark.full
def test_expert_layouts_are_ranked() -> None:
    """TED's 40 B model on 128 devices: each rank has one of 16 experts, or the like."""
    machine = cluster.load_cluster("dgx-a100").with_size(nodes=16)
    settled = Plan(pipe=1, col=1, global_batch=512, recompute="none", reshard_after="micro_batch")
    fixed = frozenset({"pipe", "col", "recompute", "reshard_after"})  # less to search
    result = search_layouts(
        SearchRequest(Workload(load_shipped_spec(TED), 2048, 512), machine, settled, fixed)
    )
    used = {one.plan.expert for one in result.feasible_candidates}
    assert {1, 2, 4, 8, 16} <= used
    assert result.best.plan.expert > 1
    told = result.best.prediction
    assert told.fits_memory and told.seconds_by_part["expert"] > 0.0


def test_experts_on_several_ranks_need_less_and_say_more() -> None:
    machine, job = (
        cluster.load_cluster("dgx-a100").with_size(nodes=16),
        Workload(load_shipped_spec(TED), 2048, 512),
    )
    plans = [
        Plan(
            data=128 // (4 * n), expert=n, row=4, global_batch=512, micro_batch=2, recompute="full"
        )
        for n in (1, 4, 16)
    ]
    found = [predict_step(job, Candidate(plan), machine) for plan in plans]
    weights = [one.memory.device["weights"] for one in found]
    assert weights[0] > weights[1] > weights[2]
    assert found[0].seconds_by_part["expert"] == 0.0 < found[1].seconds_by_part["expert"]
    lots = load_shipped_spec(TED)
    experts = sum(part.count * part.num_expert_parameters for part in lots.parts)
    assert weights[0] - weights[2] == pytest.approx(2 * experts / 4 * 15 / 16, rel=1e-3)


def test_the_shared_expert_hides_what_travels() -> None:
    machine, job = (
        cluster.load_cluster("dgx-a100"),
        Workload(load_shipped_spec("deepseek-moe-16b"), 4096, 64),
    )
    plan = Plan(data=1, expert=8, global_batch=64, micro_batch=2, recompute="full")
    away = ("dx", "dw", "gather")
    hidden, plain = (
        predict_step(job, Candidate(one), machine).seconds_by_part["expert"]
        for one in (plan, replace(plan, overlap=away))
    )
    assert 0.0 < hidden < plain


def test_an_all_to_all_goes_through_the_card_of_each_rank() -> None:
    machine = cluster.load_cluster("dgx-a100").with_size(nodes=4)
    near = links.collective_seconds(machine, "all_to_all", 1e8, RankGroup(8, 8))
    far = links.collective_seconds(machine, "all_to_all", 1e8, RankGroup(8, 2))
    gathered = links.collective_seconds(machine, "all_gather", 1e8, RankGroup(8, 2))
    assert near < gathered < far
