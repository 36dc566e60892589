"""Triton kernels of the sampler, for CUDA only. They are imported where they are used.

Each has a reference version in PyTorch in `infer/sampler.py`; tests compare both. A row is cut into
blocks of `BLOCK` columns wherever it is, so that the sum of a row does not depend on the batch.

The keyed maximum takes two passes, because float64 is slow on most GPUs: the first finds the
maximum of each block in fp32, the second computes in float64 the few blocks that are within the
error of the first from the maximum of their row. The result is that of float64.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCK = 2048
"""Number of columns of a block."""
SEARCH_BLOCK = 4096
"""Number of columns that a row's search for its threshold looks at together."""


@triton.jit
def _scramble(x):  # type: ignore[no-untyped-def]
    """Computes `counter_rng.scramble_bits` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sort_key(x, token):  # type: ignore[no-untyped-def]
    """Computes `sampler.sort_keys` of fp32 logits and int64 tokens."""
    x = tl.where(x != x, float("inf"), x + 0.0)
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token)


@triton.jit  # type: ignore[untyped-decorator]
def _load_kept(  # type: ignore[no-untyped-def]
    logits, stride, row, column, valid, first, thresholds, maxima, temperatures, log_min_p,
    HAS_FILTER: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """Loads logits as fp32; -inf for those that filters drop."""
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < valid, other=0.0)
    x = x.to(tl.float32)
    keep = column < valid
    if HAS_FILTER:
        token = (first + column).to(tl.int64)
        keep = keep & (_sort_key(x, token) >= tl.load(thresholds + row))
    if HAS_MIN_P:
        distance = (x.to(tl.float64) - tl.load(maxima + row)) / tl.load(temperatures + row)
        # Not a number stays, so that its row fails.
        keep = keep & ((distance >= tl.load(log_min_p + row)) | (x != x))
    # A row with a logit that is not a number fails as one with an infinite logit.
    x = tl.where(x != x, float("inf"), x)
    return tl.where(keep, x, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _approximate_maxima_kernel(  # type: ignore[no-untyped-def]
    logits, stride, valid, first, keys, is_drawn, thresholds, maxima, temperatures, log_min_p,
    block_maxima, HAS_FILTER: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the largest keyed value of a block of a row, in fp32."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = _load_kept(
        logits, stride, row, column, valid, first, thresholds, maxima, temperatures, log_min_p,
        HAS_FILTER, HAS_MIN_P,
    )  # fmt: skip
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    bits = _scramble(key ^ (first + column).to(tl.uint64)) >> 12
    uniform = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    # Near 1, which gives the largest values, fp32 has too few digits: a series of -log(1 - rest).
    rest = ((0xFFFFFFFFFFFFF - bits).to(tl.float32) + 0.5) * 2.220446049250313e-16
    series = rest * (1.0 + rest * (0.5 + rest * 0.3333333333333333))
    exponential = tl.where(rest < 0.01, series, -tl.log(uniform))
    noise = tl.where(tl.load(is_drawn + row) != 0, -tl.log(exponential), 0.0)
    scale = tl.maximum(tl.load(temperatures + row).to(tl.float32), 1e-30)
    value = tl.max(x / scale + noise, 0)
    tl.store(block_maxima + row * tl.num_programs(1) + block, value)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_maxima_kernel(  # type: ignore[no-untyped-def]
    logits, stride, valid, first, keys, is_drawn, thresholds, maxima, temperatures, log_min_p,
    block_maxima, row_maxima, values, tokens,
    HAS_FILTER: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the largest keyed value of a block and its token, if it can be that of the row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    place = row * tl.num_programs(1) + block
    most = tl.load(row_maxima + row)
    # Far more than the errors of fp32. Infinite maxima are not comparable, and are computed.
    is_less = tl.load(block_maxima + place) < most - (0.01 + tl.abs(most) * 1e-5)
    if not is_less:
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = _load_kept(
            logits, stride, row, column, valid, first, thresholds, maxima, temperatures, log_min_p,
            HAS_FILTER, HAS_MIN_P,
        )  # fmt: skip
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        token = (first + column).to(tl.int64)
        bits = _scramble(key ^ token.to(tl.uint64, bitcast=True)) >> 12
        uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
        noise = tl.where(tl.load(is_drawn + row) != 0, -tl.log(-tl.log(uniform)), 0.0)
        value = x.to(tl.float64) / tl.load(temperatures + row) + noise
        best = tl.max(value, 0)
        tl.store(values + place, best)
        tl.store(tokens + place, tl.min(tl.where(value == best, token, 0x7FFFFFFFFFFFFFFF), 0))
    else:
        tl.store(values + place, float("-inf"))
        tl.store(tokens + place, 0)


def keyed_maxima(
    logits: Tensor,
    *,
    first_column: int,
    keys: Tensor,
    temperatures: Tensor,
    is_greedy: Tensor,
    thresholds: Tensor | None = None,
    maxima: Tensor | None = None,
    log_min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the largest keyed value of each row (float64) and its token, the lowest of equals.

    logits: `[n, v]`; keys: int64 `[n]`, of the draws; temperatures: float64 `[n]`, above 0.
    thresholds: smallest sort keys that are kept; log_min_p: with the largest logits, maxima.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    block_maxima = logits.new_empty(rows, blocks, dtype=torch.float32)
    values = logits.new_empty(rows, blocks, dtype=torch.float64)
    tokens = logits.new_empty(rows, blocks, dtype=torch.int64)
    if rows == 0:
        return values.new_empty(0), tokens.new_empty(0)
    common = (
        logits, logits.stride(0), columns, first_column, keys, (~is_greedy).to(torch.int32),
        # Any tensor will do for an unused pointer: the constexpr flags remove its loads.
        keys if thresholds is None else thresholds,
        temperatures if maxima is None else maxima,
        temperatures,
        temperatures if log_min_p is None else log_min_p,
        block_maxima,
    )  # fmt: skip
    flags = {
        "HAS_FILTER": thresholds is not None,
        "HAS_MIN_P": log_min_p is not None,
        "BLOCK": BLOCK,
    }
    _approximate_maxima_kernel[(rows, blocks)](*common, **flags)
    _exact_maxima_kernel[(rows, blocks)](*common, block_maxima.amax(1), values, tokens, **flags)
    best, block = values.max(1)
    return best, tokens.gather(1, block.unsqueeze(1)).squeeze(1)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_keys_kernel(logits, stride, columns, first, keys, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    # A column outside has a higher token than all of the row, so that it is never the largest.
    key = tl.max(_sort_key(x, (first + column).to(tl.int64)), 0)
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), key)


@triton.jit  # type: ignore[untyped-decorator]
def _token_of_keys_kernel(keys, tokens, failed, blocks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    block = tl.arange(0, WIDTH)
    lowest = -0x8000000000000000
    key = tl.max(tl.load(keys + row * blocks + block, mask=block < blocks, other=lowest), 0)
    # The bits of infinite logits.
    ordered = (key >> 32).to(tl.int32)
    is_finite = (ordered < 0x7F800000) & (ordered > -0x7F800001)
    tl.store(failed + row, ~is_finite)
    tl.store(tokens + row, tl.where(is_finite, 0xFFFFFFFF - (key & 0xFFFFFFFF), 0))


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the most likely token of each row `[n]`, and whether there is none, `[n]`.

    logits: `[n, V]`, of all tokens.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    keys = logits.new_empty(rows, blocks, dtype=torch.int64)
    tokens = keys.new_empty(rows)
    failed = keys.new_empty(rows, dtype=torch.bool)
    if rows:
        _largest_keys_kernel[(rows, blocks)](
            logits, logits.stride(0), columns, 0, keys, BLOCK=BLOCK
        )
        _token_of_keys_kernel[(rows,)](
            keys, tokens, failed, blocks, WIDTH=triton.next_power_of_2(blocks)
        )
    return tokens, failed


@triton.jit  # type: ignore[untyped-decorator]
def _resolve_tokens_kernel(tokens, sampled, resolved, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row, mask=row < count, other=0)
    other = tl.load(sampled + tl.maximum(-1 - token, 0), mask=(row < count) & (token < 0), other=0)
    tl.store(resolved + row, tl.where(token < 0, other, token), mask=row < count)


def resolve_tokens(tokens: Tensor, sampled: Tensor) -> Tensor:
    """Returns tokens `[n]`, where a negative one, -1 - i, stands for token i of `sampled`."""
    resolved = torch.empty_like(tokens)
    _resolve_tokens_kernel[(triton.cdiv(len(tokens), BLOCK),)](
        tokens, sampled, resolved, len(tokens), BLOCK=BLOCK
    )
    return resolved


# ---- filters ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _sort_keys_kernel(logits, stride, columns, first, keys, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns).to(tl.float32)
    key = _sort_key(x, (first + column).to(tl.int64))
    tl.store(keys + row * columns + column, key, mask=column < columns)


def sort_keys(logits: Tensor, first_column: int) -> Tensor:
    """Returns the sort keys of logits `[n, v]`, the columns from `first_column` on."""
    rows, columns = logits.shape
    keys = logits.new_empty(rows, columns, dtype=torch.int64)
    if rows:
        _sort_keys_kernel[(rows, triton.cdiv(columns, BLOCK))](
            logits, logits.stride(0), columns, first_column, keys, BLOCK=BLOCK
        )
    return keys


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks_kernel(  # type: ignore[no-untyped-def]
    logits, stride, columns, maxima, temperatures, sums, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf")
    )
    scaled = (x.to(tl.float64) - tl.load(maxima + row)) / tl.load(temperatures + row)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(tl.exp(scaled), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows_kernel(sums, totals, blocks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    block = tl.arange(0, WIDTH)
    x = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    tl.store(totals + row, tl.sum(x, 0))


def sum_exponentials(logits: Tensor, maxima: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the sum of exp((logit - maximum) / temperature) of each row `[n]`, in float64.

    logits: `[n, v]`; maxima, temperatures: float64 `[n]`.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    sums = logits.new_empty(rows, blocks, dtype=torch.float64)
    totals = sums.new_empty(rows)
    if rows:
        _sum_blocks_kernel[(rows, blocks)](
            logits, logits.stride(0), columns, maxima, temperatures, sums, BLOCK=BLOCK
        )
        # In a kernel of its own, because torch adds in an order that depends on the batch.
        _sum_rows_kernel[(rows,)](sums, totals, blocks, WIDTH=triton.next_power_of_2(blocks))
    return totals


@triton.jit  # type: ignore[untyped-decorator]
def _count_above(logits, columns, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes how many sort keys of a row are at least a threshold."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        keep = (column < columns) & (_sort_key(x, column.to(tl.int64)) >= threshold)
        count += keep.to(tl.int32)
    return tl.sum(count, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _mass_above(  # type: ignore[no-untyped-def]
    logits, columns, threshold, most, temperature, BLOCK: tl.constexpr
):
    """Computes the sum of exponentials of the tokens whose sort keys are at least a threshold."""
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        keep = (column < columns) & (_sort_key(x, column.to(tl.int64)) >= threshold)
        mass += tl.where(keep, tl.exp((x.to(tl.float64) - most) / temperature), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """Computes the middle of two int64, whose difference may be larger than an int64."""
    distance = high.to(tl.uint64, bitcast=True) - low.to(tl.uint64, bitcast=True)
    return low + (distance >> 1).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _search_thresholds_kernel(  # type: ignore[no-untyped-def]
    logits, stride, columns, counts, largest, maxima, temperatures, top_k, top_p, totals,
    thresholds, num_candidates, TOLERANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the smallest kept sort key of a row by bisection, if candidates were not enough."""
    row = tl.program_id(0)
    if tl.load(counts + row) > num_candidates:
        row_logits = logits + row.to(tl.int64) * stride
        most = tl.load(maxima + row)
        temperature = tl.load(temperatures + row)
        limit = tl.load(top_k + row)
        share = tl.load(top_p + row)
        total = tl.load(totals + row)
        # `low` keeps enough, `high` does not; the largest key is always kept.
        low = tl.full([], -0x8000000000000000, tl.int64)
        high = tl.load(largest + row) + 1
        if limit > 0:
            middle = _middle(low, high)
            while middle != low:
                enough = _count_above(row_logits, columns, middle, BLOCK=BLOCK) >= limit
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
                middle = _middle(low, high)
            total = _mass_above(row_logits, columns, low, most, temperature, BLOCK=BLOCK)
        if share < 1.0:
            target = (share - TOLERANCE) * total
            high = tl.load(largest + row) + 1
            middle = _middle(low, high)
            while middle != low:
                mass = _mass_above(row_logits, columns, middle, most, temperature, BLOCK=BLOCK)
                enough = mass >= target
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
                middle = _middle(low, high)
        tl.store(thresholds + row, low)


def search_thresholds(
    logits: Tensor,
    *,
    counts: Tensor,
    candidates: Tensor,
    maxima: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    totals: Tensor,
    thresholds: Tensor,
    tolerance: float,
) -> None:
    """Stores the smallest kept sort key of the rows whose candidates are not enough.

    They are enough if the count of the row is at most their number; such a row costs nothing.
    logits: `[n, V]`, of all tokens; candidates: `[n, c]`, the largest sort keys in descending
    order; totals: sums of exponentials of all tokens, for rows without top_k.
    """
    if len(logits):
        _search_thresholds_kernel[(len(logits),)](
            logits, logits.stride(0), logits.shape[1], counts, candidates[:, 0].contiguous(),
            maxima, temperatures, top_k, top_p, totals, thresholds, candidates.shape[1],
            TOLERANCE=tolerance, BLOCK=SEARCH_BLOCK,
        )  # fmt: skip
