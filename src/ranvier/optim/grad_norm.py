"""Gradient norm: sums the squares of gradients during the backward pass.

If no other rank has a bucket, its gradient is complete when another bucket begins to fill. On CUDA
its squares are then summed on a side stream, in parallel with the matmuls of earlier layers; the
norm at the end of the step only adds these partial sums. Squares of buckets that must be reduced
are summed after the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.optim import fused_adamw


class GradNormAccumulator:
    """Starts the sums of squares of buckets; `sum_of_squares` collects them."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, bucket: Bucket) -> None:
        """Starts summing the squares of a complete gradient."""
        assert bucket.grad is not None, bucket.name
        grads = [grad for grad in bucket.grad.parts.values() if fused_adamw.can_sum_squares(grad)]
        if not grads:
            return
        device = grads[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # The partial sums are allocated on the side stream, whose order protects their memory.
        with torch.cuda.stream(self._stream):
            bucket.grad_squares += zip(grads, fused_adamw.partial_square_sums(grads), strict=True)
        bucket.squares_event = self._stream.record_event()

    def sum_of_squares(self, buckets: Sequence[Bucket], grads: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the squares of all elements of `grads`; uses sums that were started.

        If a gradient has changed since then, it is another tensor and is summed again.
        """
        begun = {_tensor_id(x): row for bucket in buckets for x, row in bucket.grad_squares}
        rows = [begun[_tensor_id(x)] for x in grads if _tensor_id(x) in begun]
        left = [x for x in grads if _tensor_id(x) not in begun]
        if rows and not left:
            # An empty tensor on the right device, as the gradients may be offloaded.
            left = [rows[0][:0]]
        rest = fused_adamw.sum_of_squares(left)
        if not rows:
            return rest
        assert self._stream is not None
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return rest + torch.stack(rows).sum()


def _tensor_id(x: Tensor) -> tuple[int, int, torch.dtype]:
    """Returns the identity of a tensor among all live tensors."""
    # Not `id()`, as `Bucket.owned_pieces` creates new views of the same memory.
    return x.data_ptr(), x.numel(), x.dtype
