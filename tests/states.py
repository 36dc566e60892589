"""States: whole tensors put together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ranvier.sharding import State


def assemble(parts: Iterable[State]) -> dict[str, Tensor]:
    """Whole tensors from the states of all ranks, in the shape of their places."""
    whole: dict[str, Tensor] = {}
    for state in parts:
        for name, (part, place) in state.items():
            if name not in whole:
                whole[name] = torch.zeros(place.whole, dtype=part.dtype)
            place.put(whole[name], part.cpu())
    return whole
