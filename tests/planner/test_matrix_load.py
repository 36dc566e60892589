"""Optimizers of whole matrices in the planner: balance of owners, bytes, memory, time, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ranvier.buckets.matrix_owners import MatrixOwners
from ranvier.config.plan import AXES, Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import OptimConfig, TrainConfig
from ranvier.cost.matrix_optimizers import JorgeCost, MatrixRuleCost, MuonCost
from ranvier.cost.optimizer import ADAMW, MomentPrecision, OptimizerName, OptimizerSpec
from ranvier.errors import PlanError
from ranvier.optim.rules import Jorge, Muon
from ranvier.planner import explain, model_spec
from ranvier.planner.cluster import load_cluster
from ranvier.planner.comm_volume import (
    ShardingKey,
    build_all_stages,
    count_matrix_elements,
    matrix_events,
    stage_matrix_owners,
)
from ranvier.planner.matrix_load import check_hidden_matrices, stage_matrix_load
from ranvier.planner.memory.model_states import model_state_sizes
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.model_spec import ModelSpec
from ranvier.planner.predict import Candidate, Workload, predict_step
from ranvier.planner.request import build_workload
from ranvier.planner.search import SearchRequest, search_layouts
from ranvier.tools.dry_run import resolve_dry_run
from ranvier.train import resolve
from ranvier.train.memory.resolve import build_rule
from ranvier.train.resume.run_directory import saved_state_bytes

MUON = OptimizerSpec("muon", matrix_rule=MuonCost(2))
LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("llama3-8b", {"data": 8}),
    ("llama3-8b", {"depth": 4, "row": 2}),
    ("llama3-8b", {"data": 8, "row": 8}),
    ("llama3-8b", {"data": 2, "row": 16, "col": 2}),
    ("llama3-8b", {"context": 2, "depth": 8, "row": 4}),
    ("llama3-405b", {"data": 4, "depth": 8, "row": 8}),
]
SMALL: dict[str, Any] = {
    "embed": 64,
    "mlp": 160,
    "heads": 4,
    "kv_heads": 2,
    "layers": 3,
    "vocab": 128,
    "head_dim": 16,
    "gated": True,
}


def make_plan(degrees: dict[str, int]) -> Plan:
    return Plan(**{"data": 1, "global_batch": 4096, "micro_batch": 32, **degrees})


def owners_of(model: ModelSpec, plan: Plan, rule: MatrixRuleCost) -> MatrixOwners:
    (stage,) = build_all_stages(model, plan, 4096)
    return stage_matrix_owners(model, stage, ShardingKey.from_plan(plan), rule)


@pytest.mark.parametrize(("size", "degrees"), LAYOUTS, ids=str)
def test_bytes_and_flops_of_muon_are_balanced(size: str, degrees: dict[str, int]) -> None:
    """In each all-to-all: senders of shards 1.05 and owners 1.15 times an equal share."""
    owners = owners_of(model_spec.load_shipped_spec(size), make_plan(degrees), MuonCost(2))
    ranks = range(owners.num_ranks)
    share = sum(matrix.num_elements for matrix in owners.matrices) / len(ranks)
    sent = [owners.sent_elements(rank) for rank in ranks]
    received = [owners.received_elements(rank) for rank in ranks]
    assert max(shards for shards, _ in sent) <= 1.05 * share
    assert max(as_owner for as_owner, _ in received) <= 1.15 * share
    assert max(as_owner for _, as_owner in sent) <= 1.15 * share
    assert max(shards for _, shards in received) <= 1.05 * share
    assert max(owners.loads) <= 1.15 * sum(owners.loads) / len(ranks)
    assert owners.num_idle == 0


def test_round_robin_would_not_be_balanced() -> None:
    owners = owners_of(
        model_spec.load_shipped_spec("llama3-8b"), make_plan({"data": 64}), MuonCost(2)
    )
    loads = [0.0] * 64
    for number, one in enumerate(owners.matrices):
        loads[number % 64] += MuonCost(2).flops(one.rows, one.cols)
    assert max(loads) > 1.15 * sum(loads) / 64


@pytest.mark.parametrize(
    "rule", [MuonCost(2), JorgeCost(4, 32), JorgeCost(4, 256)], ids=["muon", "tiles", "large tiles"]
)
@pytest.mark.parametrize(
    "degrees", [{"data": 3}, {"row": 2, "depth": 3}, {"data": 20}, {"data": 64}], ids=str
)
def test_the_load_is_that_of_the_owners(rule: MatrixRuleCost, degrees: dict[str, int]) -> None:
    model = model_spec.dense_decoder(**SMALL)
    plan = make_plan(degrees)
    owners = owners_of(model, plan, rule)
    (stage,) = build_all_stages(model, plan, 64)
    load = stage_matrix_load(model, stage, plan.world_size, rule)
    sizes = [0] * owners.num_ranks
    states = [0] * owners.num_ranks
    for owner, one in zip(owners.owners, owners.matrices, strict=True):
        sizes[owner] += one.num_elements
        states[owner] += rule.owner_state_elements(one.rows, one.cols)
    assert load.max_flops == pytest.approx(max(owners.loads))
    assert load.mean_flops == pytest.approx(sum(owners.loads) / owners.num_ranks)
    assert (load.max_elements, load.max_owner_states) == (max(sizes), max(states))
    assert load.num_elements == sum(sizes) == count_matrix_elements(model, stage)
    assert load.num_idle == owners.num_idle


def test_the_closed_form_of_the_exchange_is_the_mean_of_all_ranks() -> None:
    model = model_spec.load_shipped_spec("llama3-8b")
    plan = make_plan({"data": 4, "row": 4})
    (stage,) = build_all_stages(model, plan, 4096)
    spot = ShardingKey.from_plan(plan)
    every = [matrix_events(model, stage, spot, MuonCost(2), rank) for rank in range(16)]
    mean = matrix_events(model, stage, spot, MuonCost(2))
    for i, one in enumerate(mean):
        assert {events[i].op for events in every} == {one.op == "all_to_all" and one.op}
        assert sum(events[i].bytes for events in every) / 16 == pytest.approx(one.bytes, rel=0.01)


@pytest.mark.parametrize("moments", ["master", "bf16"])
def test_states_of_hidden_matrices_by_rule(moments: MomentPrecision) -> None:
    """Muon: 4 bytes a parameter less than AdamW with fp32 moments; Jorge: two sides a tile more."""
    model = model_spec.load_shipped_spec("llama3-1b")
    plan = make_plan({"data": 8})
    (stage,) = build_all_stages(model, plan, 4096)
    width = {"master": 4, "bf16": 2}[moments]

    def states(name: OptimizerName, rule: MatrixRuleCost | None = None) -> int:
        spec = OptimizerSpec(name, moments, rule)
        return model_state_sizes(model, stage, ShardingKey.from_plan(plan), 2, spec).state_bytes

    hidden = count_matrix_elements(model, stage) // 8
    assert states("adamw") - states("muon", MuonCost(2)) == width * hidden
    # Square tiles: r² + c² = 2 elements of a side for each element of a tile.
    more = states("jorge", JorgeCost(4, 512)) - states("adamw")
    assert more == pytest.approx(2 * 4 * hidden, rel=0.02)
    assert states("adamw") > states("muon", MuonCost(2)) > states("sgd")


def test_states_of_owners_stay_on_the_device() -> None:
    plan = Plan(data=1, global_batch=8, micro_batch=8)
    model = model_spec.dense_decoder(**SMALL)
    both = [
        RankMemory(model, plan, seq=64, itemsize=2, optimizer=one).sizes
        for one in (ADAMW, OptimizerSpec("jorge", matrix_rule=JorgeCost(4, 32)))
    ]
    more = both[1].resident_states - both[0].resident_states
    assert more == both[1].state_bytes - both[0].state_bytes > 0


def test_the_update_of_whole_matrices_takes_time_and_memory() -> None:
    model = model_spec.load_shipped_spec("llama3-8b")
    machine = load_cluster("dgx-h100").with_size(nodes=8)
    plan = Plan(data=8, row=8, global_batch=64, micro_batch=8, recompute="full")
    adamw, muon = (
        predict_step(Workload(model, 4096, 64, optimizer=one), Candidate(plan), machine)
        for one in (ADAMW, MUON)
    )
    gained = adamw.memory.device["moments"] - muon.memory.device["moments"]
    assert gained == pytest.approx(4 * 6.98e9 / 64, rel=0.01)
    # 2 % of the FLOPs of a step of so few tokens; the exchange crosses nodes.
    more = muon.seconds_by_part["update"] - adamw.seconds_by_part["update"]
    assert 0 < more < 0.5 * adamw.step_seconds
    for name, spent in adamw.seconds_by_part.items():
        if name not in ("update", "other"):
            assert muon.seconds_by_part[name] == spent, name


def test_a_plan_names_idle_ranks_and_what_they_cost() -> None:
    model = model_spec.dense_decoder(**SMALL)
    machine = load_cluster("dgx-h100").with_size(nodes=4)
    fixed = frozenset({*AXES, "micro_batch", "recompute", "schedule", "rank_order"})
    plan = Plan(data=32, global_batch=32, micro_batch=1)
    for optimizer in (MUON, ADAMW):
        job = Workload(model, 64, 32, optimizer=optimizer)
        found = search_layouts(SearchRequest(job, machine, plan=plan, fixed_fields=fixed))
        text = " ".join(explain.explain_choice(found))
        # 3 layers of 7 matrices.
        said = "11 of 32 ranks of a stage are idle in the update of 21 whole matrices (muon)"
        assert (said in text) == (optimizer is MUON)


@pytest.mark.parametrize("name", ["adamw", "muon", "jorge", "sgd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_the_spec_is_that_of_the_rule(name: OptimizerName, dtype: Any) -> None:
    """The planner, which has no torch, and the optimizer derive the same from the settings."""
    kinds = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
    for device in ("cpu", "cuda"):
        for muon_dtype in ("auto", "bf16", "fp32", "master"):
            optim = OptimConfig(name=name, muon_dtype=muon_dtype, max_preconditioner_dim=64)
            run = RunConfig(optim=optim, train=TrainConfig(dtype=dtype, device=device))  # type: ignore[arg-type]
            rule = build_rule(run)
            spec = OptimizerSpec.from_run(run)
            if isinstance(rule, Muon | Jorge):
                message = rule.message_dtype(kinds[dtype], torch.device(device))
                assert spec.matrix_rule == rule.cost(message)
            else:
                assert spec.matrix_rule is None
            if rule is not None:
                assert spec.num_moments(is_hidden_matrix=True) == len(rule.state_kinds)


@pytest.mark.parametrize("name", ["muon", "jorge"])
def test_a_model_without_hidden_matrices_is_refused(name: OptimizerName) -> None:
    model = model_spec.load_shipped_spec("tiny")
    bare = replace(model, parts=(model.parts[0], model.parts[-1]))
    run = RunConfig(optim=OptimConfig(name=name))
    says = rf"optim.name='{name}' .* no trainable hidden matrix. .* Use optim.name='adamw'."
    with mock.patch.object(resolve, "resolve_model_spec", return_value=bare):
        with pytest.raises(PlanError, match=says):
            resolve_dry_run(run, world=1, rank=0)
        resolve_dry_run(RunConfig(), world=1, rank=0)
    with (
        mock.patch("ranvier.planner.request.resolve_model_spec", return_value=bare),
        pytest.raises(PlanError, match=says),
    ):
        build_workload(run, load_cluster("dgx-h100"))
    check_hidden_matrices(model, MUON)
    check_hidden_matrices(bare, ADAMW)


@pytest.mark.parametrize(
    ("name", "bytes_per_element"), [("adamw", 8), ("sgd", 4), ("muon", 4), ("jorge", 16)]
)
def test_states_in_a_checkpoint(name: OptimizerName, bytes_per_element: int) -> None:
    """Estimated for all weights as for hidden matrices; 8-bit moments are saved in fp32."""
    run = RunConfig(optim=OptimConfig(name=name))
    assert saved_state_bytes(run, 4) == bytes_per_element
    assert saved_state_bytes(RunConfig(optim=OptimConfig(state_dtype="int8")), 4) == 8
