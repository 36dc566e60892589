"""Reductions with a fixed order, so that all ranks get the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_in_order(parts: Sequence[Tensor], out: Tensor, op: Reduction = "sum") -> None:
    """Reduces tensors from left to right into `out`, which may be one of them.

    Sums of 16-bit values are computed in fp32 and rounded once.
    """
    combine = REDUCTIONS[op]
    # torch adds two 16-bit values in fp32 as well.
    if len(parts) == 2:
        combine(parts[0], parts[1], out=out)
        return
    if op == "sum" and out.is_floating_point() and out.element_size() < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    total = combine(parts[0], parts[1])
    for part in parts[2:]:
        combine(total, part, out=total)
    out.copy_(total)
