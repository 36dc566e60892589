"""Gradient accumulation over the ranges of a flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

Pieces = list[tuple[int, Tensor]]
"""Consecutive flat tensors, each with its start offset."""


class GradientAccumulator:
    """Accumulates gradients of ranges of a flat buffer.

    The first gradient of a range is not copied, so a step of one micro-batch keeps its dtype and
    copies nothing. Further gradients are added in the wider `dtype`.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self.dtype = dtype
        self.parts: dict[tuple[int, int], Tensor] = {}
        """Gradients by range; ranges do not overlap."""

    def add_grad(self, start: int, grad: Tensor) -> None:
        """Adds the gradient of the range that begins at `start`."""
        grad = grad.reshape(-1)
        key = (start, start + grad.numel())
        if key in self.parts:
            # Not in place, as the first tensor belongs to the caller.
            self.parts[key] = self.parts[key].to(self.dtype) + grad
        elif any(low < key[1] and start < high for low, high in self.parts):
            # Ranges overlap but are not equal: use one range that covers everything.
            whole = self.flat_grad(grad.device).clone()
            whole[start : key[1]] += grad
            self.parts = {(0, self.size): whole}
        else:
            self.parts[key] = grad

    def covering_pieces(self, device: torch.device) -> Pieces:
        """Returns all ranges in order with their offsets; zeros for ranges without a gradient."""
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
        """Returns the full gradient `[size]` in `dtype`."""
        return flatten_pieces(self.covering_pieces(device), self.dtype)


def flatten_pieces(pieces: Pieces, dtype: torch.dtype) -> Tensor:
    """Concatenates consecutive pieces into one tensor of `dtype`."""
    if len(pieces) == 1:
        return pieces[0][1].to(dtype)
    # If some pieces are on the host and some on the device, the result is on the device.
    device = next((piece.device for _, piece in pieces if not piece.is_cpu), pieces[0][1].device)
    whole = torch.empty(sum(piece.numel() for _, piece in pieces), dtype=dtype, device=device)
    for part, (_, piece) in zip(whole.split([x.numel() for _, x in pieces]), pieces, strict=True):
        # One at a time, as `torch.cat` of converted pieces would need twice the memory.
        part.copy_(piece)
    return whole
