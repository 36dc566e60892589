"""Triton kernels for attention to a paged KV cache on a GPU.

Decode: one query per sequence. The heads that share a kv head are the rows of one tile, so that
keys and values are read once. A sequence is divided into `num_splits` interleaved sets of blocks,
each with its own partial result and log-sum-exp, which a second kernel merges:

    l = log Σ exp l_i,   y = Σ exp(l_i - l) y_i

Prefill: the keys and values of a sequence are copied out of their blocks and attended to by the
varlen flash kernel, whose causal mask is aligned at the end of both.

`models.paged_attention.paged_attention` is the plain equivalent.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ranvier.models.document_attention import can_use_flash_kernel
from ranvier.models.paged_attention import KVCache, PagedSequences, attend_to_blocks

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

MAX_SPLITS = 16
"""Maximum number of splits of a sequence."""
TARGET_PROGRAMS = 1056
"""Number of programs that keep a large GPU busy: eight for each of 132 multiprocessors."""


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    block_table,
    seq_lens,
    partial_y,
    partial_lse,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    num_heads,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Attends from the heads of one group of one sequence to one split of its blocks."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + sequence).to(tl.int32)
    rows = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    slots = tl.arange(0, BLOCK_SIZE)
    is_column = columns < HEAD_DIM
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    query = tl.load(
        q + sequence * q_token_stride + heads[:, None] * q_head_stride + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    peak = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    y = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    for i in tl.range(first // BLOCK_SIZE + split, num_blocks, NUM_SPLITS):
        block = tl.load(block_table + sequence * table_stride + i).to(tl.int64)
        place = i * BLOCK_SIZE + slots
        is_visible = place < length
        if HAS_WINDOW:
            is_visible &= place >= first
        tile = (
            block * block_stride
            + kv_head * kv_head_stride
            + slots[:, None] * slot_stride
            + columns[None, :]
        )
        inside = is_visible[:, None] & is_column[None, :]
        k = tl.load(keys + tile, mask=inside, other=0.0)
        if EXACT:
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        else:
            scores = tl.dot(query, tl.trans(k)) * scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
        scores = tl.where(is_visible[None, :], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A block without visible keys must not give NaN.
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        decay = tl.exp(peak - safe_peak)
        p = tl.exp(scores - safe_peak[:, None])
        total = total * decay + tl.sum(p, 1)
        v = tl.load(values + tile, mask=inside, other=0.0)
        if EXACT:
            y = y * decay[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            y = y * decay[:, None] + tl.dot(p.to(v.dtype), v)
        peak = new_peak
    lse = peak + tl.log(total)
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (sequence * num_heads + heads) * NUM_SPLITS + split
    tl.store(partial_lse + at, tl.where(total == 0.0, -float("inf"), lse), mask=is_row)
    tl.store(
        partial_y + at[:, None] * HEAD_DIM + columns[None, :],
        y,
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_y,
    partial_lse,
    y,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Merges the splits of one head of one sequence."""
    row = tl.program_id(0)
    splits = tl.arange(0, NUM_SPLITS)
    columns = tl.arange(0, HEAD_COLUMNS)
    is_column = columns < HEAD_DIM
    lse = tl.load(partial_lse + row * NUM_SPLITS + splits)
    peak = tl.max(lse, 0)
    # A padding row has no keys.
    weights = tl.exp(lse - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial_y + (row * NUM_SPLITS + splits[:, None]) * HEAD_DIM + columns[None, :],
        mask=is_column[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(y + row * HEAD_DIM + columns, merged.to(y.dtype.element_ty), mask=is_column)


def decode_attention(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    window: int = 0,
    cap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    """Attends from one query per sequence, `[n, h, k]`, to the cache.

    num_splits: number of splits of a sequence, a power of two; 0 chooses it by the batch. The order
    of additions depends on it and on the length of the sequence only.
    """
    num_sequences, num_heads, head_dim = q.shape
    kv_heads = cache.keys.shape[1]
    group = num_heads // kv_heads
    if not num_splits:
        wanted = TARGET_PROGRAMS // max(num_sequences * kv_heads, 1)
        num_splits = min(MAX_SPLITS, max(1, 1 << max(wanted, 1).bit_length() - 1))
    shape = (num_sequences, num_heads, num_splits)
    partial_y = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    y = torch.empty((num_sequences, num_heads, head_dim), dtype=q.dtype, device=q.device)
    columns = triton.next_power_of_2(head_dim)
    assert cache.keys.stride() == cache.values.stride(), "keys and values have one layout"
    _decode_kernel[(num_sequences, kv_heads, num_splits)](
        q,
        cache.keys,
        cache.values,
        block_table,
        seq_lens,
        partial_y,
        partial_lse,
        head_dim**-0.5,
        cap,
        window,
        q.stride(0),
        q.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        cache.keys.stride(2),
        block_table.stride(0),
        num_heads,
        GROUP=group,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, columns),
        BLOCK_SIZE=cache.block_size,
        NUM_SPLITS=num_splits,
        HAS_CAP=cap > 0.0,
        HAS_WINDOW=window > 0,
        EXACT=q.dtype == torch.float32,
        num_warps=4,
        num_stages=3,
    )
    _merge_kernel[(num_sequences * num_heads,)](
        partial_y,
        partial_lse,
        y,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, columns),
        NUM_SPLITS=num_splits,
        num_warps=1 if head_dim <= 128 else 2,
    )
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    keys,
    values,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Writes the key and the value of one head of one token into its slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, HEAD_COLUMNS)
    inside = columns < HEAD_DIM
    at = slot // BLOCK_SIZE * block_stride + head * kv_head_stride
    at += slot % BLOCK_SIZE * slot_stride
    key = tl.load(k + token * k_token_stride + head * k_head_stride + columns, mask=inside)
    tl.store(keys + at + columns, key.to(keys.dtype.element_ty), mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + columns, mask=inside)
    tl.store(values + at + columns, value.to(values.dtype.element_ty), mask=inside)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values of tokens, `[T, g, k]` each, into their slots."""
    assert k.stride(-1) == v.stride(-1) == 1, (k.stride(), v.stride())
    num_tokens, kv_heads, head_dim = k.shape
    _write_kernel[(num_tokens, kv_heads)](
        k,
        v,
        keys,
        values,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *keys.stride()[:3],
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[2],
        num_warps=1,
    )


@torch.library.custom_op("ranvier::paged_decode", mutates_args=("keys", "values"))
def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int,
    cap: float,
) -> Tensor:
    """A decode step as one operation for the compiler: writes the cache, and attends to it."""
    write_cache(k, v, keys, values, slot_mapping)
    return decode_attention(q, KVCache(keys, values), block_table, seq_lens, window=window, cap=cap)


@paged_decode.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int,
    cap: float,
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def supports(cache: KVCache) -> bool:
    """Whether the kernels support a cache."""
    return (
        cache.keys.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and cache.block_size in (16, 32, 64, 128)
        and cache.keys.shape[-1] <= 256
    )


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Writes keys and values of a step into the cache, and attends to all that the cache has.

    q, y: `[T, h, k]`; k, v: `[T, g, k]`; as `models.paged_attention.paged_attention`.
    """
    if sequences.is_decode:
        decoded: Tensor = paged_decode(
            q,
            k,
            v,
            cache.keys,
            cache.values,
            sequences.slot_mapping,
            sequences.block_table,
            sequences.seq_lens,
            window,
            cap,
        )
        return decoded
    write_cache(k, v, cache.keys, cache.values, sequences.slot_mapping)
    # Sequences with one token come first.
    lengths = sequences.query_lens
    num_decodes = next((i for i, n in enumerate(lengths) if n > 1), len(lengths))
    y = torch.zeros_like(q) if sum(lengths) < len(q) or num_decodes < len(lengths) else None
    if num_decodes:
        table = sequences.block_table[:num_decodes]
        decoded = decode_attention(
            q[:num_decodes], cache, table, sequences.seq_lens, window=window, cap=cap
        )
        if y is None:
            return decoded
        y[:num_decodes] = decoded
    assert y is not None
    start = num_decodes
    for i in range(num_decodes, len(lengths)):
        stop = start + lengths[i]
        y[start:stop] = _attend_chunk(q[start:stop], cache, sequences, i, window, cap)
        start = stop
    return y


def _attend_chunk(
    q: Tensor, cache: KVCache, sequences: PagedSequences, row: int, window: int, cap: float
) -> Tensor:
    """Attends from the last tokens of one sequence, `[s, h, k]`, to all its tokens."""
    if not can_use_flash_kernel(q, cap):
        return attend_to_blocks(q.unsqueeze(0), cache, sequences, [row], window, cap)[0]
    length = sequences.seq_len_of(row)
    num_blocks = -(-length // cache.block_size)
    keys, values = cache.read(sequences.block_table[row : row + 1, :num_blocks].long())
    k, v = (x[0, :, :length].transpose(0, 1).contiguous() for x in (keys, values))  # (L, g, k)
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (len(q), length)]
    sizes = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    found: Tensor = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k, v, *bounds, len(q), length, 0.0, True, False, **sizes
    )[0]
    return found
