"""Rotary position embedding (RoPE): the frequencies of the model families; imports torch only.

A head of k elements is rotated in pairs, pair i by the angle position · θ^(-2i/k). Models that read
longer texts than they were first trained on lower these frequencies, each family in its own way:

    linear    all by 1/scale
    llama3    those that turn less than `low` times in `original` tokens by 1/scale; more than
              `high` times: not; between: mixed by how often they turn
    yarn      the same, mixed by their index i instead
    longrope  each by its own factor, from one list for texts up to `original` tokens and from
              another for longer ones
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.models.config import RotaryConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary angles of positions."""

    def __init__(self, config: Any) -> None:
        """config: a `RotaryConfig` with a head_dim."""
        super().__init__()
        self.config: RotaryConfig = config
        self.rotary_dim = int(config.head_dim * config.partial_rotary_factor)

    def forward(self, positions: Tensor, dtype: torch.dtype, long: Tensor | None = None) -> Tensor:
        """Cosines of the rotated part k of each head, then sines: `[b, s, 1, 2k]`.

        positions: `[b, s]`. long: length of each token's text `[b, s]`, which is the same on every
        grid; None: each sample is one text, whose length is its largest position + 1. So padding,
        which repeats a position of the text, does not affect it, and neither do other samples.
        """
        if dtype == torch.float64:
            wide = torch.float64
        else:
            wide = torch.float32
        # At least fp32, as bf16 cannot represent large positions.
        steps = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=wide)
        frequency = self.compute_frequencies(steps, 1)
        if self.config.rope == "longrope":
            if long is None:
                long = positions.amax(1, keepdim=True) + 1  # (b, 1)
            beyond = (long > self.config.original_max_position).unsqueeze(-1)
            far = self.compute_frequencies(steps, self.config.original_max_position + 1)
            # Chosen by `where` on the device: a branch on the length would synchronise and break
            # graphs.
            frequency = torch.where(beyond, far, frequency)  # (b, 1 or s, k/2)
        angle = positions.unsqueeze(-1).to(wide) * frequency  # (b, s, k/2)
        cos = angle.cos()
        sin = angle.sin()
        # Each value twice: both halves of a head are rotated by the same angles.
        found = torch.cat([cos, cos, sin, sin], -1).unsqueeze(2)
        if self.config.attention_factor != 1.0:
            found = found * self.config.attention_factor
        return found.to(dtype)

    def compute_frequencies(self, steps: Tensor, seq: int) -> Tensor:
        """Radians per token of the pairs whose first elements are `steps` `[k/2]`."""
        config = self.config
        # Written as in other implementations, so that it is equal to the last bit: at far positions
        # a difference in the last bit matters.
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
        """Fraction of each frequency that is kept, falling linearly with the pair index (YaRN)."""
        config = self.config
        k = self.rotary_dim

        def pair(turns: float) -> float:
            """Index of the pair that makes `turns` turns in the original length."""
            length = config.original_max_position / (turns * 2 * math.pi)
            return k * math.log(length) / (2 * math.log(config.rope_theta))

        first = max(math.floor(pair(config.high_freq_factor)), 0)
        last = min(math.ceil(pair(config.low_freq_factor)), k - 1)
        # Avoids a division by zero, with the constant of the YaRN reference implementation.
        width = last - first if last != first else 0.001
        return 1.0 - ((steps / 2 - first) / width).clamp(0.0, 1.0)


def _llama3_keep_ratio(frequency: Tensor, config: RotaryConfig) -> Tensor:
    """Fraction of each frequency that is kept, by how often it turns (Llama 3.1)."""
    low = config.low_freq_factor
    high = config.high_freq_factor
    turns = config.original_max_position * frequency / (2 * torch.pi)
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


class RotateHalves(torch.autograd.Function):
    """Rotate the two halves of each head; x: `[b, s, h, k]`, angles: `[b, s, 1, 2k]`.

    The gradient is rotated back, which a compiler turns into as good a kernel as the forward pass;
    the derivative by autograd takes more than twice the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        (left, right), (cos, sin) = x.chunk(2, -1), angles.chunk(2, -1)
        # Not in place: of an in-place result in the forward pass, torch.compile of torch 2.11 loses
        # the gradient.
        return torch.addcmul(x * cos, torch.cat([-right, left], -1), sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (left, right), (cos, sin) = dy.chunk(2, -1), ctx.saved_tensors[0].chunk(2, -1)
        return torch.addcmul(dy * cos, torch.cat([right, -left], -1), sin), None


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each head by the angles of its position; elements beyond the rotary dim are kept."""
    turned = angles.shape[-1] // 2
    if turned == x.shape[-1]:
        y: Tensor = RotateHalves.apply(x, angles)  # type: ignore[no-untyped-call]
        return y
    y = RotateHalves.apply(x[..., :turned], angles)  # type: ignore[no-untyped-call]
    return torch.cat([y, x[..., turned:]], -1)
