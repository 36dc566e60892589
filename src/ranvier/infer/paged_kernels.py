"""Triton kernels for attention to a paged KV cache on a GPU.

Decode: one query per sequence. The heads that share a kv head are the rows of one tile, so that
keys and values are read once. A sequence is divided into `num_splits` interleaved sets of blocks,
each with its own partial result and log-sum-exp, which a second kernel merges:

    l = log Σ exp l_i,   y = Σ exp(l_i - l) y_i

Prefill: the keys and values of all prompts are copied out of their blocks and attended to by the
varlen flash kernel, whose causal mask is aligned at the end of both. If the step has whole prompts,
nothing is copied.

Batch-invariant attention treats every token as a decode with a fixed number of splits, so that the
order of additions depends on nothing but its position.

`models.paged_attention.paged_attention` is the plain equivalent.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ranvier.models.document_attention import can_use_flash_kernel
from ranvier.models.paged_attention import KVCache, PagedSequences, attend_to_blocks
from ranvier.nn.inference_matmul import has_dependent_launch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

MAX_SPLITS = 16
"""Maximum number of splits of a sequence."""
TARGET_PROGRAMS = 512
"""Number of programs that keep a large GPU busy. On an H200, 64 sequences of 2,048 tokens with 8 kv
heads read 92 % of its bandwidth without splits, and 84 % with two."""
CHUNK_ROWS = 64
"""Queries of a tile of `chunk_attention`, times heads of a group."""


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    new_keys,
    new_values,
    keys,
    values,
    block_table,
    table_rows,
    seq_lens,
    partial_y,
    partial_lse,
    merged,
    counters,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
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
    WRITES: tl.constexpr,
    MERGES: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attends from the heads of one group of one sequence to one split of its blocks.

    If it writes, the last key and value of a sequence come from the step: the program whose split
    has their block attends to them, and stores them there. If it merges, the last program of a
    group that ends merges the splits.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    table_row = tl.load(table_rows + sequence).to(tl.int64)
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
    # Tokens in the cache.
    num_cached = length
    if WRITES:
        num_cached = tl.maximum(length - 1, 0)
    peak = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    y = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
    for i in tl.range(first // BLOCK_SIZE + split, tl.cdiv(num_cached, BLOCK_SIZE), NUM_SPLITS):
        block = tl.load(block_table + table_row * table_stride + i).to(tl.int64)
        place = i * BLOCK_SIZE + slots
        is_visible = place < num_cached
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
    if WRITES:
        last = num_cached // BLOCK_SIZE
        is_own = (length > 0) & ((last - first // BLOCK_SIZE) % NUM_SPLITS == split)
        new_k = tl.load(
            new_keys + sequence * k_token_stride + kv_head * k_head_stride + columns,
            mask=is_column & is_own,
            other=0.0,
        )
        new_v = tl.load(
            new_values + sequence * v_token_stride + kv_head * v_head_stride + columns,
            mask=is_column & is_own,
            other=0.0,
        )
        block = tl.load(block_table + table_row * table_stride + last, mask=is_own, other=0)
        at = block.to(tl.int64) * block_stride + kv_head * kv_head_stride
        at += num_cached % BLOCK_SIZE * slot_stride
        tl.store(keys + at + columns, new_k, mask=is_column & is_own)
        tl.store(values + at + columns, new_v, mask=is_column & is_own)
        score = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        if HAS_CAP:
            score = cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))
        score = tl.where(is_own, score, -float("inf"))
        new_peak = tl.maximum(peak, score)
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        decay = tl.exp(peak - safe_peak)
        p = tl.exp(score - safe_peak)
        total = total * decay + p
        y = y * decay[:, None] + p[:, None] * new_v.to(tl.float32)[None, :]
        peak = new_peak
    lse = tl.where(total == 0.0, -float("inf"), peak + tl.log(total))
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    row_index = sequence * num_heads + heads
    inside_row = is_row[:, None] & is_column[None, :]
    out = row_index[:, None] * HEAD_DIM + columns[None, :]
    if NUM_SPLITS == 1:
        tl.store(merged + out, y.to(merged.dtype.element_ty), mask=inside_row)
    else:
        place_own = row_index * NUM_SPLITS + split
        tl.store(partial_lse + place_own, lse, mask=is_row)
        tl.store(partial_y + place_own[:, None] * HEAD_DIM + columns[None, :], y, mask=inside_row)
        if MERGES:
            # Everything that this program stored is visible to the program that merges.
            tl.debug_barrier()
            counter = counters + sequence * tl.num_programs(1) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
                tl.store(counter, 0)
                splits = tl.arange(0, NUM_SPLITS)
                all_lse = tl.load(
                    partial_lse + row_index[:, None] * NUM_SPLITS + splits[None, :],
                    mask=is_row[:, None],
                    other=-float("inf"),
                    cache_modifier=".cg",
                )
                most = tl.max(all_lse, 1)
                most = tl.where(most == -float("inf"), 0.0, most)
                sum_all = tl.sum(tl.exp(all_lse - most[:, None]), 1)
                y_all = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
                for j in tl.static_range(NUM_SPLITS):
                    place_j = row_index * NUM_SPLITS + j
                    lse_j = tl.load(
                        partial_lse + place_j,
                        mask=is_row,
                        other=-float("inf"),
                        cache_modifier=".cg",
                    )
                    y_j = tl.load(
                        partial_y + place_j[:, None] * HEAD_DIM + columns[None, :],
                        mask=inside_row,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    y_all += tl.exp(lse_j - most)[:, None] * y_j
                y_all = y_all / tl.where(sum_all == 0.0, 1.0, sum_all)[:, None]
                tl.store(merged + out, y_all.to(merged.dtype.element_ty), mask=inside_row)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_y,
    partial_lse,
    y,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Merges the splits of one head of one sequence."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    table_rows: Tensor,
    seq_lens: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    counters: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    """Attends from queries, `[n, h, k]`, to the first tokens of their sequences in the cache.

    table_rows: row of each query in `block_table`, `[n]`; seq_lens: number of tokens it sees.
    new: key and value of the last of these tokens, `[n, g, k]` each, which the cache does not have
    yet; they are written to it. Then each query must be of another sequence. counters: int32, at
    least `[n · g]`, zeros before and after; with them one kernel is enough. num_splits: number of
    splits of a sequence, a power of two; 0 chooses it by the batch. The order of additions depends
    on it and on the length of the sequence only.
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
    is_dependent = has_dependent_launch(q.device.index)
    new_keys, new_values = new if new is not None else (q, q)
    _decode_kernel[(num_sequences, kv_heads, num_splits)](
        q,
        new_keys,
        new_values,
        cache.keys,
        cache.values,
        block_table,
        table_rows,
        seq_lens,
        partial_y,
        partial_lse,
        y,
        y if counters is None else counters,
        head_dim**-0.5,
        cap,
        window,
        q.stride(0),
        q.stride(1),
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
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
        WRITES=new is not None,
        MERGES=counters is not None,
        EXACT=q.dtype == torch.float32,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        num_stages=3,
        launch_pdl=is_dependent,
    )
    if num_splits == 1 or counters is not None:
        return y
    _merge_kernel[(num_sequences * num_heads,)](
        partial_y,
        partial_lse,
        y,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, columns),
        NUM_SPLITS=num_splits,
        IS_DEPENDENT=is_dependent,
        num_warps=1 if head_dim <= 128 else 2,
        launch_pdl=is_dependent,
    )
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    block_table,
    query_start_loc,
    seq_lens,
    y,
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
    num_sequences,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attends from some tokens of one sequence, and the heads of one group, to its blocks.

    Sequence i, whose tokens start at s_i, has its tiles from s_i // TOKENS + i on; there may be one
    more than it needs.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle).to(tl.int32) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(query_start_loc + sequence).to(tl.int32)
    stop = tl.load(query_start_loc + sequence + 1).to(tl.int32)
    first_token = start + (tile - start // TOKENS - sequence) * TOKENS
    if first_token < stop:
        length = tl.load(seq_lens + sequence).to(tl.int32)
        rows = tl.arange(0, TOKENS * GROUP_ROWS)
        columns = tl.arange(0, HEAD_COLUMNS)
        slots = tl.arange(0, BLOCK_SIZE)
        is_column = columns < HEAD_DIM
        tokens = first_token + rows // GROUP_ROWS
        heads = kv_head * GROUP + rows % GROUP_ROWS
        is_row = (rows % GROUP_ROWS < GROUP) & (tokens < stop)
        # The tokens of the step are the last ones of their sequence.
        positions = length - stop + tokens
        query = tl.load(
            q
            + tokens.to(tl.int64)[:, None] * q_token_stride
            + heads[:, None] * q_head_stride
            + columns[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        first_block = 0
        if HAS_WINDOW:
            first_block = tl.maximum(length - stop + first_token - window + 1, 0) // BLOCK_SIZE
        num_visible = tl.minimum(length - stop + first_token + TOKENS, length)
        peak = tl.full([TOKENS * GROUP_ROWS], -float("inf"), tl.float32)
        total = tl.zeros([TOKENS * GROUP_ROWS], tl.float32)
        out = tl.zeros([TOKENS * GROUP_ROWS, HEAD_COLUMNS], tl.float32)
        for i in tl.range(first_block, tl.cdiv(num_visible, BLOCK_SIZE)):
            block = tl.load(block_table + sequence * table_stride + i).to(tl.int64)
            place = i * BLOCK_SIZE + slots
            at = (
                block * block_stride
                + kv_head * kv_head_stride
                + slots[:, None] * slot_stride
                + columns[None, :]
            )
            inside = (place < num_visible)[:, None] & is_column[None, :]
            k = tl.load(keys + at, mask=inside, other=0.0)
            if EXACT:
                scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            else:
                scores = tl.dot(query, tl.trans(k)) * scale
            if HAS_CAP:
                scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
            is_visible = place[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_visible &= place[None, :] > positions[:, None] - window
            scores = tl.where(is_visible, scores, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            decay = tl.exp(peak - safe_peak)
            p = tl.exp(scores - safe_peak[:, None])
            total = total * decay + tl.sum(p, 1)
            v = tl.load(values + at, mask=inside, other=0.0)
            if EXACT:
                out = out * decay[:, None] + tl.dot(p, v, input_precision="ieee")
            else:
                out = out * decay[:, None] + tl.dot(p.to(v.dtype), v)
            peak = new_peak
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            y + (tokens.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + columns[None, :],
            out.to(y.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )


def chunk_attention(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Attends from the last tokens of sequences, `[T, h, k]`, to all their tokens in the cache.

    The host knows no length, so that the kernel can be part of a CUDA graph. query_start_loc: start
    of the tokens of each sequence, then the end, `[n + 1]`; seq_lens: `[n]`. Other tokens get 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = cache.keys.shape[1]
    group = num_heads // kv_heads
    group_rows = triton.next_power_of_2(group)
    tokens = max(CHUNK_ROWS // group_rows, 1)
    num_sequences = len(seq_lens)
    y = torch.zeros((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    is_exact = q.dtype == torch.float32
    is_dependent = has_dependent_launch(q.device.index)
    assert cache.keys.stride() == cache.values.stride(), "keys and values have one layout"
    _chunk_kernel[(num_tokens // tokens + num_sequences, kv_heads)](
        q,
        cache.keys,
        cache.values,
        block_table,
        query_start_loc,
        seq_lens,
        y,
        head_dim**-0.5,
        cap,
        window,
        q.stride(0),
        q.stride(1),
        *cache.keys.stride()[:3],
        block_table.stride(0),
        num_heads,
        num_sequences,
        GROUP=group,
        GROUP_ROWS=group_rows,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=cache.block_size,
        HAS_CAP=cap > 0.0,
        HAS_WINDOW=window > 0,
        EXACT=is_exact,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        num_stages=1 if is_exact else 2,
        launch_pdl=is_dependent,
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
    IS_DEPENDENT: tl.constexpr,
):
    """Writes the key and the value of one head of one token into its slot."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    is_dependent = has_dependent_launch(k.device.index)
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
        IS_DEPENDENT=is_dependent,
        num_warps=1,
        launch_pdl=is_dependent,
    )


def _attend_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    token_rows: Tensor,
    token_lens: Tensor,
    counters: Tensor | None,
    window: int,
    cap: float,
    num_splits: int,
) -> Tensor:
    """Writes the cache, and attends from each token to its sequence up to itself.

    num_splits: 0 if there is one token of each sequence, which then needs no pass to write it.
    """
    new = None
    if num_splits:
        write_cache(k, v, keys, values, slot_mapping)
    else:
        new = (k, v)
    return decode_attention(
        q,
        KVCache(keys, values),
        block_table,
        token_rows,
        token_lens,
        new=new,
        counters=counters,
        window=window,
        cap=cap,
        num_splits=num_splits,
    )


def _attend_mixed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    token_rows: Tensor,
    token_lens: Tensor,
    prompt_start_loc: Tensor,
    key_start_loc: Tensor,
    key_slots: Tensor,
    host_lens: Tensor,
    window: int,
    cap: float,
) -> Tensor:
    """Writes the cache, and attends from decodes, which come first, and from prompts."""
    write_cache(k, v, keys, values, slot_mapping)
    cache = KVCache(keys, values)
    lengths, totals = host_lens.tolist()
    num_decodes = lengths.count(1)
    num_rows = len(lengths) - lengths.count(0)
    num_tokens = sum(lengths)
    y = torch.empty_like(q)
    if num_decodes:
        y[:num_decodes] = decode_attention(
            q[:num_decodes], cache, block_table, token_rows, token_lens, window=window, cap=cap
        )
    if num_rows > num_decodes and not can_use_flash_kernel(q, cap):
        start = num_decodes
        for row in range(num_decodes, num_rows):
            stop = start + lengths[row]
            queries, table = q[start:stop].unsqueeze(0), block_table[row : row + 1]
            y[start:stop] = attend_to_blocks(
                queries, cache, table, totals[row : row + 1], window, cap
            )[0]
            start = stop
    elif num_rows > num_decodes:
        prompts = slice(num_decodes, num_rows)
        some = slice(num_decodes, num_tokens)
        if lengths[prompts] != totals[prompts]:
            block, offset = key_slots // cache.block_size, key_slots % cache.block_size
            k, v = (x[block, :, offset] for x in (keys, values))  # (L, g, k)
        else:
            k, v = k[some].contiguous(), v[some].contiguous()
        sizes = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        y[some] = torch.ops.aten._flash_attention_forward(
            q[some].contiguous(),
            k,
            v,
            prompt_start_loc,
            key_start_loc,
            max(lengths[prompts]),
            max(totals[prompts]),
            0.0,
            True,
            False,
            **sizes,
        )[0]
    # Padding.
    y[num_tokens:] = 0.0
    return y


def _attend_captured_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    window: int,
    cap: float,
) -> Tensor:
    """Writes the cache, and attends from all tokens, without a length on the host."""
    write_cache(k, v, keys, values, slot_mapping)
    return chunk_attention(
        q,
        KVCache(keys, values),
        block_table,
        query_start_loc,
        seq_lens,
        window=window,
        cap=cap,
    )


def _empty_like_queries(q: Tensor, *others: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


# Operators, so that a compiler does not look inside.
_LIBRARY = torch.library.Library("ranvier", "FRAGMENT")
_COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slot_mapping, "
    "Tensor block_table"
)
for _name, _function, _arguments in (
    (
        "paged_decode",
        _attend_decode_step,
        "Tensor token_rows, Tensor token_lens, Tensor(c!)? counters, int window, float cap, "
        "int num_splits",
    ),
    (
        "paged_chunks",
        _attend_captured_step,
        "Tensor query_start_loc, Tensor seq_lens, int window, float cap",
    ),
    (
        "paged_mixed",
        _attend_mixed_step,
        "Tensor token_rows, Tensor token_lens, Tensor prompt_start_loc, Tensor key_start_loc, "
        "Tensor key_slots, Tensor host_lens, int window, float cap",
    ),
):
    _LIBRARY.define(f"{_name}({_COMMON}, {_arguments}) -> Tensor")
    # `host_lens` is on the host, so that the key of a device cannot select the implementation.
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ranvier::{_name}", _empty_like_queries, lib=_LIBRARY)


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
    where = (cache.keys, cache.values, sequences.slot_mapping)
    rows = (sequences.block_table, sequences.token_rows, sequences.token_lens)
    if sequences.is_decode:
        decoded: Tensor = torch.ops.ranvier.paged_decode(
            q, k, v, *where, *rows, sequences.split_counters, window, cap, 0
        )
        return decoded
    if sequences.host_lens is None:
        chunks: Tensor = torch.ops.ranvier.paged_chunks(
            q,
            k,
            v,
            *where,
            sequences.block_table,
            sequences.query_start_loc,
            sequences.seq_lens,
            window,
            cap,
        )
        return chunks
    prompts = (sequences.prompt_start_loc, sequences.key_start_loc, sequences.key_slots)
    mixed: Tensor = torch.ops.ranvier.paged_mixed(
        q, k, v, *where, *rows, *prompts, sequences.host_lens, window, cap
    )
    return mixed


INVARIANT_SPLITS = 4
"""Number of splits of batch-invariant attention."""


def batch_invariant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """As `paged_attention`; the output of a token depends on its sequence only, bit by bit."""
    y: Tensor = torch.ops.ranvier.paged_decode(
        q,
        k,
        v,
        cache.keys,
        cache.values,
        sequences.slot_mapping,
        sequences.block_table,
        sequences.token_rows,
        sequences.token_lens,
        None,
        window,
        cap,
        INVARIANT_SPLITS,
    )
    return y
