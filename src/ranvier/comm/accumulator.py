"""Sums of gradients of the ranges of a flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

Pieces = list[tuple[int, Tensor]]
"""Flat parts that lie one after the other, each with where it begins."""


class GradientAccumulator:
    """A sum of gradients of ranges of a flat buffer; a range that came once is kept as it came.

    So a step of one micro-batch copies no gradient and keeps its type; further ones are added in a
    wide type.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self.dtype = dtype
        self.parts: dict[tuple[int, int], Tensor] = {}
        """By the range they cover; ranges do not overlap."""

    def add_grad(self, start: int, grad: Tensor) -> None:
        """Add the gradient of the range that begins at `start`."""
        grad = grad.reshape(-1)
        key = (start, start + grad.numel())
        if key in self.parts:  # never in place: the first one is not ours
            self.parts[key] = self.parts[key].to(self.dtype) + grad
        elif any(low < key[1] and start < high for low, high in self.parts):
            whole = self.flat_grad(grad.device).clone()
            whole[start : key[1]] += grad
            self.parts = {(0, self.size): whole}
        else:
            self.parts[key] = grad

    def covering_pieces(self, device: torch.device) -> Pieces:
        """All ranges in order with where they begin, zeros where no gradient came."""
        out = Pieces()
        at = 0
        for (start, stop), part in sorted(self.parts.items(), key=lambda item: item[0]):
            if start > at:
                out.append((at, torch.zeros(start - at, dtype=self.dtype, device=device)))
            out.append((start, part))
            at = stop
        if at < self.size:
            out.append((at, torch.zeros(self.size - at, dtype=self.dtype, device=device)))
        return out

    def flat_grad(self, device: torch.device) -> Tensor:
        """The whole `[size]` in the wide type."""
        return flatten_pieces(self.covering_pieces(device), self.dtype)


def flatten_pieces(pieces: Pieces, dtype: torch.dtype) -> Tensor:
    """Pieces that lie one after the other as one tensor."""
    if len(pieces) == 1:
        return pieces[0][1].to(dtype)
    device = next((piece.device for _, piece in pieces if not piece.is_cpu), pieces[0][1].device)
    whole = torch.empty(sum(piece.numel() for _, piece in pieces), dtype=dtype, device=device)
    for part, (_, piece) in zip(whole.split([x.numel() for _, x in pieces]), pieces, strict=True):
        part.copy_(piece)  # one by one: all of them widened would be there beside the whole
    return whole
