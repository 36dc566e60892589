"""Triton kernels for attention to a paged KV cache on a GPU.

Decode: one query per sequence. The heads that share a kv head are the rows of one tile, so that
keys and values are read once. A sequence is divided into `num_splits` interleaved sets of blocks,
each with its own partial result and log-sum-exp, which a second kernel merges:

    l = log2 Σ 2^l_i,   y = Σ 2^(l_i - l) y_i

Prefill: some tokens of a sequence, and the heads that share a kv head, are the rows of one tile,
which attends to the blocks of its sequence up to its last token. Only tiles of keys on the diagonal
are masked.

If the ranks of context share the pages of a sequence, the same kernels attend to those of one rank:
the keys of a rank are in the order of their positions, so that a query sees a range of them, whose
bounds `_count_own_keys` computes. They then also return log-sum-exps (base e), by which the results
of all ranks are merged.

Batch-invariant attention treats every token as a decode with a fixed number of splits, so that the
order of additions depends on nothing but its position.

`models.paged_attention.paged_attention` and `attend_to_own_pages` are the plain equivalents.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranvier.models.paged_attention import KVCache, PagedSequences
from ranvier.nn.inference_matmul import has_dependent_launch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

MAX_SPLITS = 16
"""Maximum number of splits of a sequence."""
TARGET_PROGRAMS = 512
"""Number of programs that keep a large GPU busy. On an H200, 64 sequences of 2,048 tokens with 8 kv
heads read 92 % of its bandwidth without splits, and 84 % with two."""
CHUNK_ROWS = 64
"""Queries of a tile of `chunk_attention`, times heads of a group, if it may have few queries."""
PROMPT_ROWS = 128
"""The same for prompts in 16 bits. On an H200, 4 prompts of 2,048 tokens take 398 µs instead of
435; the flash kernel of torch takes 496."""
CHUNK_KEYS = 64
"""Keys of a tile of `chunk_attention`."""
WRITE_TOKENS = 16
"""Tokens that one program of `write_cache` writes."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_tile(  # type: ignore[no-untyped-def]
    query,
    y,
    total,
    peak,
    keys,
    values,
    at,
    is_inside,
    is_visible,
    scale,
    cap,
    IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds a tile of keys and values to an online softmax: y, total and peak of each row.

    The exponents have base 2, which the device computes: p = 2^(score · log2 e - peak).
    """
    if IS_MASKED:
        k = tl.load(keys + at, mask=is_inside, other=0.0)
    else:
        k = tl.load(keys + at)
    if EXACT:
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(k))
    unit = scale * LOG2_E
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scale * scores / cap) + 1.0))
        unit = LOG2_E
    if IS_MASKED:
        scores = tl.where(is_visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
    safe_peak = new_peak
    if IS_MASKED:
        # A tile without visible keys must not give NaN.
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(scores * unit - safe_peak[:, None])
    decay = tl.exp2(peak - safe_peak)
    total = total * decay + tl.sum(p, 1)
    if IS_MASKED:
        v = tl.load(values + at, mask=is_inside, other=0.0)
    else:
        v = tl.load(values + at)
    y = y * decay[:, None]
    if EXACT:
        y = tl.dot(p, v, y, input_precision="ieee")
    else:
        y = tl.dot(p.to(v.dtype), v, y)
    return y, total, new_peak


@triton.jit  # type: ignore[untyped-decorator]
def _count_own_keys(  # type: ignore[no-untyped-def]
    num_tokens,
    context_index,
    BLOCK_SIZE: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Returns how many of the first tokens of a sequence are in pages of this rank of context."""
    rest = num_tokens % (BLOCK_SIZE * CONTEXT) - context_index * BLOCK_SIZE
    whole = num_tokens // (BLOCK_SIZE * CONTEXT) * BLOCK_SIZE
    return whole + tl.minimum(tl.maximum(rest, 0), BLOCK_SIZE)


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
    context_index,
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
    CONTEXT: tl.constexpr,
    RETURNS_LSE: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attends from the heads of one group of one sequence to one split of its blocks.

    If it writes, the last key and value of a sequence come from the step: the program whose split
    has their block attends to them, and stores them there. If it merges, the last program of a
    group that ends merges the splits. With context it does neither.
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
    if CONTEXT > 1:
        # From here on both count the keys of this rank.
        length = _count_own_keys(length, context_index, BLOCK_SIZE, CONTEXT)
        if HAS_WINDOW:
            first = _count_own_keys(first, context_index, BLOCK_SIZE, CONTEXT)
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
        y, total, peak = _attend_to_tile(
            query,
            y,
            total,
            peak,
            keys,
            values,
            tile,
            is_visible[:, None] & is_column[None, :],
            is_visible[None, :],
            scale,
            cap,
            IS_MASKED=True,
            HAS_CAP=HAS_CAP,
            EXACT=EXACT,
        )
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
        score = tl.where(is_own, score * LOG2_E, -float("inf"))
        new_peak = tl.maximum(peak, score)
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        decay = tl.exp2(peak - safe_peak)
        p = tl.exp2(score - safe_peak)
        total = total * decay + p
        y = y * decay[:, None] + p[:, None] * new_v.to(tl.float32)[None, :]
        peak = new_peak
    # Of base 2, as the exponents are.
    lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(total))
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    row_index = sequence * num_heads + heads
    inside_row = is_row[:, None] & is_column[None, :]
    out = row_index[:, None] * HEAD_DIM + columns[None, :]
    if NUM_SPLITS == 1:
        tl.store(merged + out, y.to(merged.dtype.element_ty), mask=inside_row)
        if RETURNS_LSE:
            tl.store(partial_lse + row_index, lse * LOG_2, mask=is_row)
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
                sum_all = tl.sum(tl.exp2(all_lse - most[:, None]), 1)
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
                    y_all += tl.exp2(lse_j - most)[:, None] * y_j
                y_all = y_all / tl.where(sum_all == 0.0, 1.0, sum_all)[:, None]
                tl.store(merged + out, y_all.to(merged.dtype.element_ty), mask=inside_row)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_y,
    partial_lse,
    y,
    merged_lse,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    RETURNS_LSE: tl.constexpr,
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
    weights = tl.exp2(lse - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial_y + (row * NUM_SPLITS + splits[:, None]) * HEAD_DIM + columns[None, :],
        mask=is_column[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(y + row * HEAD_DIM + columns, merged.to(y.dtype.element_ty), mask=is_column)
    if RETURNS_LSE:
        # Without keys the peak is -inf, and so is the sum.
        tl.store(merged_lse + row, (peak + tl.log2(tl.where(total == 0.0, 1.0, total))) * LOG_2)


@dataclass(frozen=True, eq=False)
class OwnPages:
    """Attention to the pages of one rank of context, and where its log-sum-exps are stored."""

    context_size: int
    """Number of ranks of context."""
    context_index: int
    lse: Tensor
    """Log-sum-exps of all heads of each query, fp32 `[n, h]`."""


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
    own: OwnPages | None = None,
) -> Tensor:
    """Attends from queries, `[n, h, k]`, to the first tokens of their sequences in the cache.

    table_rows: row of each query in `block_table`, `[n]`; seq_lens: number of tokens it sees.
    new: key and value of the last of these tokens, `[n, g, k]` each, which the cache does not have
    yet; they are written to it. Then each query must be of another sequence. counters: int32, at
    least `[n · g]`, zeros before and after; with them one kernel is enough. num_splits: number of
    splits of a sequence, a power of two; 0 chooses it by the batch. The order of additions depends
    on it and on the length of the sequence only. own: attends to the pages of one rank of context
    only, without `new` and `counters`; the result is then in fp32.
    """
    assert own is None or (new is None and counters is None), "pages are written before"
    num_sequences, num_heads, head_dim = q.shape
    kv_heads = cache.keys.shape[1]
    group = num_heads // kv_heads
    if not num_splits:
        wanted = TARGET_PROGRAMS // max(num_sequences * kv_heads, 1)
        num_splits = min(MAX_SPLITS, max(1, 1 << max(wanted, 1).bit_length() - 1))
    shape = (num_sequences, num_heads, num_splits)
    partial_y = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    dtype = q.dtype if own is None else torch.float32
    y = torch.empty((num_sequences, num_heads, head_dim), dtype=dtype, device=q.device)
    if own is not None and num_splits == 1:
        partial_lse = own.lse
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
        0 if own is None else own.context_index,
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
        CONTEXT=1 if own is None else own.context_size,
        RETURNS_LSE=own is not None,
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
        partial_lse if own is None else own.lse,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, columns),
        NUM_SPLITS=num_splits,
        RETURNS_LSE=own is not None,
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
    lse,
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
    context_index,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
    RETURNS_LSE: tl.constexpr,
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
    # The last tiles of a sequence see most, and come first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    # The sequences may follow others.
    tile += tl.load(query_start_loc).to(tl.int32) // TOKENS
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
        first_position = length - stop + first_token
        num_visible = tl.minimum(first_position + TOKENS, length)
        num_all_see = first_position + 1
        first_visible = 0
        if HAS_WINDOW:
            first_visible = tl.maximum(first_position - window + 1, 0)
        if CONTEXT > 1:
            # From here on all of them, and places, count the keys of this rank.
            num_visible = _count_own_keys(num_visible, context_index, BLOCK_SIZE, CONTEXT)
            num_all_see = _count_own_keys(num_all_see, context_index, BLOCK_SIZE, CONTEXT)
            end = _count_own_keys(positions + 1, context_index, BLOCK_SIZE, CONTEXT)
            if HAS_WINDOW:
                first_visible = _count_own_keys(first_visible, context_index, BLOCK_SIZE, CONTEXT)
                begin = tl.maximum(positions - window + 1, 0)
                begin = _count_own_keys(begin, context_index, BLOCK_SIZE, CONTEXT)
        first_tile = 0
        # All rows see all keys of the tiles up to this one.
        num_full = num_all_see // KEYS
        if HAS_WINDOW:
            first_tile = first_visible // KEYS
            num_full = first_tile
        peak = tl.full([TOKENS * GROUP_ROWS], -float("inf"), tl.float32)
        total = tl.zeros([TOKENS * GROUP_ROWS], tl.float32)
        out = tl.zeros([TOKENS * GROUP_ROWS, HEAD_COLUMNS], tl.float32)
        table = block_table + sequence * table_stride
        for i in tl.range(first_tile, num_full):
            place = i * KEYS + tl.arange(0, KEYS)
            if BLOCK_SIZE % KEYS == 0:
                block = tl.load(table + i * KEYS // BLOCK_SIZE).to(tl.int64)
                slots = i * KEYS % BLOCK_SIZE + tl.arange(0, KEYS)
            else:
                block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
                slots = place % BLOCK_SIZE
            at = block * block_stride + slots * slot_stride + kv_head * kv_head_stride
            out, total, peak = _attend_to_tile(
                query,
                out,
                total,
                peak,
                keys,
                values,
                at[:, None] + columns[None, :],
                is_column[None, :],
                place[None, :] >= 0,
                scale,
                cap,
                IS_MASKED=HEAD_DIM != HEAD_COLUMNS,
                HAS_CAP=HAS_CAP,
                EXACT=EXACT,
            )
        for i in tl.range(num_full, tl.cdiv(num_visible, KEYS)):
            place = i * KEYS + tl.arange(0, KEYS)
            is_key = place < num_visible
            if BLOCK_SIZE % KEYS == 0:
                block = tl.load(table + i * KEYS // BLOCK_SIZE).to(tl.int64)
                slots = i * KEYS % BLOCK_SIZE + tl.arange(0, KEYS)
            else:
                block = tl.load(table + place // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                slots = place % BLOCK_SIZE
            at = block * block_stride + slots * slot_stride + kv_head * kv_head_stride
            if CONTEXT > 1:
                is_visible = place[None, :] < end[:, None]
                if HAS_WINDOW:
                    is_visible &= place[None, :] >= begin[:, None]
            else:
                is_visible = place[None, :] <= positions[:, None]
                if HAS_WINDOW:
                    is_visible &= place[None, :] > positions[:, None] - window
            out, total, peak = _attend_to_tile(
                query,
                out,
                total,
                peak,
                keys,
                values,
                at[:, None] + columns[None, :],
                is_key[:, None] & is_column[None, :],
                is_visible,
                scale,
                cap,
                IS_MASKED=True,
                HAS_CAP=HAS_CAP,
                EXACT=EXACT,
            )
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            y + (tokens.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + columns[None, :],
            out.to(y.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )
        if RETURNS_LSE:
            # Without keys the peak is -inf, and so is the sum.
            sums = (peak + tl.log2(tl.where(total == 0.0, 1.0, total))) * LOG_2
            tl.store(lse + tokens.to(tl.int64) * num_heads + heads, sums, mask=is_row)


def chunk_attention(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    y: Tensor,
    *,
    window: int = 0,
    cap: float = 0.0,
    rows: int = CHUNK_ROWS,
    own: OwnPages | None = None,
) -> None:
    """Attends from the last tokens of sequences to all their tokens in the cache.

    The host knows no length, so that the kernel can be part of a CUDA graph. q: `[T, h, k]`; y:
    the output, contiguous; tokens of no sequence keep what it has. query_start_loc: start of the
    tokens of each sequence, then the end, `[n + 1]`; seq_lens: `[n]`. rows: queries of a tile,
    times heads of a group. own: attends to the pages of one rank of context only.
    """
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = cache.keys.shape[1]
    group = num_heads // kv_heads
    group_rows = triton.next_power_of_2(group)
    is_exact = q.dtype == torch.float32
    if is_exact or head_dim > 128:
        # More does not fit into registers.
        rows = min(rows, CHUNK_ROWS)
    tokens = max(rows // group_rows, 1)
    num_sequences = len(seq_lens)
    is_dependent = has_dependent_launch(q.device.index)
    assert cache.keys.stride() == cache.values.stride(), "keys and values have one layout"
    _chunk_kernel[(kv_heads, num_tokens // tokens + num_sequences)](
        q,
        cache.keys,
        cache.values,
        block_table,
        query_start_loc,
        seq_lens,
        y,
        y if own is None else own.lse,
        head_dim**-0.5,
        cap,
        window,
        q.stride(0),
        q.stride(1),
        *cache.keys.stride()[:3],
        block_table.stride(0),
        num_heads,
        num_sequences,
        0 if own is None else own.context_index,
        GROUP=group,
        GROUP_ROWS=group_rows,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=cache.block_size,
        KEYS=CHUNK_KEYS,
        HAS_CAP=cap > 0.0,
        HAS_WINDOW=window > 0,
        CONTEXT=1 if own is None else own.context_size,
        RETURNS_LSE=own is not None,
        EXACT=is_exact,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        num_stages=1 if is_exact else 2,
        launch_pdl=is_dependent,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    keys,
    values,
    slot_mapping,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Writes the keys and the values of one head of some tokens into their slots."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    is_token = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens, mask=is_token, other=0)
    columns = tl.arange(0, HEAD_COLUMNS)[None, :]
    inside = is_token[:, None] & (columns < HEAD_DIM)
    at = slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * slot_stride
    at = at[:, None] + head * kv_head_stride + columns
    key = tl.load(
        k + tokens[:, None] * k_token_stride + head * k_head_stride + columns, mask=inside
    )
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
    value = tl.load(
        v + tokens[:, None] * v_token_stride + head * v_head_stride + columns, mask=inside
    )
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values of tokens, `[T, g, k]` each, into their slots."""
    assert k.stride(-1) == v.stride(-1) == 1, (k.stride(), v.stride())
    num_tokens, kv_heads, head_dim = k.shape
    is_dependent = has_dependent_launch(k.device.index)
    _write_kernel[(triton.cdiv(num_tokens, WRITE_TOKENS), kv_heads)](
        k,
        v,
        keys,
        values,
        slot_mapping,
        num_tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *keys.stride()[:3],
        TOKENS=WRITE_TOKENS,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[2],
        IS_DEPENDENT=is_dependent,
        num_warps=4,
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
    query_start_loc: Tensor,
    seq_lens: Tensor,
    host_lens: Tensor,
    window: int,
    cap: float,
) -> Tensor:
    """Writes the cache, and attends from decodes, which come first, and from prompts."""
    write_cache(k, v, keys, values, slot_mapping)
    cache = KVCache(keys, values)
    lengths = host_lens[0].tolist()
    num_decodes = lengths.count(1)
    num_rows = len(lengths) - lengths.count(0)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decodes:
        y[:num_decodes] = decode_attention(
            q[:num_decodes], cache, block_table, token_rows, token_lens, window=window, cap=cap
        )
    if num_rows > num_decodes:
        prompts = slice(num_decodes, num_rows)
        chunk_attention(
            q,
            cache,
            block_table[prompts],
            query_start_loc[num_decodes : num_rows + 1],
            seq_lens[prompts],
            y,
            window=window,
            cap=cap,
            rows=PROMPT_ROWS,
        )
    # Padding.
    y[sum(lengths) :] = 0.0
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
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    chunk_attention(
        q,
        KVCache(keys, values),
        block_table,
        query_start_loc,
        seq_lens,
        y,
        window=window,
        cap=cap,
    )
    return y


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
        "Tensor token_rows, Tensor token_lens, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor host_lens, int window, float cap",
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
    lens = (sequences.query_start_loc, sequences.seq_lens, sequences.host_lens)
    mixed: Tensor = torch.ops.ranvier.paged_mixed(q, k, v, *where, *rows, *lens, window, cap)
    return mixed


def attend_to_own_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Writes keys and values of own pages into the cache, and attends to all own pages.

    q, o: `[T, h, k]`; k, v: `[T, g, k]`; log-sum-exps: `[h, T]`; as
    `models.paged_attention.attend_to_own_pages`.
    """
    write_cache(k, v, cache.keys, cache.values, sequences.slot_mapping)
    lengths = sequences.query_lens
    num_decodes = lengths.count(1)
    num_rows = len(lengths) - lengths.count(0)
    num_tokens = sum(lengths)
    o = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    own = OwnPages(sequences.context_size, sequences.context_index, lse)
    if num_decodes:
        o[:num_decodes] = decode_attention(
            q[:num_decodes],
            cache,
            sequences.block_table,
            sequences.token_rows,
            sequences.token_lens,
            window=window,
            cap=cap,
            own=own,
        )
    if num_rows > num_decodes:
        prompts = slice(num_decodes, num_rows)
        chunk_attention(
            q,
            cache,
            sequences.block_table[prompts],
            sequences.query_start_loc[num_decodes : num_rows + 1],
            sequences.seq_lens[prompts],
            o,
            window=window,
            cap=cap,
            rows=PROMPT_ROWS,
            own=own,
        )
    # Padding.
    o[num_tokens:] = 0.0
    lse[num_tokens:] = float("-inf")
    return o, lse.T


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
