"""Triton kernels for attention to a paged KV cache on a GPU.

Decode: one query per sequence. The heads that share a kv head are the columns of one tile, K Qᵀ,
so that keys and values are read once. The tiles of keys of all sequences and kv heads are one list,
of which each program has an equal range (stream-K): a captured step fixes the number of programs,
about as many as the multiprocessors hold, before lengths are known, and no program waits for the
longest sequence. Parts of a sequence and kv head that are in several ranges have partial results
and log-sum-exps, which the last of their programs merges; many parts are merged in groups before:

    l = log2 Σ 2^l_i,   y = Σ 2^(l_i - l) y_i

Prefill: some tokens of a sequence, and the heads that share a kv head, are the rows of one tile,
which attends to the blocks of its sequence up to its last token. Without a window, and not in fp32,
only tiles of keys on the diagonal are masked.

If the ranks of context share the pages of a sequence, the same kernels attend to those of one rank:
the keys of a rank are in the order of their positions, so that a query sees a range of them, whose
bounds `_count_own_keys` computes. They then also return log-sum-exps (base e), by which the results
of all ranks are merged.

Batch-invariant attention treats every token as a decode with a fixed number of interleaved splits
instead of ranges, so that the order of additions depends on nothing but its position.

`models.paged_attention.paged_attention` and `attend_to_own_pages` are the plain equivalents.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ranvier.models.paged_attention import MAX_PARTS, KVCache, PagedSequences, num_split_counters
from ranvier.nn.inference_kernels import RESERVED_BYTES, device_limits
from ranvier.nn.inference_matmul import has_dependent_launch

TensorDescriptor: Any = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32, 64, 128)
"""Numbers of tokens of a block that the kernels support."""
MAX_HEAD_DIM = 256
CHUNK_ROWS = 64
"""Queries of a tile of `chunk_attention`, times heads of a group, if it may have few queries."""
PROMPT_ROWS = 128
"""The same for prompts in 16 bits. On an H200, 4 prompts of 2,048 tokens take 398 µs instead of
435; the flash kernel of torch takes 496."""
CHUNK_KEYS = 64
"""Keys of a tile of `chunk_attention`."""
EXACT_CHUNK_KEYS = 32
"""The same in fp32."""
EXACT_CHUNK_ELEMENTS = 4096
"""Elements of the queries of a tile in fp32, unless a group has more. More do not fit into
registers: with 64 rows of 128, a thread kept 11 KB in memory, which the device reserves for all
threads, and compiling took 20 s."""
WRITE_TOKENS = 16
"""Tokens that one program of `write_cache` writes."""
MIN_ROWS = 16
"""Minimum number of rows of a product of tensor cores."""
MIN_COLUMNS = 8
"""Minimum number of columns of a product of tensor cores."""
TILE_BYTES = 8192
"""Bytes of the keys of a tile in fp32, at most, unless 16 keys have more. More do not fit into
registers."""
POINTER_KEYS = 16
"""Keys of a tile that is loaded by pointers, which need registers."""
DESCRIPTOR_ALIGNMENT = 16
"""Bytes of which the rows of a descriptor are a multiple; other heads, and caches that are not
contiguous, are loaded by pointers."""
MAX_REGISTERS = 255
"""Registers of a thread of the decode kernel: with `choose_decode_tiling` a multiprocessor has at
most eight warps, which all fit. Without this the assembler may use fewer, for programs that do not
fit anyway."""
MIN_ALIGNED = 0.9
"""Minimum fraction of all programs whose number is a multiple of the number of heads."""
MIN_SEQUENCES_AT_ONCE = 32
"""Sequences whose lengths a program of the decode kernel reads at once, for batches up to this."""
MAX_SEQUENCES_AT_ONCE = 256
"""The same for larger batches; more sizes would be more kernels to compile."""
MAX_PARTIAL_ELEMENTS = 2**28
"""Elements of partial results with a fixed number of splits, which need 1 GiB of memory; the kernel
has offsets of 32 bits. More sequences are attended from in several calls."""
MERGED_ELEMENTS = 4096
"""Elements of partial results that a warp of the decode kernel loads at once."""
PARTS_OF_GROUP = tl.constexpr(8)
"""Parts of a head that are merged at once if it has more than twice as many."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh_scores(  # type: ignore[no-untyped-def]
    scores,
    peak,
    is_visible,
    scale,
    cap,
    KEY_AXIS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Returns the weights of scores in an online softmax, what decays sums of them, and the peak.

    The exponents have base 2, which the device computes: p = 2^(score · log2 e - peak).
    """
    unit = scale * LOG2_E
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scale * scores / cap) + 1.0))
        unit = LOG2_E
    if IS_MASKED:
        scores = tl.where(is_visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, KEY_AXIS) * unit)
    safe_peak = new_peak
    if IS_MASKED:
        # A tile without visible keys must not give NaN.
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(scores * unit - tl.expand_dims(safe_peak, KEY_AXIS))
    decay = tl.exp2(peak - safe_peak)
    return p, decay, new_peak


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, c, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns c + a b."""
    if EXACT:
        c = tl.dot(a, b, c, input_precision="ieee")
    else:
        c = tl.dot(a, b, c)
    return c


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_tile(  # type: ignore[no-untyped-def]
    query,
    y,
    total,
    peak,
    key_pointers,
    value_pointers,
    is_inside,
    is_visible,
    scale,
    cap,
    IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds a tile of keys and values to an online softmax: y, total and peak of each row."""
    if IS_MASKED:
        k = tl.load(key_pointers, mask=is_inside, other=0.0)
    else:
        k = tl.load(key_pointers)
    scores = _multiply(query, tl.trans(k), None, EXACT)
    p, decay, peak = _weigh_scores(scores, peak, is_visible, scale, cap, 1, IS_MASKED, HAS_CAP)
    total = total * decay + tl.sum(p, 1)
    if IS_MASKED:
        v = tl.load(value_pointers, mask=is_inside, other=0.0)
    else:
        v = tl.load(value_pointers)
    return _multiply(p.to(v.dtype), v, y * decay[:, None], EXACT), total, peak


@triton.jit  # type: ignore[untyped-decorator]
def _count_own_keys(  # type: ignore[no-untyped-def]
    num_tokens,
    context_index,
    BLOCK_SIZE: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Returns how many of the first tokens of a sequence are in pages of this rank of context."""
    # Each rank has a block of a round; those of the last round may be incomplete or missing.
    num_full_rounds = num_tokens // (BLOCK_SIZE * CONTEXT)
    own_begin = num_full_rounds * BLOCK_SIZE * CONTEXT + context_index * BLOCK_SIZE
    num_last_keys = tl.minimum(tl.maximum(num_tokens - own_begin, 0), BLOCK_SIZE)
    return num_full_rounds * BLOCK_SIZE + num_last_keys


@triton.jit  # type: ignore[untyped-decorator]
def _visible_keys(  # type: ignore[no-untyped-def]
    length,
    window,
    context_index,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Returns the range of keys, of those of this rank, that the last token of a sequence sees."""
    first_key = length * 0
    if HAS_WINDOW:
        first_key = tl.maximum(length - window, 0)
    if CONTEXT > 1:
        # From here on both count the keys of this rank.
        length = _count_own_keys(length, context_index, BLOCK_SIZE, CONTEXT)
        if HAS_WINDOW:
            first_key = _count_own_keys(first_key, context_index, BLOCK_SIZE, CONTEXT)
    return first_key, length


@triton.jit  # type: ignore[untyped-decorator]
def _count_tiles(first_key, end_key, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of tiles of a range of keys; a range without keys has one, too."""
    return tl.maximum(tl.cdiv(end_key, KEYS) - first_key // KEYS, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _load_work(  # type: ignore[no-untyped-def]
    seq_lens,
    start,
    num_sequences,
    num_kv_heads,
    window,
    context_index,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Returns the lengths of some sequences, and their numbers of tiles of all kv heads."""
    ids = start + tl.arange(0, SEQUENCES_AT_ONCE)
    is_sequence = ids < num_sequences
    lengths = tl.load(seq_lens + ids, mask=is_sequence, other=0).to(tl.int32)
    first_keys, end_keys = _visible_keys(
        lengths, window, context_index, BLOCK_SIZE, HAS_WINDOW, CONTEXT
    )
    work = _count_tiles(first_keys, end_keys, KEYS) * num_kv_heads
    return lengths, tl.where(is_sequence, work, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_parts(  # type: ignore[no-untyped-def]
    partial_y,
    partial_lse,
    first_slot,
    next_slot,
    slot_step,
    num_parts,
    rows,
    columns,
    is_inside,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
):
    """Merges the parts of a group of heads in order: of `first_slot`, then from `next_slot` on.

    Other programs have stored the parts, so that they are read from the cache that all share.
    """
    peak = tl.full([rows.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    y = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for start in tl.range(0, num_parts, MERGED_PARTS, num_stages=1):
        parts = start + tl.arange(0, MERGED_PARTS)
        slots = tl.where(parts == 0, first_slot, next_slot + (parts - 1) * slot_step)
        is_part = parts < num_parts
        part_rows = slots[:, None] * GROUP + rows[None, :]
        lse = tl.load(
            partial_lse + part_rows,
            mask=is_part[:, None] & (rows < GROUP)[None, :],
            other=-float("inf"),
            cache_modifier=".cg",
        )
        part_y = tl.load(
            partial_y + part_rows[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=is_part[:, None, None] & is_inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        safe_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        decay = tl.exp2(peak - safe_peak)
        weights = tl.exp2(lse - safe_peak[None, :])
        total = total * decay + tl.sum(weights, 0)
        y = y * decay[:, None] + tl.sum(part_y * weights[:, :, None], 0)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    return y * (1.0 / total)[:, None], peak + tl.log2(total)


@triton.jit  # type: ignore[untyped-decorator]
def _clear_values(  # type: ignore[no-untyped-def]
    rows,
    num_cleared,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
):
    """Clears the values of some slots after each row, which may be of an earlier sequence.

    The decode kernel loads whole tiles, and a weight of zero times infinity is NaN.
    """
    columns = tl.arange(0, HEAD_COLUMNS)[None, :]
    for slot in tl.range(1, tl.max(num_cleared, 0) + 1, num_stages=1):
        tl.store(
            rows[:, None] + slot * slot_stride + columns,
            0.0,
            mask=(slot <= num_cleared)[:, None] & (columns < HEAD_DIM),
        )


@triton.jit
def _load_columns(rows, is_row, columns, is_column):  # type: ignore[no-untyped-def]
    """Returns some columns of rows, zeros where there are none."""
    return tl.load(
        rows[:, None] + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )


@triton.jit
def _store_columns(rows, x, is_row, columns, is_column):  # type: ignore[no-untyped-def]
    """Stores some columns of rows."""
    tl.store(
        rows[:, None] + columns[None, :],
        x.to(rows.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def _arrive(counters, num_programs, is_counted):  # type: ignore[no-untyped-def]
    """Counts this program in; returns whether it is the last one, which sees what others stored.

    The counter is zero before the first program and after the last one.
    """
    # Everything that this program stored is visible to the last one.
    tl.debug_barrier()
    num_arrived = tl.atomic_add(counters, 1, mask=is_counted, sem="acq_rel")
    is_last = is_counted & (num_arrived == num_programs - 1)
    tl.store(counters, 0, mask=is_last)
    return is_last


@triton.jit
def _first_tile(program, total_work, num_workers):  # type: ignore[no-untyped-def]
    """Returns the first tile of a program: the first `total_work % num_workers` have one more."""
    num_longer_programs = total_work % num_workers
    return program * (total_work // num_workers) + tl.minimum(program, num_longer_programs)


@triton.jit
def _program_of(tile, total_work, num_workers):  # type: ignore[no-untyped-def]
    """Returns which program has a tile, the inverse of `_first_tile`."""
    num_tiles = total_work // num_workers
    num_longer_programs = total_work % num_workers
    shorter_begin = num_longer_programs * (num_tiles + 1)
    return tl.where(
        tile < shorter_begin,
        tile // (num_tiles + 1),
        num_longer_programs + (tile - shorter_begin) // num_tiles,
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_sequences", "num_kv_heads", "window", "context_index"]
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    new_keys,
    new_values,
    keys,
    values,
    key_rows,
    value_rows,
    second_key_rows,
    second_value_rows,
    block_table,
    table_rows,
    seq_lens,
    partial_y,
    partial_lse,
    merged,
    merged_lse,
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
    table_stride,
    num_sequences,
    num_kv_heads,
    context_index,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SECOND_COLUMNS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WRITES: tl.constexpr,
    CONTEXT: tl.constexpr,
    RETURNS_LSE: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    HAS_ONE_CHUNK: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
):
    """Attends from groups of heads to tiles of their keys: an equal part of all tiles.

    The tiles of all sequences and kv heads are one list, of which each program has a range; its
    bounds follow from the lengths on the device. With `NUM_SPLITS` a program has each
    NUM_SPLITS-th tile of one sequence and kv head instead, so that the order of additions does not
    depend on other sequences.

    The last program that completes its part of a sequence and kv head merges all parts, in the
    order of their keys. If it writes, the last key and value of a sequence come from the step: the
    program that has the last tile of a head begins with them, and stores them.
    """
    # A range has two slots: for its first head, and for its last one if that begins in the range.
    SLOT_STEP: tl.constexpr = 2 if NUM_SPLITS == 0 else 1
    TILE_STEP: tl.constexpr = 1 if NUM_SPLITS == 0 else NUM_SPLITS
    program = tl.program_id(0)
    rows = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    is_row = rows < GROUP
    is_column = columns < HEAD_DIM
    # A tile has a power of two of columns; a second one has the others.
    tile_columns = tl.arange(0, TILE_COLUMNS)
    is_tile_column = tile_columns < HEAD_DIM
    if SECOND_COLUMNS > 0:
        second_columns = TILE_COLUMNS + tl.arange(0, SECOND_COLUMNS)
        is_second_column = second_columns < HEAD_DIM
    key_range = tl.arange(0, KEYS)
    merged_rows = tl.arange(0, MERGED_ROWS)
    is_merged = (merged_rows < GROUP)[:, None] & is_column[None, :]
    if NUM_SPLITS == 0:
        # Lengths are older than the queries: the kernel before this one does not write them.
        ids = tl.arange(0, SEQUENCES_AT_ONCE)
        table_ids = tl.load(table_rows + ids, mask=ids < num_sequences, other=0).to(tl.int64)
        total_work = 0
        num_chunks = tl.cdiv(num_sequences, SEQUENCES_AT_ONCE)
        if HAS_ONE_CHUNK:
            num_chunks = 1
        for chunk in tl.range(0, num_chunks, num_stages=1):
            lengths, work = _load_work(
                seq_lens,
                chunk * SEQUENCES_AT_ONCE,
                num_sequences,
                num_kv_heads,
                window,
                context_index,
                BLOCK_SIZE,
                KEYS,
                SEQUENCES_AT_ONCE,
                HAS_WINDOW,
                CONTEXT,
            )
            total_work += tl.sum(work, 0)
        num_workers = tl.minimum(total_work, tl.num_programs(0))
        work_begin = _first_tile(tl.minimum(program, num_workers), total_work, num_workers)
        work_end = _first_tile(tl.minimum(program + 1, num_workers), total_work, num_workers)
        # The sequence that has the first tile of the range.
        sequence = 0
        head_begin = 0
        length = 0
        table_row = tl.zeros([], tl.int64)
        before = 0
        for chunk in tl.range(0, num_chunks, num_stages=1):
            lengths, work = _load_work(
                seq_lens,
                chunk * SEQUENCES_AT_ONCE,
                num_sequences,
                num_kv_heads,
                window,
                context_index,
                BLOCK_SIZE,
                KEYS,
                SEQUENCES_AT_ONCE,
                HAS_WINDOW,
                CONTEXT,
            )
            if not HAS_ONE_CHUNK:
                ids = chunk * SEQUENCES_AT_ONCE + tl.arange(0, SEQUENCES_AT_ONCE)
                table_ids = tl.load(table_rows + ids, mask=ids < num_sequences, other=0)
                table_ids = table_ids.to(tl.int64)
            ends = before + tl.cumsum(work, 0)
            is_before = (work > 0) & (ends <= work_begin)
            is_begin = (ends > work_begin) & (ends - work <= work_begin)
            sequence += tl.sum(is_before.to(tl.int32), 0)
            head_begin += tl.sum(tl.where(is_before, work, 0), 0)
            length += tl.sum(tl.where(is_begin, lengths, 0), 0)
            table_row += tl.sum(tl.where(is_begin, table_ids, 0), 0)
            before += tl.sum(work, 0)
        sequence = tl.minimum(sequence, num_sequences - 1)
    else:
        sequence = program // (num_kv_heads * NUM_SPLITS)
        length = tl.load(seq_lens + sequence).to(tl.int32)
        table_row = tl.load(table_rows + sequence).to(tl.int64)
    first_key, end_key = _visible_keys(
        length, window, context_index, BLOCK_SIZE, HAS_WINDOW, CONTEXT
    )
    # If the step has the last key, it is not in the cache yet.
    end_cached = tl.maximum(end_key - 1, 0) if WRITES else end_key
    num_tiles = _count_tiles(first_key, end_key, KEYS)
    if NUM_SPLITS == 0:
        kv_head = (work_begin - head_begin) // num_tiles
        head_begin += kv_head * num_tiles
        tile = first_key // KEYS + work_begin - head_begin
    else:
        kv_head = program // NUM_SPLITS % num_kv_heads
        tile = first_key // KEYS + program % NUM_SPLITS
        work_begin = 0
        head_begin = 0
        work_end = tl.maximum(tl.cdiv(num_tiles - program % NUM_SPLITS, NUM_SPLITS), 1)
        num_tiles = work_end
    first_sequence = sequence
    first_kv_head = kv_head
    first_head_begin = head_begin
    first_num_tiles = num_tiles
    # Loaded one tile before: an address that is loaded with its tile halves the pipeline.
    # A tile without keys in the cache is in block 0, as its own values need not be finite yet.
    block = tl.load(
        block_table + table_row * table_stride + tile * KEYS // BLOCK_SIZE,
        mask=tile * KEYS < end_cached,
        other=0,
    )
    if IS_DEPENDENT and not WRITES:
        # The kernel before this one may have written the cache.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query = tl.zeros([GROUP_ROWS, TILE_COLUMNS], q.dtype.element_ty)
    peak = tl.zeros([GROUP_ROWS], tl.float32)
    # Of each key of a tile: to add those of all keys takes the program's warps longer.
    sums = tl.zeros([KEYS, GROUP_ROWS], tl.float32)
    y = tl.zeros([TILE_COLUMNS, GROUP_ROWS], tl.float32)
    if SECOND_COLUMNS > 0:
        second_query = tl.zeros([GROUP_ROWS, SECOND_COLUMNS], q.dtype.element_ty)
        second_y = tl.zeros([SECOND_COLUMNS, GROUP_ROWS], tl.float32)
    is_head_begin = True
    for work in tl.range(work_begin, work_end):
        row = (block * num_kv_heads + kv_head) * BLOCK_SIZE + tile * KEYS % BLOCK_SIZE
        if HAS_DESCRIPTORS:
            k = key_rows.load([row, 0])
            v = value_rows.load([row, 0])
            if SECOND_COLUMNS > 0:
                second_k = second_key_rows.load([row, TILE_COLUMNS])
                second_v = second_value_rows.load([row, TILE_COLUMNS])
        else:
            at = block.to(tl.int64) * block_stride + kv_head.to(tl.int64) * kv_head_stride
            at += (tile * KEYS % BLOCK_SIZE + key_range) * SLOT_STRIDE
            at = at[:, None] + tile_columns[None, :]
            is_cached = (tile * KEYS + key_range < end_cached)[:, None]
            k = tl.load(keys + at, mask=is_tile_column[None, :], other=0.0)
            v = tl.load(values + at, mask=is_cached & is_tile_column[None, :], other=0.0)
        if is_head_begin:
            if IS_DEPENDENT and WRITES:
                # The first tile is loaded before: it is older than the kernel before this one.
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            heads = kv_head * GROUP + rows
            queries = q + sequence * q_token_stride + heads * q_head_stride
            query = _load_columns(queries, is_row, tile_columns, is_tile_column)
            if SECOND_COLUMNS > 0:
                second_query = _load_columns(queries, is_row, second_columns, is_second_column)
            peak = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
            sums = tl.zeros([KEYS, GROUP_ROWS], tl.float32)
            y = tl.zeros([TILE_COLUMNS, GROUP_ROWS], tl.float32)
            if SECOND_COLUMNS > 0:
                second_y = tl.zeros([SECOND_COLUMNS, GROUP_ROWS], tl.float32)
            if WRITES:
                has_last_key = (head_begin + num_tiles <= work_end) & (end_key > 0)
                if has_last_key:
                    position = end_key - 1
                    last_block = tl.load(
                        block_table + table_row * table_stride + position // BLOCK_SIZE
                    )
                    last_key = new_keys + sequence * k_token_stride + kv_head * k_head_stride
                    last_value = new_values + sequence * v_token_stride + kv_head * v_head_stride
                    last_k = tl.load(last_key + tile_columns, mask=is_tile_column, other=0.0)
                    last_v = tl.load(last_value + tile_columns, mask=is_tile_column, other=0.0)
                    stored = last_block.to(tl.int64) * block_stride
                    stored += kv_head.to(tl.int64) * kv_head_stride
                    stored += position % BLOCK_SIZE * SLOT_STRIDE
                    tl.store(keys + stored + tile_columns, last_k, mask=is_tile_column)
                    tl.store(values + stored + tile_columns, last_v, mask=is_tile_column)
                    last_score = tl.sum(query.to(tl.float32) * last_k.to(tl.float32)[None, :], 1)
                    y += last_v.to(tl.float32)[:, None]
                    if SECOND_COLUMNS > 0:
                        last_k = tl.load(
                            last_key + second_columns, mask=is_second_column, other=0.0
                        )
                        last_v = tl.load(
                            last_value + second_columns, mask=is_second_column, other=0.0
                        )
                        tl.store(keys + stored + second_columns, last_k, mask=is_second_column)
                        tl.store(values + stored + second_columns, last_v, mask=is_second_column)
                        products = second_query.to(tl.float32) * last_k.to(tl.float32)[None, :]
                        last_score += tl.sum(products, 1)
                        second_y += last_v.to(tl.float32)[:, None]
                    # Its weight is 2^0.
                    _, _, peak = _weigh_scores(
                        last_score[None, :], peak, True, scale, cap, 0, False, HAS_CAP
                    )
                    sums += tl.where(key_range == 0, 1.0, 0.0)[:, None]
                    if position % BLOCK_SIZE == 0:
                        _clear_values(
                            values + stored + tl.zeros([1], tl.int32),
                            tl.full([1], BLOCK_SIZE - 1, tl.int32),
                            SLOT_STRIDE,
                            HEAD_DIM,
                            HEAD_COLUMNS,
                        )
        key = tile * KEYS + key_range
        is_visible = key < end_cached
        if HAS_WINDOW:
            is_visible &= key >= first_key
        scores = _multiply(k, tl.trans(query), None, EXACT)
        if SECOND_COLUMNS > 0:
            scores = _multiply(second_k, tl.trans(second_query), scores, EXACT)
        p, decay, peak = _weigh_scores(
            scores, peak, is_visible[:, None], scale, cap, 0, True, HAS_CAP
        )
        sums = sums * decay[None, :] + p
        y = _multiply(tl.trans(v), p.to(v.dtype), y * decay[None, :], EXACT)
        if SECOND_COLUMNS > 0:
            second_y = _multiply(
                tl.trans(second_v), p.to(second_v.dtype), second_y * decay[None, :], EXACT
            )
        is_head_end = work + 1 == head_begin + num_tiles
        if is_head_end | (work + 1 == work_end):
            total = tl.sum(sums, 0)
            unit = (1.0 / tl.where(total == 0.0, 1.0, total))[None, :]
            # Of base 2, as the exponents are.
            lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(total))
            head_y = tl.trans(y * unit)
            if SECOND_COLUMNS > 0:
                second_head_y = tl.trans(second_y * unit)
            if NUM_SPLITS == 0:
                has_first_tile = head_begin >= work_begin
                is_complete = has_first_tile & is_head_end
                slot = program * 2 + has_first_tile.to(tl.int32)
            else:
                is_complete = NUM_SPLITS == 1
                slot = program
            if is_complete:
                row_index = (sequence * num_kv_heads + kv_head) * GROUP + rows
                y_rows = merged + row_index * HEAD_DIM
                _store_columns(y_rows, head_y, is_row, tile_columns, is_tile_column)
                if SECOND_COLUMNS > 0:
                    _store_columns(y_rows, second_head_y, is_row, second_columns, is_second_column)
                if RETURNS_LSE:
                    tl.store(merged_lse + row_index, lse * LOG_2, mask=is_row)
            else:
                row_index = slot * GROUP + rows
                part_rows = partial_y + row_index * HEAD_DIM
                _store_columns(part_rows, head_y, is_row, tile_columns, is_tile_column)
                if SECOND_COLUMNS > 0:
                    _store_columns(
                        part_rows, second_head_y, is_row, second_columns, is_second_column
                    )
                tl.store(partial_lse + row_index, lse, mask=is_row)
        is_head_begin = is_head_end
        tile += TILE_STEP
        if NUM_SPLITS == 0:
            # The next head of this sequence, or the first one of the next sequence.
            is_next_sequence = is_head_end & (kv_head + 1 == num_kv_heads)
            sequence += (is_next_sequence & (sequence + 1 < num_sequences)).to(tl.int32)
            length = tl.load(seq_lens + sequence, mask=is_next_sequence, other=length).to(tl.int32)
            table_row = tl.load(table_rows + sequence, mask=is_next_sequence, other=table_row).to(
                tl.int64
            )
            first_key, end_key = _visible_keys(
                length, window, context_index, BLOCK_SIZE, HAS_WINDOW, CONTEXT
            )
            end_cached = tl.maximum(end_key - 1, 0) if WRITES else end_key
            kv_head = tl.where(is_next_sequence, 0, kv_head + is_head_end.to(tl.int32))
            head_begin += tl.where(is_head_end, num_tiles, 0)
            num_tiles = _count_tiles(first_key, end_key, KEYS)
            tile = tl.where(is_head_end, first_key // KEYS, tile)
        block = tl.load(
            block_table + table_row * table_stride + tile * KEYS // BLOCK_SIZE,
            mask=(work + 1 < work_end) & (tile * KEYS < end_cached),
            other=0,
        )
    if NUM_SPLITS != 1:
        # The first head of the range, and the last one if it does not end there, may be shared.
        shared = tl.arange(0, 2)
        is_first = shared == 0
        shared_index = tl.where(
            is_first,
            first_sequence * num_kv_heads + first_kv_head,
            sequence * num_kv_heads + kv_head,
        )
        if NUM_SPLITS == 0:
            shared_begin = tl.where(is_first, first_head_begin, head_begin)
            shared_end = shared_begin + tl.where(is_first, first_num_tiles, num_tiles)
            begin_program = _program_of(shared_begin, total_work, num_workers)
            num_parts = _program_of(shared_end - 1, total_work, num_workers) - begin_program + 1
            part = program - begin_program
            first_slot = 2 * begin_program + 1
            is_shared = is_first | (head_begin > first_head_begin)
            is_shared &= (num_parts > 1) & (shared_begin < work_end)
        else:
            num_parts = tl.full([2], NUM_SPLITS, tl.int32)
            part = tl.full([2], program % NUM_SPLITS, tl.int32)
            first_slot = program - part
            is_shared = is_first
        # Many parts are merged in groups first, by several programs at once.
        group_size = tl.where(num_parts > 2 * PARTS_OF_GROUP, PARTS_OF_GROUP, 1)
        num_groups = tl.cdiv(num_parts, group_size)
        group_begin = part // group_size * group_size
        group_parts = tl.minimum(group_size, num_parts - group_begin)
        group_slot = first_slot + tl.where(group_begin > 0, 1 + (group_begin - 1) * SLOT_STEP, 0)
        is_grouped = is_shared & (group_parts > 1)
        if tl.max(is_grouped.to(tl.int32), 0) == 1:
            group_counters = counters + num_sequences * num_kv_heads + group_slot
            is_last = _arrive(group_counters, group_parts, is_grouped)
            for i in tl.range(0, 2, num_stages=1):
                is_own = is_last & (shared == i)
                if tl.max(is_own.to(tl.int32), 0) == 1:
                    slot = tl.sum(tl.where(is_own, group_slot, 0), 0)
                    merged_y, lse = _merge_parts(
                        partial_y,
                        partial_lse,
                        slot,
                        slot
                        + tl.where(tl.sum(tl.where(is_own, group_begin, 0), 0) > 0, SLOT_STEP, 1),
                        SLOT_STEP,
                        tl.sum(tl.where(is_own, group_parts, 0), 0),
                        merged_rows,
                        columns,
                        is_merged,
                        HEAD_DIM,
                        GROUP,
                        MERGED_PARTS,
                    )
                    # The first part is overwritten.
                    tl.debug_barrier()
                    row_index = slot * GROUP + merged_rows
                    tl.store(partial_lse + row_index, lse, mask=merged_rows < GROUP)
                    tl.store(
                        partial_y + row_index[:, None] * HEAD_DIM + columns[None, :],
                        merged_y,
                        mask=is_merged,
                    )
            is_shared &= is_last | (group_parts == 1)
        is_last = _arrive(counters + shared_index, num_groups, is_shared)
    if NUM_SPLITS != 1:
        for i in tl.range(0, 2, num_stages=1):
            is_own = is_last & (shared == i)
            if tl.max(is_own.to(tl.int32), 0) == 1:
                slot = tl.sum(tl.where(is_own, first_slot, 0), 0)
                step = tl.sum(tl.where(is_own, group_size, 0), 0) * SLOT_STEP
                merged_y, lse = _merge_parts(
                    partial_y,
                    partial_lse,
                    slot,
                    slot + 1 + step - SLOT_STEP,
                    step,
                    tl.sum(tl.where(is_own, num_groups, 0), 0),
                    merged_rows,
                    columns,
                    is_merged,
                    HEAD_DIM,
                    GROUP,
                    MERGED_PARTS,
                )
                row_index = tl.sum(tl.where(is_own, shared_index, 0), 0) * GROUP + merged_rows
                tl.store(
                    merged + row_index[:, None] * HEAD_DIM + columns[None, :],
                    merged_y.to(merged.dtype.element_ty),
                    mask=is_merged,
                )
                if RETURNS_LSE:
                    tl.store(merged_lse + row_index, lse * LOG_2, mask=merged_rows < GROUP)


@dataclass(frozen=True, eq=False)
class OwnPages:
    """Attention to the pages of one rank of context, and where its log-sum-exps are stored."""

    context_size: int
    """Number of ranks of context."""
    context_index: int
    lse: Tensor
    """Log-sum-exps of all heads of each query, fp32 `[n, h]`."""


@dataclass(frozen=True)
class DecodeTiling:
    """How the decode kernel divides its work."""

    keys: int
    """Maximum number of keys of a tile, which is in one block."""
    programs_per_multiprocessor: int
    num_warps: int
    num_stages: int
    """One more than the tiles of a program that are in flight."""


def align_programs(num_programs: int, num_heads: int) -> int:
    """Returns a multiple of the number of heads if most of the programs remain, else all programs.

    If all sequences have the same length, each program then has a part of one head only.
    num_heads: of keys, of all sequences.
    """
    num_aligned = num_programs // num_heads * num_heads
    return num_aligned if num_aligned >= MIN_ALIGNED * num_programs else num_programs


def choose_decode_tiling(head_dim: int, itemsize: int, shared_memory: int) -> DecodeTiling:
    """Returns a tiling in which each of several programs of a multiprocessor has a tile in flight.

    Programs have few warps, as these wait for each other in each tile. The constants were measured
    on an H200, see docs/benchmarks/inference.md. shared_memory: bytes that a program can have.
    """
    row_bytes = sum(_split_columns(head_dim)) * itemsize

    def fit(keys: int, num_programs: int, num_warps: int, num_stages: int = 2) -> DecodeTiling:
        # Keys, values and queries.
        num_rows = 2 * keys * (num_stages - 1) + MIN_ROWS
        max_programs = shared_memory // (num_rows * row_bytes + RESERVED_BYTES)
        return DecodeTiling(keys, max(min(num_programs, max_programs), 1), num_warps, num_stages)

    if itemsize == 4:
        keys = max(min(TILE_BYTES // triton.next_power_of_2(row_bytes), 64), 16)
        return fit(keys, 2, num_warps=4)
    if head_dim <= 64:
        return fit(64, 6, num_warps=1, num_stages=3)
    if head_dim <= 128:
        return fit(32, 8, num_warps=1)
    return fit(32, 4, num_warps=2)


def _split_columns(head_dim: int) -> tuple[int, int]:
    """Returns the columns of a tile of keys, and of a second one: powers of two, or zero.

    A head of 80 has tiles of 64 and 16 columns instead of one of 128.
    """
    num_columns = max(16, triton.next_power_of_2(head_dim))
    second_columns = max(16, triton.next_power_of_2(head_dim - num_columns // 2))
    if second_columns < num_columns // 2:
        return num_columns // 2, second_columns
    return num_columns, 0


def _check_layout(keys: Tensor, values: Tensor) -> None:
    """Checks that keys and values have the same strides, and that a key is contiguous."""
    assert keys.stride() == values.stride() and keys.stride(-1) == 1, (
        keys.stride(),
        values.stride(),
    )


def _rows_of(cache: Tensor, keys: int, num_columns: int) -> Any:
    """Returns a descriptor of the rows of a cache, of which a tile has `keys` in sequence."""
    rows = cache.view(-1, cache.shape[-1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, num_columns])


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
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """Attends from queries, `[n, h, k]`, to the first tokens of their sequences in the cache.

    table_rows: row of each query in `block_table`, `[n]`; seq_lens: number of tokens it sees.
    new: key and value of the last of these tokens, `[n, g, k]` each, which the cache does not have
    yet; they are written to it. Then each query must be of another sequence, and `num_splits` 0.
    counters: int32, of `num_split_counters(n, g)`, zeros before and after. num_splits: number of
    splits of a sequence, so that the order of additions depends on it and on the length of the
    sequence only; 0 divides the tiles of all sequences equally. own: attends to the pages of one
    rank of context only, without `new`; the result is then in fp32.

    A contiguous cache has finite values in all slots of the last block of a sequence, as
    `write_cache` and this function leave them; in other caches only those of tokens are read.

    On Hopper or newer GPUs the kernel starts while the kernel before it ends, which must not write
    `block_table`, `table_rows` and `seq_lens`, nor with `new` the cache.
    """
    assert new is None or (own is None and num_splits == 0), (
        "fixed splits and own pages attend to a cache that has all keys"
    )
    _check_layout(cache.keys, cache.values)
    num_sequences, num_heads, head_dim = q.shape
    max_sequences = MAX_PARTIAL_ELEMENTS // (max(num_splits, 1) * num_heads * head_dim)
    if num_splits and num_sequences > max_sequences:
        slices = [slice(i, i + max_sequences) for i in range(0, num_sequences, max_sequences)]
        results = [
            decode_attention(
                q[queries],
                cache,
                block_table,
                table_rows[queries],
                seq_lens[queries],
                counters=counters,
                window=window,
                cap=cap,
                num_splits=num_splits,
                own=own and replace(own, lse=own.lse[queries]),
                tiling=tiling,
            )
            for queries in slices
        ]
        return torch.cat(results)
    kv_heads = cache.keys.shape[1]
    group = num_heads // kv_heads
    num_multiprocessors, shared_memory = device_limits(q.device.index)
    num_pairs = num_sequences * kv_heads
    if tiling is None:
        tiling = choose_decode_tiling(head_dim, q.element_size(), shared_memory)
    if num_splits:
        num_programs = num_slots = num_pairs * num_splits
        assert num_splits <= 2 * PARTS_OF_GROUP.value or num_slots <= MAX_PARTS, num_splits
    else:
        num_programs = num_multiprocessors * tiling.programs_per_multiprocessor
        num_programs = align_programs(min(num_programs, MAX_PARTS // 2), num_pairs)
        num_slots = 2 * num_programs
    y_dtype = q.dtype if own is None else torch.float32
    y = torch.empty((num_sequences, num_heads, head_dim), dtype=y_dtype, device=q.device)
    partial_y = torch.empty((num_slots, group, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_slots, group), dtype=torch.float32, device=q.device)
    if counters is None:
        num_counters = num_split_counters(num_sequences, kv_heads)
        counters = torch.zeros(num_counters, dtype=torch.int32, device=q.device)
    sequences_at_once = MIN_SEQUENCES_AT_ONCE
    if num_sequences > MIN_SEQUENCES_AT_ONCE:
        sequences_at_once = MAX_SEQUENCES_AT_ONCE
    is_dependent = has_dependent_launch(q.device.index)
    new_keys, new_values = new if new is not None else (q, q)
    merged_rows = triton.next_power_of_2(group)
    columns = max(16, triton.next_power_of_2(head_dim))
    row_bytes = head_dim * cache.keys.element_size()
    has_descriptors = cache.keys.is_contiguous() and row_bytes % DESCRIPTOR_ALIGNMENT == 0
    keys = min(tiling.keys if has_descriptors else POINTER_KEYS, cache.block_size)
    tile_columns, second_columns = _split_columns(head_dim) if has_descriptors else (columns, 0)
    _decode_kernel[(num_programs,)](
        q,
        new_keys,
        new_values,
        cache.keys,
        cache.values,
        _rows_of(cache.keys, keys, tile_columns) if has_descriptors else None,
        _rows_of(cache.values, keys, tile_columns) if has_descriptors else None,
        _rows_of(cache.keys, keys, second_columns) if second_columns else None,
        _rows_of(cache.values, keys, second_columns) if second_columns else None,
        block_table,
        table_rows,
        seq_lens,
        partial_y,
        partial_lse,
        y,
        partial_lse if own is None else own.lse,
        counters,
        head_dim**-0.5,
        cap,
        window,
        q.stride(0),
        q.stride(1),
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *cache.keys.stride()[:2],
        block_table.stride(0),
        num_sequences,
        kv_heads,
        0 if own is None else own.context_index,
        GROUP=group,
        GROUP_ROWS=max(MIN_COLUMNS, triton.next_power_of_2(group)),
        MERGED_ROWS=merged_rows,
        MERGED_PARTS=max(2, min(8, MERGED_ELEMENTS * tiling.num_warps // merged_rows // columns)),
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=columns,
        TILE_COLUMNS=tile_columns,
        SECOND_COLUMNS=second_columns,
        SLOT_STRIDE=cache.keys.stride(2),
        BLOCK_SIZE=cache.block_size,
        KEYS=keys,
        NUM_SPLITS=num_splits,
        HAS_CAP=cap > 0.0,
        HAS_WINDOW=window > 0,
        WRITES=new is not None,
        CONTEXT=1 if own is None else own.context_size,
        RETURNS_LSE=own is not None,
        EXACT=q.dtype == torch.float32,
        IS_DEPENDENT=is_dependent,
        SEQUENCES_AT_ONCE=sequences_at_once,
        HAS_ONE_CHUNK=num_sequences <= sequences_at_once,
        HAS_DESCRIPTORS=has_descriptors,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=MAX_REGISTERS,
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
    num_kv_heads,
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
    # The last tiles of a sequence see most, and come first. Only the first dimension of a grid may
    # have more than 65,535 programs.
    num_tiles = tl.num_programs(0) // num_kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // num_kv_heads
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
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
        if EXACT:
            # Without tensor cores a mask costs little, and a second loop as much to compile.
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
                keys + at[:, None] + columns[None, :],
                values + at[:, None] + columns[None, :],
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
                keys + at[:, None] + columns[None, :],
                values + at[:, None] + columns[None, :],
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
    columns = max(16, triton.next_power_of_2(head_dim))
    is_exact = q.dtype == torch.float32
    if is_exact:
        rows = min(rows, CHUNK_ROWS, EXACT_CHUNK_ELEMENTS // columns)
    elif head_dim > 128:
        # More does not fit into registers.
        rows = min(rows, CHUNK_ROWS)
    tokens = max(rows // group_rows, 1)
    num_sequences = len(seq_lens)
    is_dependent = has_dependent_launch(q.device.index)
    _check_layout(cache.keys, cache.values)
    _chunk_kernel[(kv_heads * (num_tokens // tokens + num_sequences),)](
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
        kv_heads,
        num_sequences,
        0 if own is None else own.context_index,
        GROUP=group,
        GROUP_ROWS=group_rows,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        HEAD_COLUMNS=columns,
        BLOCK_SIZE=cache.block_size,
        KEYS=EXACT_CHUNK_KEYS if is_exact else CHUNK_KEYS,
        HAS_CAP=cap > 0.0,
        HAS_WINDOW=window > 0,
        CONTEXT=1 if own is None else own.context_size,
        RETURNS_LSE=own is not None,
        EXACT=is_exact,
        IS_DEPENDENT=is_dependent,
        num_warps=8 if is_exact else 4,
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
    CLEARS_VALUES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Writes the keys and the values of one head of some tokens into their slots."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    is_token = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens, mask=is_token, other=0)
    columns = tl.arange(0, HEAD_COLUMNS)[None, :]
    inside = is_token[:, None] & (columns < HEAD_DIM)
    at = slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * slot_stride
    value_rows = values + at + head * kv_head_stride
    at = at[:, None] + head * kv_head_stride + columns
    key = tl.load(
        k + tokens[:, None] * k_token_stride + head * k_head_stride + columns, mask=inside
    )
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
    value = tl.load(
        v + tokens[:, None] * v_token_stride + head * v_head_stride + columns, mask=inside
    )
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)
    if CLEARS_VALUES:
        offset = slots % BLOCK_SIZE
        has_first = is_token & (tokens >= offset)
        first = tl.load(slot_mapping + tokens - offset, mask=has_first, other=-1)
        next_slot = tl.load(slot_mapping + tokens + 1, mask=tokens + 1 < num_tokens, other=-1)
        is_last = is_token & (first == slots - offset) & (next_slot != slots + 1)
        num_cleared = tl.where(is_last, BLOCK_SIZE - 1 - offset, 0)
        _clear_values(value_rows, num_cleared, slot_stride, HEAD_DIM, HEAD_COLUMNS)


def write_cache(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    *,
    clears_values: bool = True,
) -> None:
    """Writes keys and values of tokens, `[T, g, k]` each, into their slots.

    clears_values: if the first token of a block is written, clears the values after the last token
    of the block, of which the decode kernel loads whole tiles.
    """
    assert k.stride(-1) == v.stride(-1) == 1, (k.stride(), v.stride())
    _check_layout(keys, values)
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
        CLEARS_VALUES=clears_values,
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
    clears_values: bool,
    num_splits: int,
) -> Tensor:
    """Writes the cache, and attends from each token to its sequence up to itself.

    num_splits: 0 if there is one token of each sequence, which then needs no pass to write it.
    """
    new = None
    if num_splits:
        write_cache(k, v, keys, values, slot_mapping, clears_values=clears_values)
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
    clears_values: bool,
) -> Tensor:
    """Writes the cache, and attends from decodes, which come first, and from prompts."""
    write_cache(k, v, keys, values, slot_mapping, clears_values=clears_values)
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
    clears_values: bool,
) -> Tensor:
    """Writes the cache, and attends from all tokens, without a length on the host."""
    write_cache(k, v, keys, values, slot_mapping, clears_values=clears_values)
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
        "bool clears_values, int num_splits",
    ),
    (
        "paged_chunks",
        _attend_captured_step,
        "Tensor query_start_loc, Tensor seq_lens, int window, float cap, bool clears_values",
    ),
    (
        "paged_mixed",
        _attend_mixed_step,
        "Tensor token_rows, Tensor token_lens, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor host_lens, int window, float cap, bool clears_values",
    ),
):
    _LIBRARY.define(f"{_name}({_COMMON}, {_arguments}) -> Tensor")
    # `host_lens` is on the host, so that the key of a device cannot select the implementation.
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ranvier::{_name}", _empty_like_queries, lib=_LIBRARY)


def find_unsupported(cache: KVCache) -> str:
    """Returns what of a cache the kernels do not support, or an empty string."""
    head_dim = cache.keys.shape[-1]
    if cache.keys.dtype not in CACHE_DTYPES:
        return f"a cache in {cache.keys.dtype}"
    if cache.block_size not in BLOCK_SIZES:
        return f"blocks of {cache.block_size} tokens"
    return f"heads of {head_dim} features" if head_dim > MAX_HEAD_DIM else ""


def _clears_values(sequences: PagedSequences) -> bool:
    """Whether the kernels clear values; tokens that exit early are not written by them."""
    return sequences.early_exit is None


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
    options = (window, cap, _clears_values(sequences))
    if sequences.is_decode:
        decoded: Tensor = torch.ops.ranvier.paged_decode(
            q, k, v, *where, *rows, sequences.split_counters, *options, 0
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
            *options,
        )
        return chunks
    lens = (sequences.query_start_loc, sequences.seq_lens, sequences.host_lens)
    mixed: Tensor = torch.ops.ranvier.paged_mixed(q, k, v, *where, *rows, *lens, *options)
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
    where = (cache.keys, cache.values, sequences.slot_mapping)
    write_cache(k, v, *where, clears_values=_clears_values(sequences))
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
        _clears_values(sequences),
        INVARIANT_SPLITS,
    )
    return y
