"""Tensors with zeros: written as dense ones, from the numbers that stay and bits."""

from __future__ import annotations

import random

import pytest
import torch

from ranvier.buckets.sparsity import CompressedTensor, pack_bits
from ranvier.checkpoint.rank_file import SparseBytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3])
def test_bytes_are_those_of_the_dense_tensor(dtype: torch.dtype, share: float) -> None:
    size, drawn = 2 * SparseBytes.COUNT_STEP + 77, random.Random(0)
    mask = torch.rand(size, generator=torch.Generator().manual_seed(0)) < share
    dense = torch.where(mask, torch.randn(size), 0.0).to(dtype)
    values = dense[mask]
    held = memoryview(values.view(torch.uint8).numpy().data)
    pieces = [held[: len(held) // 3], held[len(held) // 3 :]]
    made = SparseBytes(pieces, CompressedTensor(values, pack_bits(mask), size), dtype)
    want = memoryview(dense.view(torch.uint8).numpy().data)
    assert len(made) == len(want) and made[:] == want
    for _ in range(20):
        low, high = sorted(drawn.randrange(len(want) + 1) for _ in range(2))
        assert made[low:high] == want[low:high], (low, high)


def test_a_mask_is_its_own_bits() -> None:
    mask = torch.rand(1000) < 0.5
    made = SparseBytes(
        [], CompressedTensor(torch.zeros(0, dtype=torch.uint8), pack_bits(mask), 1000), torch.uint8
    )
    assert bytes(made[3:999]) == bytes(mask[3:999].to(torch.uint8).tolist())
