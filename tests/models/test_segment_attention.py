"""Attention of segments of queries to segments of keys equals dense attention with a mask."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranvier.models import segment_attention
from ranvier.models.segment_attention import SegmentAttention, SegmentPair

HEAD_DIM = 4
# Queries 3 and 4 see nothing, the latter as it has more queries than keys; keys are shared.
CAUSAL: tuple[SegmentPair, ...] = (
    (0, 3, 5, 9),
    (4, 6, 10, 11),
    (6, 7, 0, 20),
    (7, 12, 4, 9),
    (12, 13, 19, 20),
    (13, 20, 0, 20),
)
FULL: tuple[SegmentPair, ...] = ((0, 3, 5, 9), (6, 7, 0, 20), (7, 12, 4, 5), (13, 20, 0, 20))


def make_inputs(heads: int, kv_heads: int, queries: int = 20, keys: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    return [
        torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64) for shape in shapes
    ]


def visible_keys(how: SegmentAttention) -> Tensor:
    seen = torch.zeros(how.num_queries, how.num_keys, dtype=torch.bool)
    for start, stop, first, end in how.pairs:
        for row in range(start, stop):
            last = max(end - (stop - 1 - row), first) if how.causal else end
            lowest = max(first, last - how.window) if how.window else first
            seen[row, lowest:last] = True
    return seen


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhk,shk->hqs", q, k) * HEAD_DIM**-0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    p = torch.where(seen, torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)), 0.0)
    return torch.einsum("hqs,shk->qhk", p, v), lse


def assert_close(have: Tensor, want: Tensor, scale: float = 0.0) -> None:
    """scale: at least this is the magnitude, as gradients may be sums of rounding errors only."""
    assert have.shape == want.shape and have.dtype == want.dtype
    assert (have - want).abs().max() <= 1e-12 * max(want.abs().max().item(), scale)


@pytest.mark.sample(12)
@pytest.mark.parametrize("limit", [1, 60, 1 << 22])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("pairs", "window"), [(CAUSAL, 0), (CAUSAL, 1), (CAUSAL, 3), (FULL, 0)])
def test_output_and_gradients_are_those_of_dense_attention(
    pairs: tuple[SegmentPair, ...],
    window: int,
    kv_heads: int,
    cap: float,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_attention, "MAX_SCORES", limit)
    how = SegmentAttention(pairs, 20, 20, causal=pairs is CAUSAL, window=window)
    q, k, v, dy = make_inputs(4, kv_heads)
    seen = visible_keys(how)
    for x in (q, k, v):
        x.requires_grad_()
    want, want_lse = dense_attention(q, k, v, seen, cap)
    grads = torch.autograd.grad(want, (q, k, v), dy)
    with torch.no_grad():
        o, lse = how.forward(q, k, v, cap)
        assert_close(o, want.detach())
        nothing = ~seen.any(1)
        assert nothing.sum() == (2 if pairs is CAUSAL else 4)
        assert (lse[:, nothing] == float("-inf")).all() and (o[nothing] == 0.0).all()
        assert_close(lse[:, ~nothing], want_lse[:, ~nothing].detach())
        for have, grad in zip(how.backward(dy, q, k, v, o, lse, cap), grads, strict=True):
            # Queries that see one key have gradients of 0.
            assert_close(have, grad, scale=1.0)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_gradients_over_parts_of_the_keys_add_up(cap: float) -> None:
    q, k, v, dy = make_inputs(4, 2)
    whole = SegmentAttention(((0, 20, 0, 20),), 20, 20)
    o, lse = whole.forward(q, k, v, cap)
    parts = [
        SegmentAttention(((0, 8, 0, 8), (8, 20, 8, 20)), 20, 20),
        SegmentAttention(((8, 20, 0, 8),), 20, 20, causal=False),
    ]
    grads = [part.backward(dy, q, k, v, o, lse, cap) for part in parts]
    for first, second, want in zip(*grads, whole.backward(dy, q, k, v, o, lse, cap), strict=True):
        assert_close(first + second, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_partial_results_are_in_fp32(dtype: torch.dtype) -> None:
    q, k, v, dy = (x.to(dtype) for x in make_inputs(4, 2))
    how = SegmentAttention(CAUSAL, 20, 20)
    o, lse = how.forward(q, k, v, 5.0)
    results = [o, lse, *how.backward(dy, q, k, v, o, lse, 5.0)]
    assert {x.dtype for x in results} == {torch.float32}
    exact = how.forward(q.double(), k.double(), v.double(), 5.0)
    assert (o - exact[0]).abs().max() < 1e-6


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize(("window", "cap"), [(0, 5.0), (90, 5.0)])
def test_no_tensor_contains_all_scores(
    window: int, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 14
    monkeypatch.setattr(segment_attention, "MAX_SCORES", limit)
    tokens = 512
    q, k, v, dy = make_inputs(4, 2, tokens, tokens)
    how = SegmentAttention(((0, tokens, 0, tokens),), tokens, tokens, window=window)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        o, lse = how.forward(q, k, v, cap)
        how.backward(dy, q, k, v, o, lse, cap)
    # A sixty-fourth of the scores of all heads.
    assert largest.numel <= limit == 4 * tokens * tokens // 64


def test_calls_of_the_kernel_copy_no_keys_of_a_zigzag_order() -> None:
    how = SegmentAttention(((0, 4, 0, 4), (4, 8, 0, 20)), 8, 20)
    calls = how._make_kernel_calls(torch.empty(0)).varlen
    assert [call.keys.rows for call in calls] == [slice(0, 4), slice(0, 20)]
    assert [call.queries.rows for call in calls] == [slice(0, 4), slice(4, 8)]
    assert [call.bounds[2:] for call in calls] == [(4, 4), (4, 20)]
    # Documents that lie one after the other are one call without copies.
    how = SegmentAttention(((0, 3, 0, 3), (3, 5, 3, 9), (5, 8, 9, 20)), 8, 20)
    (call,) = how._make_kernel_calls(torch.empty(0)).varlen
    assert call.keys.is_everything(20) and call.queries.is_everything(8)
    assert [x.tolist() for x in call.bounds[:2]] == [[0, 3, 5, 8], [0, 3, 9, 20]]


def test_keys_of_long_segments_are_a_square_and_round_parts_before_it() -> None:
    def parts(causal: bool, *pair: int) -> list[tuple[int, int, bool]]:
        dense = segment_attention._DenseSegment.from_pair(pair, causal)  # type: ignore[arg-type]
        assert dense.queries == slice(*pair[:2])
        return [(keys.start, keys.stop, causal) for keys, causal in dense.parts]

    assert parts(True, 7, 2055, 100, 2148) == [(100, 2148, True)]
    assert parts(True, 0, 2048, 100, 4196) == [(2148, 4196, True), (100, 2148, False)]
    assert parts(False, 0, 2048, 0, 1024) == [(0, 1024, False)]
    is_dense = segment_attention._is_dense
    assert is_dense((0, 2048, 5, 5 + 3072), True) and not is_dense((0, 2048, 5, 5 + 3000), True)
    assert not is_dense((0, 3072, 0, 2048), True) and is_dense((0, 3072, 0, 2048), False)


def test_rows_of_kernel_calls_are_loaded_stored_and_added() -> None:
    x = torch.randn(20, 2)
    num_calls = 0
    for call in SegmentAttention(CAUSAL, 20, 20)._make_kernel_calls(torch.empty(0)).varlen:
        num_calls += 1
        for some, bounds in ((call.queries, call.bounds[0]), (call.keys, call.bounds[1])):
            rows = torch.arange(20)[some.rows]
            assert len(rows) == bounds[-1] and len(rows.unique()) == len(rows)
            assert torch.equal(some.load(x), x[rows])
            added = torch.ones_like(x)
            some.add(added, x[rows].double())
            assert torch.equal(added, torch.ones_like(x).index_add_(0, rows, x[rows]))
            stored = torch.zeros_like(x)
            some.store(stored, x[rows].double())
            assert torch.equal(stored[rows], x[rows]) and (stored != 0).sum() == 2 * len(rows)
    # Four segments share some keys.
    assert num_calls == 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(("window", "causal"), [(23, True), (0, True), (0, False)])
def test_flex_attention_masks_and_caps_as_chunks_do(window: int, causal: bool) -> None:
    """Not compiled, and forward only: FlexAttention has no backward on a CPU."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    pairs = tuple((10 * a, 10 * b, 10 * c, 10 * d + 7) for a, b, c, d in CAUSAL)
    how = SegmentAttention(pairs, 300, 333, causal=causal, window=window)
    q, k, v, _ = (x.float() for x in make_inputs(4, 2, 300, 333))
    want, want_lse = how.forward(q, k, v, 5.0)
    attention = how.flex_attention(q.device, flex.flex_attention)
    with warnings.catch_warnings():
        # It says that it is slow without compilation.
        warnings.simplefilter("ignore")
        o, lse = attention.forward(q, k, v, 5.0)
    assert (o - want).abs().max() < 1e-5
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    blocks = attention.block_mask.to_dense()[0, 0].bool()
    seen = torch.nn.functional.pad(visible_keys(how), (0, 384 - 333, 0, 384 - 300))
    seen = seen.view(3, 128, 3, 128).transpose(1, 2)
    assert torch.equal(blocks, seen.flatten(2).any(-1))
    full = attention.block_mask.full_kv_num_blocks[0, 0]
    assert torch.equal(full, seen.flatten(2).all(-1).sum(1).int())


def test_flex_attention_has_the_gradients_of_parts_of_the_keys() -> None:
    """The formulas of its backward pass, with a kernel that autograd differentiates."""
    how = SegmentAttention(((0, 8, 0, 8), (8, 20, 2, 8)), 20, 20)
    q, k, v, dy = make_inputs(4, 2)
    o, lse = SegmentAttention(((0, 8, 0, 8), (8, 20, 0, 20)), 20, 20).forward(q, k, v, 5.0)

    def kernel(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, sums = dense_attention(q, k, v, visible_keys(how), 5.0)
        return out.transpose(0, 1)[None], sums[None]

    found = how.flex_attention(q.device, kernel).backward(dy, q, k, v, o, lse, 5.0)
    for have, want in zip(found, how.backward(dy, q, k, v, o, lse, 5.0), strict=True):
        assert (have - want).abs().max() < 1e-6 * want.abs().max()
