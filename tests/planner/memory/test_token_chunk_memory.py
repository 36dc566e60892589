"""Memory of blocks in chunks of tokens: predicted, and counted by a dry run."""

from __future__ import annotations

from typing import Any

import pytest

from ranvier.config.run import RunConfig, run_from_tables
from ranvier.cost.layers import ActivationShape
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.memory.token_chunks import attention_workspace_bytes
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.tools.dry_run import dry_run, resolve_dry_run

MODEL = {"layers": 2, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 224, "vocab": 32}


def long_run(seq: int = 2048, kv_heads: int = 2, **plan: Any) -> RunConfig:
    """A run of one long sample per rank."""
    plan = {"global_batch": plan.get("depth", 1), "recompute": "full", "token_chunk": 128} | plan
    tables = {
        "model": MODEL | {"max_seq": seq, "kv_heads": kv_heads},
        "plan": plan,
        "data": {"seq_len": seq},
        "train": {"dtype": "bf16"},
    }
    return run_from_tables(tables)


def predicted(run: RunConfig, world: int = 1) -> MemoryBreakdown:
    """The closed form."""
    run = resolve_dry_run(run, world=world, rank=0)
    flow = ActivationShape(run.plan.micro_batch, run.data.seq_len, 2, 4)
    return peak_memory(resolve_model_spec(run), run.plan, flow)


@pytest.mark.parametrize(
    ("kv_heads", "depth", "recompute", "where"),
    [
        (2, 1, "full", "last block"),
        pytest.param(4, 1, "full", "last block", marks=pytest.mark.full),
        pytest.param(2, 2, "full", "last block", marks=pytest.mark.full),
        pytest.param(2, 1, "selective", "last norm", marks=pytest.mark.full),
        pytest.param(2, 1, "none", "last norm", marks=pytest.mark.full),
    ],
)
def test_predicted_memory_of_chunks_is_what_a_dry_run_counts(
    kv_heads: int, depth: int, recompute: str, where: str
) -> None:
    run = long_run(kv_heads=kv_heads, depth=depth, recompute=recompute)
    counted = dry_run(run, world=depth, rank=0).memory
    found = predicted(run, depth)
    assert found.allocated_bytes == pytest.approx(counted.allocated_bytes, rel=0.015)
    assert where in found.where


def test_chunks_need_less_memory_and_full_recomputation_the_least() -> None:
    sizes = [
        predicted(long_run(token_chunk=chunk, recompute=kind)).allocated_bytes
        for chunk, kind in ((128, "full"), (128, "selective"), (128, "none"), (0, "full"))
    ]
    assert sizes[0] < sizes[1] < sizes[2] and sizes[0] < 0.8 * sizes[3]


def test_the_backward_kernel_needs_more_for_grouped_heads() -> None:
    assert attention_workspace_bytes(64, 64, 2) == 64 * 4
    assert attention_workspace_bytes(64, 16, 2) == 64 * 4 + 2 * 64 * 2
    assert attention_workspace_bytes(64, 16, 4) == 0, "there is no kernel"
