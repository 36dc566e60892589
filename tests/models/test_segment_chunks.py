"""Attention in chunks keeps no mask of all scores between its passes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ranvier.models.segment_attention import SegmentAttention


@pytest.mark.parametrize("window", [0, 300])
def test_no_mask_is_kept_between_passes(window: int) -> None:
    """A rank keeps about a number per row; masks of all chunks would be about `s²` / 2 bytes."""
    s = 2048
    attention = SegmentAttention(((0, s, 0, s),), s, s, window=window)
    q, k, v = (torch.randn(s, 1, 2, dtype=torch.float64) for _ in range(3))
    o, lse = attention.forward(q, k, v)
    attention.backward(o, q, k, v, o, lse)
    kept = 0
    for chunks in attention._chunks.values():
        for chunk in chunks:
            for field in dataclasses.fields(chunk):
                value = getattr(chunk, field.name)
                kept += value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
    assert 0 < kept < 32 * s
