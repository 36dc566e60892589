"""Context with what else a run may have: each combination equals one process in float64.

These are the combinations that other frameworks refuse or get wrong. Random masks of dropout and
routers are in `test_context_grids`, attention alone in `nn/test_context_attention`. Negative
controls at the end break one thing on purpose, and the comparison must tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from equivalence import Case, Serial, batch_of, compare, run_case
from pool import Pool
from ranvier.buckets import spec
from ranvier.cost.layers import AxisGroup
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_documents import ContextDocuments
from ranvier.sharding import Sharding, TokenOrder, order_tokens

LR, CLIP, ONE_PASS = 1e-2, 0.5, 1e-12


def batch_with(lengths: list[tuple[int, ...]]) -> Batch:
    """A batch whose samples have documents of these lengths."""
    batch = batch_of("llama", samples=len(lengths), packed=False, seq=sum(lengths[0]))
    ids = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in some]) for some in lengths])
    return replace(batch, documents=ids, positions=positions)


def differences(
    pool: Pool, degrees: dict[str, int], case: Case, batch: Batch | None = None
) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    batch = batch or batch_of(case.model, samples=8, packed=True)
    whole = Serial(case.model, batch, LR, CLIP, case.steps)
    return compare(whole, pool.on_grid(degrees, run_case, case, batch, LR, CLIP))


def test_a_sliding_window_with_context(pool: Pool) -> None:
    """Layers with a window stay windowed (Accelerate made them full, TRL refuses them)."""
    case = Case("windows", token_order="zigzag", recompute="full")
    assert differences(pool, {"context": 2}, case) == []


def test_packed_documents_of_odd_lengths_with_context(pool: Pool) -> None:
    """No document is padded and none loses a token (Transformer Engine needs multiples of 2 C)."""
    batch = batch_with([(1, 2, 5), (7, 1), (3, 5), (1,) * 8])
    assert differences(pool, {"context": 4}, Case("llama"), batch) == []


def test_more_ranks_than_kv_heads_with_context(pool: Pool) -> None:
    """row·C = 4 ranks share one kv head (Ulysses elsewhere is bounded by their number)."""
    case = Case("one kv head", context_attention="ulysses")
    assert differences(pool, {"context": 2, "row": 2}, case) == []


@pytest.mark.parametrize(
    "degrees",
    [{"context": 2}, pytest.param({"expert": 2, "context": 2}, marks=pytest.mark.full)],
    ids=["context", "expert and context"],
)
def test_balance_losses_and_capacity_of_experts_with_context(
    pool: Pool, degrees: dict[str, int]
) -> None:
    """Statistics are those of whole sequences; there is no factor of the size of context."""
    assert differences(pool, degrees, Case("moe 2 of 8 capacity")) == []


def test_the_loss_is_a_mean_over_targets_with_context(pool: Pool) -> None:
    """Ranks and micro-batches have unequal numbers of targets, one none at all."""
    batch = batch_of("llama", samples=8, packed=False)
    batch.targets[:, :4] = -100
    batch.targets[:5, :7] = -100
    case = Case("llama", token_order="contiguous", micro_batches=2)
    assert differences(pool, {"context": 2, "data": 2}, case, batch) == []


def test_longrope_with_context(pool: Pool) -> None:
    """Frequencies depend on the length of a document, not on the tokens of a rank."""
    batch = batch_with([(3, 5), (4, 4), (8,), (1, 7)])
    assert differences(pool, {"context": 2}, Case("longrope", steps=1), batch) == []


@pytest.mark.full
@pytest.mark.parametrize("policy", ["message_driven", "zero-bubble"])
def test_tied_weights_of_a_pipeline_with_context(pool: Pool, policy: str) -> None:
    case = Case("deep tied", micro_batches=2, policy=policy)
    assert differences(pool, {"pipe": 2, "context": 2}, case) == []


@pytest.mark.parametrize("model", ["lora", pytest.param("dora", marks=pytest.mark.full)])
def test_adapters_with_context(pool: Pool, model: str) -> None:
    degrees = {"context": 2} if model == "lora" else {"context": 2, "row": 2}
    assert differences(pool, degrees, Case(model, recompute="full")) == []


def run_offloaded(grid: Grid, case: Case, batch: Batch) -> dict[str, Any]:
    """As `run_case`, with weights on the host."""
    build = Case.on
    with mock.patch.object(Case, "on", lambda self, grid: build(self, grid, room=2**30)):
        return run_case(grid, case, batch, LR, CLIP)


@pytest.mark.full
def test_offloaded_weights_with_context(pool: Pool) -> None:
    batch = batch_of("four", samples=8, packed=True)
    whole = Serial("four", batch, LR, CLIP)
    results = pool.on_grid({"context": 2, "depth": 2}, run_offloaded, Case("four"), batch)
    assert compare(whole, results) == []


# ---- negative controls: what the comparison must catch, broken on purpose ------------------------

FROM_ORDERS = ContextDocuments.from_orders.__func__  # type: ignore[attr-defined]
BACKWARD = SegmentAttention.backward
REPLICA_AXIS = spec.replica_axis


def _forget_documents(cls: Any, orders: list[TokenOrder], index: int) -> ContextDocuments:
    """The same tokens on each rank, as parts of one document per sample."""
    ranks = orders[0].num_ranks
    whole = [order_tokens((sum(one.lengths),), ranks, "contiguous") for one in orders]
    found: ContextDocuments = FROM_ORDERS(cls, whole, index)
    return found


def _local_positions(self: Batch, orders: Any, index: int) -> Batch:
    """Each rank counts its own tokens from 0."""
    batch = SHARD(self, orders, index)
    assert batch.positions is not None
    return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))


SHARD = Batch.shard_by_orders


def _backward_of_block(
    self: Any, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cap: float
) -> Any:
    """The gradient with the log-sum-exp of these keys only."""
    return BACKWARD(self, dy, q, k, v, o, self.forward(q, k, v, cap)[1], cap)


def _without_context(sharding: Sharding, degrees: Mapping[str, int]) -> AxisGroup:
    """The axis of gradient sums without context."""
    return REPLICA_AXIS(sharding, {**degrees, "context": 1})


BREAKS: dict[str, Callable[[], Any]] = {
    "documents are forgotten": lambda: mock.patch.object(
        ContextDocuments, "from_orders", classmethod(_forget_documents)
    ),
    "places are local to a rank": lambda: mock.patch.object(
        Batch, "shard_by_orders", _local_positions
    ),
    "log-sum-exp of a block in backward": lambda: mock.patch.object(
        SegmentAttention, "backward", _backward_of_block
    ),
    "context is missing in a sum of gradients": lambda: mock.patch.object(
        spec, "replica_axis", _without_context
    ),
}


def run_broken(grid: Grid, name: str, case: Case, batch: Batch) -> dict[str, Any]:
    """As `run_case`, with one thing broken."""
    with BREAKS[name]():
        return run_case(grid, case, batch, LR, CLIP)


@pytest.mark.parametrize("name", BREAKS)
def test_a_mistake_is_told(pool: Pool, name: str) -> None:
    method = "ring" if name.startswith("log") else "kv_gather"
    case = Case("llama", token_order="contiguous", context_attention=method, steps=1)
    batch = batch_of("llama", samples=4, packed=not name.startswith("log"))
    whole = Serial("llama", batch, LR, CLIP, steps=1)
    lines = compare(whole, pool.on_grid({"context": 2}, run_broken, name, case, batch))
    assert any("gradient of" in line for line in lines), lines
    is_loss = any("losses" in line for line in lines)
    assert is_loss == (name in ("documents are forgotten", "places are local to a rank"))
