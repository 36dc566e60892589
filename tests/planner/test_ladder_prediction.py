"""The planner knows ladder residuals: messages, recomputation, memory and hidden reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig, run_from_tables
from ranvier.cost.layers import ActivationShape
from ranvier.planner.cluster import load_cluster
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import ModelSpec, resolve_model_spec
from ranvier.planner.predict import Candidate, Workload, predict_step
from ranvier.tools.dry_run import dry_run, resolve_dry_run
from tools.test_dry_run import check_bytes

MODEL = {"layers": 8, "embed": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "mlp": 96} | {
    "vocab": 64,
    "max_seq": 128,
    "residual": "ladder",
}


def ladder_run(plan: dict[str, Any], **model: Any) -> RunConfig:
    tables = {
        "model": MODEL | model,
        "plan": {"global_batch": 8, "micro_batch": 2, **plan},
        "data": {"seq_len": 128},
        "train": {"dtype": "bf16"},
    }
    return run_from_tables(tables)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "model", "rank"),
    [
        ({"row": 2, "col": 2, "recompute": "full"}, {}, 3),
        ({"pipe": 2, "row": 2, "recompute": "selective"}, {"ladder_layers": (4, 5, 6, 7)}, 2),
        ({"pipe": 4, "row": 2}, {"norm_position": "both"}, 5),
        ({"pipe": 2, "row": 2, "virtual_stages": 2, "vocab_over_pipe": True}, {}, 0),
        # The boundary between the stages is before a serial layer: one tensor per message.
        ({"pipe": 2, "stage_starts": (5,)}, {"ladder_layers": (1, 2)}, 0),
    ],
)
def test_counted_bytes_are_the_predicted_ones(
    plan: dict[str, Any], model: dict[str, Any], rank: int
) -> None:
    run = ladder_run(plan, **model)
    world = plan.get("pipe", 1) * plan.get("row", 1) * plan.get("col", 1)
    check_bytes(run, world, rank)


@pytest.mark.parametrize(
    "recompute",
    [*(pytest.param(mode, marks=pytest.mark.full) for mode in ("none", "selective")), "full"],
)
def test_predicted_memory_is_what_a_dry_run_counts(recompute: str) -> None:
    shape = {"layers": 4, "embed": 128, "head_dim": 16, "mlp": 352}
    run = ladder_run({"row": 2, "recompute": recompute}, **shape)
    counted = dry_run(run, world=2, rank=0).memory.allocated_bytes
    found = resolve_dry_run(run, world=2, rank=0)
    flow = ActivationShape(found.plan.micro_batch, 128, 2, 4)
    predicted = peak_memory(resolve_model_spec(found), found.plan, flow).allocated_bytes
    assert predicted == pytest.approx(counted, rel=0.03)


def spec(**model: Any) -> ModelSpec:
    return resolve_model_spec(ladder_run({}, **model))


def test_blocks_of_a_spec_know_their_inputs() -> None:
    made = spec(ladder_layers=(2, 3, 7))
    parts = [part for part in made.parts_in_order if part.is_block]
    assert [part.num_inputs for part in parts] == [1, 1, 2, 2, 1, 1, 1, 2]
    pending = [[leaf.name for leaf in part.layers if leaf.defers_reduction] for part in parts]
    both, one = ["attention.o", "mlp.down"], ["mlp.down"]
    assert pending == [[], one, both, both, [], [], one, both]
    again = ModelSpec.from_dict(made.to_dict())
    assert [part.num_inputs for part in again.parts_in_order[1:-1]] == [1, 1, 2, 2, 1, 1, 1, 2]


def test_reductions_of_a_ladder_are_hidden() -> None:
    cluster = load_cluster("dgx-h100").with_size(nodes=1)
    sizes = {"layers": 16, "embed": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128} | {
        "mlp": 14336,
        "max_seq": 4096,
    }
    plan = Plan(data=1, row=8, global_batch=8, micro_batch=1, compile="off")
    off = replace(plan, overlap=tuple(one for one in plan.overlap if one != "residual"))

    def seconds(residual: str, chosen: Plan) -> float:
        model = spec(residual=residual, **sizes)
        return predict_step(Workload(model, 4096, 8), Candidate(chosen), cluster).step_seconds

    assert seconds("ladder", plan) < 0.97 * seconds("serial", plan)
    assert seconds("ladder", off) == pytest.approx(seconds("serial", plan), rel=1e-9)
