"""Stages of `torch.distributed.pipelining` for `pipeline.py`, in a module of their own.

The import takes seconds, as it imports torch's compiler.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage


class RecordingStage(PipelineStage):
    """Records the activations that a stage of torch keeps and frees."""

    log: list[int]
    """1 for each activation that is kept, -1 for each that is freed."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps an activation."""
        self.log.append(1)
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Frees it, unless weight gradients follow."""
        result = super().backward_one_chunk(*args, **kwargs)
        self.log.append(-1 if kwargs.get("full_backward", True) else 0)
        return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Frees it."""
        result = super().backward_weight_one_chunk(*args, **kwargs)
        self.log.append(-1)
        return result
