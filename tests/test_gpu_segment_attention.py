"""The CUDA kernels of segments of queries and keys are the chunked attention in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ranvier.models.segment_attention import SegmentAttention, SegmentPair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler imports modules that use deprecated functions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOKENS = 700
CASES: dict[str, tuple[tuple[SegmentPair, ...], bool]] = {
    # Queries 300 to 304 are in no segment, and 310 to 399 come before the first of their keys.
    "segments": (
        ((0, 300, 200, 700), (305, 500, 0, 100), (500, 501, 0, 700), (501, 700, 33, 700)),
        True,
    ),
    "zigzag": (((0, 350, 0, 350), (350, 700, 0, 700)), True),
    "one query each": (tuple((i, i + 1, 5 * i, 7 * i + 1) for i in range(100)), True),
    "whole blocks": (((0, 300, 0, 400), (400, 700, 300, 700)), False),
}


def make_inputs(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(TOKENS, some, head_dim).cuda().to(dtype)
        for some in (heads, kv_heads, kv_heads, heads)
    ]


def relative_error(have: Tensor, want: Tensor) -> float:
    return ((have.double() - want).abs().max() / want.abs().max().clamp(min=1.0)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 8, 64), (8, 2, 128), (8, 1, 64)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 65, 4000])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_kernels_are_chunked_attention(
    case: str, window: int, shape: tuple[int, int, int], cap: float, dtype: torch.dtype
) -> None:
    pairs, causal = CASES[case]
    if window and not causal:
        pytest.skip("a window needs causal attention")
    if cap and (window in (1, 4000) or dtype == torch.float16 or shape[1] == 8):
        pytest.skip("each compilation takes seconds")
    how = SegmentAttention(pairs, TOKENS, TOKENS, causal=causal, window=window)
    q, k, v, dy = make_inputs(*shape, dtype)
    exact = [x.double() for x in (q, k, v)]
    want, want_lse = how.forward(*exact, cap)  # type: ignore[arg-type]
    o, lse = how.forward(q, k, v, cap)
    seen = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), seen)
    assert (o[~seen.all(0)] == 0).all()
    assert relative_error(o, want) < 1e-2
    assert (lse.double() - want_lse)[seen].abs().max() < 1e-2
    grads = how.backward(dy, q, k, v, o, lse, cap)
    expected = how.backward(dy.double(), *exact, want, want_lse, cap)  # type: ignore[arg-type]
    for name, have, grad in zip("qkv", grads, expected, strict=True):
        assert have.dtype == torch.float32
        assert relative_error(have, grad) < 2e-2, name


@pytest.mark.parametrize("shape", [(4, 4, 64), (4, 1, 128)], ids=str)
@pytest.mark.parametrize(
    ("pairs", "causal"),
    [
        (((0, 2048, 0, 2048), (2048, 4096, 0, 6144), (4096, 4200, 100, 300)), True),
        (((0, 2048, 1000, 3048), (2048, 4096, 0, 5120)), False),
    ],
)
def test_long_segments_are_computed_by_cudnn(
    pairs: tuple[SegmentPair, ...],
    causal: bool,
    shape: tuple[int, int, int],
) -> None:
    queries, keys = 4200, 6144
    how = SegmentAttention(pairs, queries, keys, causal=causal)
    torch.manual_seed(0)
    heads, kv_heads, head_dim = shape
    q, k, v, dy = (
        torch.randn(rows, some, head_dim).cuda().bfloat16()
        for rows, some in ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    )
    calls = how._make_kernel_calls(q)
    assert len(calls.dense) == 2 and len(calls.varlen) == causal
    assert [len(one.parts) for one in calls.dense] == [1 + causal * i for i in range(2)]
    # The kernel reads keys and values that are parts of one tensor, as other ranks send them.
    both = torch.stack([k, v], 1)
    exact = [x.double() for x in (q, k, v)]
    want, want_lse = how.forward(*exact)  # type: ignore[arg-type]
    o, lse = how.forward(q, both[:, 0], both[:, 1])
    seen = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), seen)
    assert relative_error(o, want) < 1e-2
    assert (lse.double() - want_lse)[seen].abs().max() < 1e-2
    grads = how.backward(dy, q, both[:, 0], both[:, 1], o, lse)
    expected = how.backward(dy.double(), *exact, want, want_lse)  # type: ignore[arg-type]
    for name, have, grad in zip("qkv", grads, expected, strict=True):
        assert relative_error(have, grad) < 2e-2, name


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_gradients_of_parts_with_the_whole_log_sum_exp_add_up(cap: float) -> None:
    """As in a ring, whose blocks of keys are computed one after the other."""
    q, k, v, dy = make_inputs(8, 2, 64, torch.bfloat16)
    half = TOKENS // 2
    whole = SegmentAttention(((0, TOKENS, 0, TOKENS),), TOKENS, TOKENS)
    o, lse = whole.forward(*(x.double() for x in (q, k, v)), cap)
    want = whole.backward(dy.double(), *(x.double() for x in (q, k, v)), o, lse, cap)
    parts = [
        SegmentAttention(((0, half, 0, half), (half, TOKENS, half, TOKENS)), TOKENS, TOKENS),
        SegmentAttention(((half, TOKENS, 0, half),), TOKENS, TOKENS, causal=False),
    ]
    some = [part.backward(dy, q, k, v, o.bfloat16(), lse.float(), cap) for part in parts]
    for first, second, grad in zip(*some, want, strict=True):
        assert relative_error(first + second, grad) < 2e-2


def test_flex_attention_is_compiled_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    for queries, keys in itertools.product((256, 300, 511), (512, 700)):
        q, k, v, _ = make_inputs(4, 2, 64, torch.bfloat16)
        how = SegmentAttention(((0, queries, 0, keys),), queries, keys)
        how.forward(q[:queries], k[:keys], v[:keys], 5.0)
    # torch has kernels of its own for lengths that are multiples of blocks.
    assert counters["stats"]["unique_graphs"] <= 3
