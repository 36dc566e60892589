"""Kept elements: dense and compressed tensors are the same numbers, whatever is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranvier.buckets import sparsity as module
from ranvier.buckets.sparsity import SparsityMask, pack_bits, unpack_bits


def masks(rows: int, size: int, share: float, seed: int = 0) -> Tensor:
    """Random bools; the last elements of a row are padding."""
    found = torch.rand(rows, size, generator=torch.Generator().manual_seed(seed)) < share
    found[:, size - 3 :] = False
    return found


def kept_of(
    mask: Tensor, *, mine: int = 0, ranks: int = 1, edges: tuple[int, ...] = ()
) -> SparsityMask:
    bits = torch.stack([pack_bits(row) for row in mask])
    return SparsityMask(bits, mask.shape[1], edges, mine=mine, ranks=ranks)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_bits_hold_bools(size: int) -> None:
    mask = torch.rand(size) < 0.5
    bits = pack_bits(mask)
    assert bits.nbytes == -(-size // 8)
    assert torch.equal(unpack_bits(bits)[:size], mask) and not unpack_bits(bits)[size:].any()


@pytest.mark.parametrize("share", [0.5, 0.02], ids=["bits", "positions"])
@pytest.mark.parametrize("chunk", [64, 2**24])
def test_there_and_back(monkeypatch: pytest.MonkeyPatch, share: float, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    mask, edges = masks(3, 1001, share), (0, 333, 600, 998)
    stay = mask.sum(1).tolist()
    for mine in range(3):
        kept = kept_of(mask, mine=mine, ranks=4, edges=edges)
        assert kept.row_counts == stay and kept.compressed_size == -(-max(stay) // 4) * 4
        assert kept.num_bytes == min(3 * 126, 4 * sum(stay)) and (kept.num_bytes == 378) == (
            share == 0.5
        )
        assert [kept.compressed_offset(edge) for edge in edges] == [
            int(mask[mine, :e].sum()) for e in edges
        ]
        assert torch.equal(kept.dense_mask(5, 700), mask[mine, 5:700])
        dense = torch.randn(1001) * mask[mine]
        row = kept.compress_range(dense, 0, 0, kept.compressed_size)
        assert torch.equal(row[: stay[mine]], dense[mask[mine]]) and not row[stay[mine] :].any()
        part = kept.compress_range(
            dense[333:600], 333, kept.compressed_offset(333), kept.compressed_offset(600)
        )
        assert torch.equal(part, dense[333:600][mask[mine, 333:600]])
        back = torch.zeros(1001)
        kept.write_dense(back, 0, 3, row[3:])
        kept.write_dense(back, 0, 0, row[:3])
        assert torch.equal(back, dense)
        noisy = torch.randn(1001)
        kept.zero_pruned(noisy)
        assert torch.equal(noisy != 0, mask[mine])


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_ranges_over_data_cover_all_once(share: float) -> None:
    kept = kept_of(masks(1, 1001, share), ranks=8)
    step, bounds = kept.compressed_size // 8, kept.shard_bounds
    assert bounds[0] == 0 and bounds[-1] == 1001 and len(bounds) == 9
    for rank in range(8):
        inside = kept.dense_mask(0, 1001)[bounds[rank] : bounds[rank + 1]].sum()
        assert inside == max(min(step, kept.row_counts[0] - rank * step), 0)


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_rows_of_all_ranks_are_added_compressed(share: float) -> None:
    mask = masks(3, 1001, share)
    kept = kept_of(mask, ranks=2, edges=(100, 700))
    grad = torch.randn(3, 600, dtype=torch.bfloat16)
    into = torch.ones(3, kept.compressed_size)
    kept.add_to_compressed(into, grad, 100)
    for row in range(3):
        low, high = int(mask[row, :100].sum()), int(mask[row, :700].sum())
        want = torch.ones(kept.compressed_size)
        want[low:high] += grad[row, mask[row, 100:700]]
        assert torch.equal(into[row], want)


def test_nothing_stays_or_all_does() -> None:
    none = kept_of(torch.zeros(1, 20, dtype=torch.bool), ranks=2)
    assert none.compressed_size == 0 and none.num_bytes == 0 and none.shard_bounds == [0, 20, 20]
    assert (
        none.compress_range(torch.ones(20), 0, 0, 0).numel() == 0
        and not none.dense_mask(0, 20).any()
    )
    every = kept_of(torch.ones(1, 20, dtype=torch.bool), ranks=2)
    assert every.compressed_size == 20 and every.shard_bounds == [0, 10, 20]
