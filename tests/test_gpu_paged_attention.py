"""The Triton kernels of paged attention are the plain attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ranvier.infer.step_input import SequenceChunk, build_sequences
from ranvier.models.paged_attention import (
    KVCache,
    PagedSequences,
    num_split_counters,
    paged_attention,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(32, 8, 128), (4, 4, 64), (6, 2, 80), (16, 1, 256), (12, 4, 24), (12, 4, 12)]
"""Heads, kv heads and head dim."""


def make_step(
    shape: tuple[int, int, int],
    chunks: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    padding: int = 0,
) -> tuple[tuple[Tensor, Tensor, Tensor], KVCache, PagedSequences]:
    """Random tokens of sequences with a random history; chunks: new tokens, tokens in all."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    counts = [-(-total // block_size) for _, total in chunks]
    order = torch.randperm(sum(counts)).add(1).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    caches = torch.randn(2, sum(counts) + 1, kv_heads, block_size, head_dim).cuda().to(dtype)
    for (_, total), own_blocks in zip(chunks, blocks, strict=True):
        # Kernels clear the values after the last token.
        caches[1, own_blocks[-1], :, total - (len(own_blocks) - 1) * block_size :] = 0.0
    tokens = sum(new for new, _ in chunks) + padding
    sequences = build_sequences(
        [
            SequenceChunk([0] * new, total - new, total, own_blocks)
            for (new, total), own_blocks in zip(chunks, blocks, strict=True)
        ],
        tokens,
        block_size,
        torch.device("cuda"),
    )
    q = torch.randn(tokens, heads, head_dim).cuda().to(dtype)
    k, v = torch.randn(2, tokens, kv_heads, head_dim).cuda().to(dtype).unbind(0)
    return (q, k, v), KVCache(*caches.unbind(0)), sequences


