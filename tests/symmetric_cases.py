"""Inputs and results of collectives over symmetric memory, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLLECTIVES = ("one_shot_all_reduce", "two_shot_all_reduce", "all_gather", "reduce_scatter")


def same_bits(have: Tensor, want: Tensor) -> bool:
    kind = INTEGERS[have.element_size()]
    return have.shape == want.shape and torch.equal(have.view(kind), want.view(kind))


def values_of(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Values of very different magnitude, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)
    exponents = torch.randint(-12, 13, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponents
    # A small value is lost if it is added to a large one before that has been cancelled.
    values[1::2] = (2.0**15, -(2.0**15), 2.0**-12)[seed % 3]
    values[:1] = -0.0
    return values.to(dtype)


def plain_sum(addends: Sequence[Tensor]) -> Tensor:
    """The sum from left to right, one element after the other."""
    wide = torch.float32 if addends[0].element_size() == 2 else addends[0].dtype
    total = addends[0].to(wide)
    for addend in addends[1:]:
        total = total + addend.to(wide)
    return total.to(addends[0].dtype)


def expected(name: str, inputs: Sequence[Tensor], index: int) -> Tensor:
    if name == "all_gather":
        return torch.cat(list(inputs))
    total = plain_sum(inputs)
    return total.chunk(len(inputs))[index] if name == "reduce_scatter" else total
