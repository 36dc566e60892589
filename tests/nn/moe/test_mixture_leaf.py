"""Experts that no axis splits: one operation gives what the reference in pairs gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import compile_with
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.nn.moe import layer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

SMALL = DecoderConfig(
    layers=1,
    embed=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    mlp=24,
    vocab=29,
    max_seq=8,
    experts=4,
    experts_per_token=2,
    expert_mlp=8,
    shared_expert_mlp=8,
    aux_loss_coeff=0.01,
    z_loss_coeff=0.001,
)
Found = dict[str, Tensor]


def learned(
    grid: Grid,
    capacity: float,
    gain: float = 1.0,
    *,
    fast: bool = True,
    compiled: str = "",
    recompute: Any = "none",
) -> Found:
    """Loss and gradients of a step, in float64."""
    config = DecoderConfig(
        **{**vars(SMALL), "capacity_factor": capacity, "router_logit_scale": gain}
    )
    with torch.device("meta"):
        model = Decoder(config)
    plan = Plan(recompute=recompute, compile="on" if compiled else "off")
    model = parallelize(
        model, grid, plan.with_degrees(grid.degrees), dtype=torch.float64, device="cpu"
    )
    compile_with(model, compiled)
    ids = torch.randint(0, 29, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    parallel = get_parallel_model(model)
    parallel.step_context.overlapped_autograd = fast
    found = {"loss": forward_backward(model, [batch])}
    for bucket, pieces in parallel.bucket_scheduler.finish_gradients():
        found |= {weight.name: grad for weight, grad in bucket.split_by_weight(pieces)}
    return found


@functools.cache
def reference(capacity: float) -> Found:
    return learned(Grid({}), capacity, fast=False)


def same(found: Found, capacity: float) -> None:
    for name, value in reference(capacity).items():
        assert torch.allclose(found[name].flatten(), value.flatten(), atol=1e-12, rtol=1e-10), name


@pytest.mark.compiled
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("default")  # compilers give some
@pytest.mark.parametrize(
    ("capacity", "recompute", "compiled"),
    [
        (0.0, "none", ""),
        (0.7, "selective", ""),
        (0.7, "full", ""),
        (0.7, "none", "aot_eager"),
        pytest.param(0.7, "selective", "aot_eager", marks=pytest.mark.full),
        pytest.param(0.0, "full", "aot_eager", marks=pytest.mark.full),
    ],
)
def test_one_operation_is_the_reference(
    capacity: float, recompute: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(layer, "sharded_local_moe", _noted(layer.sharded_local_moe, calls))
    same(learned(Grid({}), capacity, recompute=recompute, compiled=compiled), capacity)
    assert bool(calls) is not bool(compiled)


def _noted(plain: Any, calls: list[int]) -> Any:
    def call(*arguments: Any) -> Any:
        calls.append(1)
        return plain(*arguments)

    return call


def test_a_slow_router_begins_with_the_same_routes() -> None:
    usual, slow = learned(Grid({}), 0.0), learned(Grid({}), 0.0, gain=0.25)
    for name, value in usual.items():
        factor = 0.25 if name.endswith("router.weight") else 1.0
        assert torch.allclose(slow[name], factor * value, atol=1e-12, rtol=1e-10), name
    assert usual["blocks.0.mlp.router.weight"].abs().max() > 1e-6