def spoil_new_blocks(
    values: Tensor, sequences: PagedSequences, chunks: list[tuple[int, int]]
) -> None:
    """Fills blocks that no token of these sequences has been written to, as of earlier ones."""
    block_size = values.shape[2]
    for i, (new, total) in enumerate(chunks):
        first_new_block = -(-(total - new) // block_size)
        for block in sequences.block_table[i, first_new_block : -(-total // block_size)]:
            values[block] = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (0, 5.0), (100, 5.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_plain_attention(
    shape: tuple[int, int, int], window: int, cap: float, block_size: int, dtype: torch.dtype
) -> None:
    from ranvier.infer import paged_kernels

    for chunks in (
        [(1, 1), (1, 16), (1, 65), (1, 700)],
        [(1, 300), (1, 5), (7, 7), (40, 40), (33, 200), (2, 513)],
    ):
        inputs, cache, sequences = make_step(shape, chunks, block_size, dtype, padding=3)
        copies = KVCache(cache.keys.clone(), cache.values.clone())
        spoil_new_blocks(cache.values, sequences, chunks)
        have = paged_kernels.paged_attention(*inputs, cache, sequences, window, cap)
        wide = KVCache(copies.keys.double(), copies.values.double())
        want = paged_attention(*(x.double() for x in inputs), wide, sequences, window, cap)
        tokens = sum(sequences.query_lens)
        far = float((have[:tokens].double() - want[:tokens]).abs().max())
        assert far < (2e-5 if dtype == torch.float32 else 3e-2), (chunks, far)
        # Padding is written to block 0, in any order.
        assert torch.equal(cache.keys[1:].double(), wide.keys[1:]), "the same is written"
        assert torch.equal(cache.values[1:].double(), wide.values[1:])
        # As in a CUDA graph, in which the host knows no length.
        unknown = dataclasses.replace(sequences, host_lens=None)
        again = paged_kernels.paged_attention(*inputs, copies, unknown, window, cap)
        far = float((again[:tokens].double() - want[:tokens]).abs().max())
        assert far < (2e-5 if dtype == torch.float32 else 3e-2), (chunks, far)
        assert torch.equal(copies.keys[1:], cache.keys[1:])


def test_partial_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch-invariant steps of many tokens are several calls of the kernel, with the same bits."""
    from ranvier.infer import paged_kernels

    chunks = [(1, 3), (40, 90), (30, 200), (1, 150)]
    (q, _, _), cache, many = make_step((32, 8, 128), chunks, 64, torch.bfloat16)
    where = (cache, many.block_table, many.token_rows, many.token_lens)
    expected = paged_kernels.decode_attention(q, *where, num_splits=4)
    monkeypatch.setattr(paged_kernels, "MAX_PARTIAL_ELEMENTS", 4 * 32 * 128 * 25)
    assert torch.equal(paged_kernels.decode_attention(q, *where, num_splits=4), expected)


@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_a_sequence_does_not_depend_on_its_neighbors(num_splits: int) -> None:
    from ranvier.infer.paged_kernels import decode_attention

    # With so many heads, a step without splits has other tiles.
    (q, _, _), cache, many = make_step(
        (32, 8, 128), [(1, 100 + 37 * i) for i in range(75)], 64, torch.bfloat16
    )
    where = (cache, many.block_table)
    whole = decode_attention(q, *where, many.token_rows, many.token_lens, num_splits=num_splits)
    for row in (0, 17, 74):
        some = slice(row, row + 1)
        one = decode_attention(
            q[some], *where, many.token_rows[some], many.token_lens[some], num_splits=num_splits
        )
        assert torch.equal(one[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 5.0)])
def test_batch_invariant_attention_is_that_of_each_token_alone(
    window: int, cap: float, dtype: torch.dtype
) -> None:
    from ranvier.infer.paged_kernels import batch_invariant_attention

    chunks = [(1, 300), (7, 7), (40, 90), (33, 200)]
    inputs, cache, sequences = make_step((8, 2, 64), chunks, 16, dtype, padding=5)
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in inputs), wide, sequences, window, cap)
    have = batch_invariant_attention(*inputs, cache, sequences, window, cap)
    tokens = sum(sequences.query_lens)
    far = float((have[:tokens].double() - want[:tokens]).abs().max())
    assert far < (2e-5 if dtype == torch.float32 else 3e-2), far
    for token in (0, 1, 7, 20, tokens - 1):
        one = slice(token, token + 1)
        alone = PagedSequences(
            query_start_loc=sequences.query_start_loc,
            seq_lens=sequences.token_lens[one],
            block_table=sequences.block_table,
            slot_mapping=sequences.slot_mapping[one],
            rope_lengths=sequences.rope_lengths,
            token_rows=sequences.token_rows[one],
            token_lens=sequences.token_lens[one],
        )
        own = [x[one] for x in inputs]
        # The keys before it are written; the first token of a block clears the values after it.
        cache.keys.copy_(wide.keys)
        cache.values.copy_(wide.values)
        again = batch_invariant_attention(*own, cache, alone, window, cap)
        assert torch.equal(again[0], have[token]), token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (100, 5.0)])
@pytest.mark.parametrize(
    "shape", [*SHAPES, (6, 2, 48), (6, 2, 50), (4, 2, 100), (8, 1, 192)], ids=str
)
def test_decode_that_writes_equals_plain_attention(
    shape: tuple[int, int, int], window: int, cap: float, dtype: torch.dtype
) -> None:
    from ranvier.infer.paged_kernels import decode_attention

    chunks = [(1, 1), (1, 16), (1, 64), (1, 65), (1, 333), (1, 700)]
    (q, k, v), cache, sequences = make_step(shape, chunks, 64, dtype)
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in (q, k, v)), wide, sequences, window, cap)
    spoil_new_blocks(cache.values, sequences, chunks)
    have = decode_attention(
        q,
        cache,
        sequences.block_table,
        sequences.token_rows,
        sequences.token_lens,
        new=(k, v),
        window=window,
        cap=cap,
    )
    difference = float((have.double() - want).abs().max())
    assert difference < (2e-5 if dtype == torch.float32 else 3e-2), difference
    assert torch.equal(cache.keys.double(), wide.keys)
    assert torch.equal(cache.values.double(), wide.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_sequences", [40, 300])
def test_decode_of_many_sequences_equals_plain_attention(
    num_sequences: int, dtype: torch.dtype
) -> None:
    """Their lengths are read 32 or 256 at once."""
    from ranvier.infer.paged_kernels import decode_attention

    chunks = [(1, 1 + 7 * i % 50) for i in range(num_sequences)]
    (q, k, v), cache, sequences = make_step((4, 2, 64), chunks, 16, dtype)
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in (q, k, v)), wide, sequences)
    spoil_new_blocks(cache.values, sequences, chunks)
    where = (cache, sequences.block_table, sequences.token_rows, sequences.token_lens)
    have = decode_attention(q, *where, new=(k, v))
    difference = float((have.double() - want).abs().max())
    assert difference < (2e-5 if dtype == torch.float32 else 3e-2), difference
    assert torch.equal(cache.values.double(), wide.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 2, 100)], ids=str)
def test_decode_reads_caches_in_another_order(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Other servers have the slots of a block before its kv heads, and do not clear them."""
    from ranvier.infer.paged_kernels import decode_attention

    chunks = [(1, 16), (1, 65), (1, 333)]
    (q, k, v), cache, sequences = make_step(shape, chunks, 64, dtype)
    keys, values = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.keys, cache.values)
    )
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in (q, k, v)), wide, sequences)
    for i, (_, total) in enumerate(chunks):
        last_block = sequences.block_table[i, (total - 1) // 64]
        values[last_block, :, (total - 1) % 64 + 1 :] = float("nan")
    where = (sequences.block_table, sequences.token_rows, sequences.token_lens)
    # The first call writes the new keys, the others read them.
    for options in ({"new": (k, v)}, {}, {"num_splits": 4}):
        have = decode_attention(q, KVCache(keys, values), *where, **options)
        difference = float((have.double() - want).abs().max())
        assert difference < (2e-5 if dtype == torch.float32 else 3e-2), (options, difference)
        assert torch.equal(keys.double(), wide.keys)
        assert torch.equal(values.double().nan_to_num(), wide.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 1, 64), (4, 2, 100)], ids=str)
