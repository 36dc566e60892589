"""Gradient norm: squares of gradients are summed while the backward pass still runs.

The gradient of a bucket that no other rank holds is complete once another bucket begins to fill. On
CUDA its squares are then summed on a side stream, in parallel with the matmuls of the preceding
layers; the norm at the end of the step only adds up these partial sums.

Not handled: buckets that have to be reduced first; they are summed once the reduction is done.
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
        """Start to sum the squares of a complete gradient."""
        assert bucket.grad is not None, bucket.name
        grads = [grad for grad in bucket.grad.parts.values() if fused_adamw.can_sum_squares(grad)]
        if not grads:
            return
        device = grads[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # The partial sums are allocated on the side stream, so its order guards their reuse.
        with torch.cuda.stream(self._stream):
            bucket.grad_squares += zip(grads, fused_adamw.partial_square_sums(grads), strict=True)
        bucket.squares_event = self._stream.record_event()

    def sum_of_squares(self, buckets: Sequence[Bucket], grads: Sequence[Tensor]) -> Tensor:
        """Sum of the squares of all elements of `grads`; some sums may have been started.

        A gradient that was added to since then is another tensor and is summed anew.
        """
        begun = {_tensor_id(x): row for bucket in buckets for x, row in bucket.grad_squares}
        rows = [begun[_tensor_id(x)] for x in grads if _tensor_id(x) in begun]
        left = [x for x in grads if _tensor_id(x) not in begun]
        if rows and not left:
            # An empty tensor on the right device: the gradients themselves may have been offloaded.
            left = [rows[0][:0]]
        rest = fused_adamw.sum_of_squares(left)
        if not rows:
            return rest
        assert self._stream is not None
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return rest + torch.stack(rows).sum()


def _tensor_id(x: Tensor) -> tuple[int, int, torch.dtype]:
    """Identity of a tensor among those that are alive at the same time."""
    # Not `id()`: views of the same memory are made anew by `Bucket.owned_pieces`.
    return x.data_ptr(), x.numel(), x.dtype
