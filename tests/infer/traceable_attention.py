"""Plain paged attention that the compiler can trace, in place of the kernels of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier.models.paged_attention import (
    KVCache,
    PagedSequences,
    _attend_with_sums,
    find_visible_keys,
)


def traceable_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """As `paged_attention`, without a length on the host; every token reads its whole sequence."""
    cache.write(k, v, sequences.slot_mapping)
    keys, values = cache.read(sequences.block_table[sequences.token_rows.long()])  # (T, g, L, k)
    tokens = torch.arange(len(q), device=q.device).unsqueeze(1)
    visible = find_visible_keys(tokens, keys.shape[2], cache.block_size, sequences, window)
    y, _ = _attend_with_sums(q.unsqueeze(1), keys, values, visible, cap)  # (T, 1, h, k)
    return y.squeeze(1)
