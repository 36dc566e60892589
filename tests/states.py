"""States: whole tensors put together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ranvier.sharding import ShardedStateDict


def assemble(parts: Iterable[ShardedStateDict]) -> dict[str, Tensor]:
    """Whole tensors from the states of all ranks, in the shape of their places."""
    whole: dict[str, Tensor] = {}
    for state in parts:
        for name, (part, place) in state.items():
            if name not in whole:
                whole[name] = torch.zeros(place.global_shape, dtype=part.dtype)
            place.write_into(whole[name], part.cpu())
    return whole