def test_prompts_are_written_to_caches_in_another_order(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    from ranvier.infer import paged_kernels

    chunks = [(1, 65), (7, 7), (40, 90), (33, 200)]
    inputs, cache, sequences = make_step(shape, chunks, 64, dtype)
    others = KVCache(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.keys, cache.values))
    )
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in inputs), wide, sequences)
    spoil_new_blocks(others.values, sequences, chunks)
    have = paged_kernels.paged_attention(*inputs, others, sequences)
    difference = float((have.double() - want).abs().max())
    assert difference < (2e-5 if dtype == torch.float32 else 3e-2), difference
    assert torch.equal(others.keys.double(), wide.keys)
    assert torch.equal(others.values.double(), wide.values)


def test_a_fixed_number_of_splits_refuses_new_keys() -> None:
    from ranvier.infer.paged_kernels import decode_attention

    (q, k, v), cache, sequences = make_step((8, 2, 64), [(1, 100)], 64, torch.bfloat16)
    where = (cache, sequences.block_table, sequences.token_rows, sequences.token_lens)
    with pytest.raises(AssertionError, match="attend to a cache that has all keys"):
        decode_attention(q, *where, new=(k, v), num_splits=4)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_writes_and_merges_in_one_kernel(
    dtype: torch.dtype, window: int, cap: float, merges: bool
) -> None:
    from ranvier.infer.paged_kernels import decode_attention, write_cache

    chunks = [(1, 1), (1, 16), (1, 17), (1, 65), (1, 700)]
    (q, k, v), cache, sequences = make_step((8, 2, 64), chunks, 16, dtype)
    wide = KVCache(cache.keys.double(), cache.values.double())
    want = paged_attention(*(x.double() for x in (q, k, v)), wide, sequences, window, cap)
    counters = torch.zeros(num_split_counters(5, 2), dtype=torch.int32, device="cuda")
    for num_splits in (0, 4, 16):
        if num_splits:
            # A fixed number of splits writes before it attends.
            write_cache(k, v, cache.keys, cache.values, sequences.slot_mapping)
        have = decode_attention(
            q,
            cache,
            sequences.block_table,
            sequences.token_rows,
            sequences.token_lens,
            new=None if num_splits else (k, v),
            counters=counters if merges else None,
            window=window,
            cap=cap,
            num_splits=num_splits,
        )
        far = float((have.double() - want).abs().max())
        assert far < (2e-5 if dtype == torch.float32 else 3e-2), (num_splits, far)
        assert torch.equal(cache.keys.double(), wide.keys)
        assert torch.equal(cache.values.double(), wide.values)
        assert not counters.any()


def test_caches_that_no_kernel_supports_are_named() -> None:
    from ranvier.infer.paged_kernels import find_unsupported

    def find(head_dim: int, block_size: int, dtype: torch.dtype) -> str:
        cache = torch.zeros(2, 1, block_size, head_dim, dtype=dtype)
        return find_unsupported(KVCache(cache, cache))

    assert find(100, 16, torch.bfloat16) == "", "a key has 200 bytes"
    assert find(256, 128, torch.float32) == ""
    assert find(320, 16, torch.bfloat16) == "heads of 320 features"
    assert find(64, 8, torch.bfloat16) == "blocks of 8 tokens"
    assert find(64, 16, torch.float64) == "a cache in torch.float64"
