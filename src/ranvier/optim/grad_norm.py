"""Early: squares of gradients summed while the backward pass still computes.

Of a bucket that nobody else holds the gradient is complete once another bucket begins to fill. On
CUDA its squares are then summed on a stream of their own, beside the matrix products of the layers
before it; the norm at the end of the step only adds up what is there.

Not handled: buckets that are reduced first; they are summed when they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.optim import fused_adamw


class GradNormAccumulator:
    """Begins the sums of squares of buckets; `total` takes them."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, bucket: Bucket) -> None:
        """Begin to sum the squares of a gradient that is complete."""
        assert bucket.grad is not None, bucket.name
        grads = [grad for grad in bucket.grad.parts.values() if fused_adamw.can_sum_squares(grad)]
        if not grads:
            return
        device = grads[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):  # the sums are of its memory, used again in order
            bucket.grad_squares += zip(grads, fused_adamw.partial_square_sums(grads), strict=True)
        bucket.squares_event = self._stream.record_event()

    def sum_of_squares(self, buckets: Sequence[Bucket], grads: Sequence[Tensor]) -> Tensor:
        """Sum of the squares of all elements of `grads`, of which some may have been begun.

        A gradient to which another was added since is another tensor: it is summed anew.
        """
        begun = {_tensor_id(x): row for bucket in buckets for x, row in bucket.grad_squares}
        rows = [begun[_tensor_id(x)] for x in grads if _tensor_id(x) in begun]
        left = [x for x in grads if _tensor_id(x) not in begun]
        if rows and not left:
            left = [rows[0][:0]]  # gradients may have been taken to the host
        rest = fused_adamw.sum_of_squares(left)
        if not rows:
            return rest
        assert self._stream is not None
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return rest + torch.stack(rows).sum()


def _tensor_id(x: Tensor) -> tuple[int, int, torch.dtype]:
    """What tells tensors apart that are alive at once."""
    return x.data_ptr(), x.numel(), x.dtype
