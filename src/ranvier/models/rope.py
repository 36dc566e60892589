"""Rotary position embedding (RoPE) with the frequencies of all model families.

A head of k elements is rotated in pairs, pair i by the angle position · θ^(-2i/k). For longer
sequences than in the original training these frequencies are reduced:

    linear    all frequencies are divided by scale
    llama3    frequencies with less than `low` rotations in `original` tokens are divided by scale;
              above `high` rotations they do not change; between, the two are interpolated
    yarn      the same, but interpolated by the index i
    longrope  each frequency has its own divisor, from one list for sequences of up to `original`
              tokens and from another list for longer ones
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.models.config import RotaryConfig


class RotaryEmbedding(nn.Module):
    """Computes cosines and sines of the rotary angles of positions."""

    def __init__(self, config: Any) -> None:
        """config: a `RotaryConfig` with a head_dim."""
        super().__init__()
        self.config: RotaryConfig = config
        self.rotary_dim = int(config.head_dim * config.partial_rotary_factor)
        # The published algorithm of recurrent depth has angles in fp32, whatever the model has;
        # with others, float64 would differ from it by 1e-8.
        self.float64_angles = not config.is_recurrent
        self._known: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        """Frequencies by device and dtype; see `_frequencies`."""

    def forward(self, positions: Tensor, dtype: torch.dtype, long: Tensor | None = None) -> Tensor:
        """Returns cosines, then sines, of the k rotated elements of a head, `[b, s, 1, 2k]`.

        positions: `[b, s]`. long: length of each token's document `[b, s]`. If None, each sample is
        one document, whose length is its largest position + 1; padding, which repeats a position,
        and other samples do not affect it.
        """
        if dtype == torch.float64 and self.float64_angles:
            wide = torch.float64
        else:
            wide = torch.float32
        # At least fp32, as bf16 cannot represent large positions.
        frequency, far = self._frequencies(positions.device, wide)
        if self.config.rope == "longrope":
            if long is None:
                long = positions.amax(1, keepdim=True) + 1  # (b, 1)
            beyond = (long > self.config.original_max_position).unsqueeze(-1)
            # `where` on the device, as a branch on the length would synchronize and break graphs.
            frequency = torch.where(beyond, far, frequency)  # (b, 1 or s, k/2)
        angle = positions.unsqueeze(-1).to(wide) * frequency  # (b, s, k/2)
        if dtype == torch.float64:
            angle = angle.double()
        cos = angle.cos()
        sin = angle.sin()
        # Each value occurs twice, as both halves of a head are rotated by the same angles.
        found = torch.cat([cos, cos, sin, sin], -1).unsqueeze(2)
        if self.config.attention_factor != 1.0:
            found = found * self.config.attention_factor
        return found.to(dtype)

    def _frequencies(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the frequencies of short and of long documents, which differ for LongRoPE.

        On a GPU they are computed once: they are about fifteen small kernels in each step.
        """
        if (device, dtype) in self._known and not torch.compiler.is_compiling():
            return self._known[device, dtype]
        # Tensors of inference mode could not be part of a later training step.
        with torch.inference_mode(False):
            steps = torch.arange(0, self.rotary_dim, 2, device=device, dtype=dtype)
            short = far = self.compute_frequencies(steps, 1)
            if self.config.rope == "longrope":
                far = self.compute_frequencies(steps, self.config.original_max_position + 1)
        # The memory of a captured graph is reused, and fake tensors have no values.
        is_plain = type(steps) is Tensor and not torch.compiler.is_compiling()
        if device.type == "cuda" and is_plain and not torch.cuda.is_current_stream_capturing():
            self._known[device, dtype] = short, far
        return short, far

    def compute_frequencies(self, steps: Tensor, seq: int) -> Tensor:
        """Returns radians per token of the pairs with first elements `steps`, `[k/2]`."""
        config = self.config
        # The same expression as in other implementations, so that results are bit-identical: at
        # large positions a difference in the last bit matters.
        frequency: Tensor = 1.0 / config.rope_theta ** (steps / self.rotary_dim)
        if config.rope == "longrope":
            if seq > config.original_max_position:
                factors = config.rope_long
            else:
                factors = config.rope_short
            return frequency / torch.tensor(factors, dtype=steps.dtype, device=steps.device)
        if config.rope_scale == 1.0:
            return frequency
        if config.rope == "linear":
            return frequency / config.rope_scale
        if config.rope == "llama3":
            kept = _llama3_keep_ratio(frequency, config)
        else:
            kept = self._yarn_keep_ratio(steps)
        return frequency * (kept + (1.0 - kept) / config.rope_scale)

    def _yarn_keep_ratio(self, steps: Tensor) -> Tensor:
        """Returns the unchanged fraction of each frequency, linear in the pair index (YaRN)."""
        config = self.config
        k = self.rotary_dim

        def pair(turns: float) -> float:
            """Returns the index of the pair with `turns` rotations in the original length."""
            length = config.original_max_position / (turns * 2 * math.pi)
            return k * math.log(length) / (2 * math.log(config.rope_theta))

        first = max(math.floor(pair(config.high_freq_factor)), 0)
        last = min(math.ceil(pair(config.low_freq_factor)), k - 1)
        # Avoids a division by zero; the constant is from the YaRN reference implementation.
        width = last - first if last != first else 0.001
        return 1.0 - ((steps / 2 - first) / width).clamp(0.0, 1.0)


def _llama3_keep_ratio(frequency: Tensor, config: RotaryConfig) -> Tensor:
    """Returns the unchanged fraction of each frequency, by its rotations (Llama 3.1)."""
    low = config.low_freq_factor
    high = config.high_freq_factor
    turns = config.original_max_position * frequency / (2 * torch.pi)
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


class RotateHalves(torch.autograd.Function):
    """Rotates the two halves of each head; x: `[b, s, h, k]`, angles: `[b, s, 1, 2k]`.

    Backward rotates the gradient back, which compiles to a kernel as fast as the forward pass; the
    derivative by autograd takes more than twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return rotate_halves(x, angles)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (left, right), (cos, sin) = dy.chunk(2, -1), ctx.saved_tensors[0].chunk(2, -1)
        return torch.addcmul(dy * cos, torch.cat([right, -left], -1), sin), None


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the two halves of each head; x, y: `[b, s, h, k]`, angles: `[b, s, 1, 2k]`."""
    (left, right), (cos, sin) = x.chunk(2, -1), angles.chunk(2, -1)
    # Not in place: torch.compile in torch 2.11 loses the gradient of an in-place result.
    return torch.addcmul(x * cos, torch.cat([-right, left], -1), sin)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates each head by the angles of its position; the rest of a head does not change."""
    turned = angles.shape[-1] // 2
    # Without gradients there is nothing to save, and the compiler sees plain operations.
    rotate = RotateHalves.apply if torch.is_grad_enabled() else rotate_halves
    if turned == x.shape[-1]:
        y: Tensor = rotate(x, angles)
        return y
    y = rotate(x[..., :turned], angles)
    return torch.cat([y, x[..., turned:]], -1)
