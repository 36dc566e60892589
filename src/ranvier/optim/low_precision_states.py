"""Low-precision optimizer states: moments of AdamW in the dtype of the weight, in bf16 or 8 bits.

Narrow moments use stochastic rounding, so that increments below their resolution count on average.
The random bits are a function of (seed, number of the update, name of the weight, index in the
whole weight), so rounding is the same in a resumed run and on another grid.

With 8 bits, each block of 256 consecutive numbers has a scale s, its largest magnitude, and every
number x has a code c that increases with its magnitude:

    mean    ±s (c / 127)²    c in 0..127, with the sign of x
    square   s (c / 255)⁴    c in 0..255

Stochastic rounding chooses one of the two levels around x at random, with expectation x; without it
the nearest level is used. The error is below e, or half of it for the nearest level, where
t = top (|x| / s)^(1/n) is the position of x among the codes:

    e = s ((t + 1)ⁿ - tⁿ) / topⁿ ≤ s / 63    mean: top 127, n 2; square: top 255, n 4

As exceptions, the means of a block are zero if all are below `MIN_BLOCK_SCALE`, and a square above
zero is at least s / 255⁴, with s at least `MIN_BLOCK_SCALE`: if it became zero, mean / √square
would be infinite. Quantizing dequantized values returns the same codes and scales, bit for bit.

Blocks are counted from the start of a shard, so on a grid that splits weights at other positions
8-bit moments are close but not identical; bf16 moments are identical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.sharding import Shard

MomentKind = Literal["master", "bf16", "int8"]
MomentName = Literal["mean", "square"]

BLOCK_SIZE = 256
"""Number of consecutive numbers that share a scale."""
MIN_BLOCK_SCALE = 2.0**-90
"""Minimum scale, so that all levels are normal numbers; means of a smaller block are zero."""
MAX_CODE: dict[MomentName, int] = {"mean": 127, "square": 255}
"""Code of the largest magnitude."""
CODE_POWER: dict[MomentName, int] = {"mean": 2, "square": 4}
"""Levels are this power of the codes."""
WORD_MASK = 0xFFFFFFFF
"""Mask of 32 bits."""


def moment_dtype(kind: MomentKind, master: torch.dtype) -> torch.dtype:
    """Returns the dtype of moments for master weights of dtype `master`."""
    return {"master": master, "bf16": torch.bfloat16, "int8": torch.uint8}[kind]


@dataclass(frozen=True)
class RoundingKey:
    """Source of random bits for consecutive elements in a box of a whole weight.

    index of element k = ravel(start + unravel(first + k, local), whole)
    """

    stream: int
    """Random stream of the weight."""
    local_shape: tuple[int, ...]
    """Shape of the box."""
    start: tuple[int, ...]
    """Offset of the box in each dim of the whole weight."""
    global_shape: tuple[int, ...]
    first: int = 0
    """Offset of the first element in the flattened box."""

    @classmethod
    def for_weight(cls, name: str, place: Shard, *, seed: int = 0) -> RoundingKey:
        """Returns the key of a shard of a weight. Padding gets the bits of other elements."""
        if place.flat_range is None:
            first = 0
        else:
            first = place.flat_range[0]
        stream = counter_rng.random_key(seed, "moments", name)
        return cls(stream, place.local_shape, place.global_offset, place.global_shape, first)

    def at_offset(self, offset: int) -> RoundingKey:
        """Returns the key of the elements from `offset`."""
        return replace(self, first=self.first + offset)

    @property
    def seed(self) -> int:
        """31 bits of the stream, which a kernel reads as a signed integer."""
        return (self.stream ^ (self.stream >> 32)) & 0x7FFFFFFF

    @property
    def merged_dims(self) -> list[tuple[int, int, int]]:
        """(size, start, whole size) of each dim; an unsplit dim is merged with the previous dim."""
        # Merging does not change the flat index; the kernel supports at most three dims.
        merged = [(1, 0, 1)]
        for size, start, whole in zip(self.local_shape, self.start, self.global_shape, strict=True):
            last = merged[-1]
            if size == whole or last == (1, 0, 1):
                merged[-1] = (last[0] * size, last[1] * whole + start, last[2] * whole)
            else:
                merged.append((size, start, whole))
        return merged

    def global_index(self, count: int, device: torch.device) -> Tensor:
        """Returns the flat indices of the first `count` elements in the whole weight (int64)."""
        at = torch.arange(self.first, self.first + count, device=device)
        index = torch.zeros_like(at)
        stride = 1
        (_, start, _), *inner = self.merged_dims
        # Unravel in the box and ravel in the whole weight, from the innermost dim outwards.
        for size, begin, whole in reversed(inner):
            row = at // size
            index += (at - row * size + begin) * stride
            at = row
            stride = stride * whole
        return index + (at + start) * stride

    def random_bits(self, step: Tensor, count: int) -> Tensor:
        """Returns random integers in [0, 2³²) for the first `count` elements, `[count]`.

        step: number of the update.
        """
        index = self.global_index(count, step.device)
        key = mix_bits(mix_bits(step.to(torch.int64) & WORD_MASK) ^ self.seed)
        word = mix_bits((index & WORD_MASK) ^ key)
        # A weight may have more than 2³² elements: also mix in the high word of the index.
        return mix_bits((word + (index >> 32) * 0x9E3779B1 + key) & WORD_MASK)


def mix_bits(x: Tensor) -> Tensor:
    """Returns a bijective hash of 32-bit integers, which are stored as int64."""
    # torch has no unsigned 32-bit multiplication; masked int64 products have the same bits as the
    # products that wrap around in the kernel.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD_MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD_MASK
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Moments:
    """Both moments of consecutive elements, as numbers or as codes with scales."""

    mean: Tensor
    """First moments, `[n]`."""
    square: Tensor
    """Second moments, `[n]`."""
    scales: Tensor | None = None
    """Scales of the blocks of means and squares, fp32 `[2, ceil(n / BLOCK_SIZE)]`; None if the
    moments are not quantized."""

    @classmethod
    def zeros(
        cls, count: int, kind: MomentKind, master: torch.dtype, device: torch.device | str = "cpu"
    ) -> Moments:
        """Returns the moments at the start of training."""
        kept = moment_dtype(kind, master)
        mean, square = (torch.zeros(count, dtype=kept, device=device) for _ in range(2))
        if kind == "int8":
            scales = torch.zeros(2, -(-count // BLOCK_SIZE), device=device)
        else:
            scales = None
        return cls(mean, square, scales)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are stored."""
        return [self.mean, self.square, *([] if self.scales is None else [self.scales])]

    def slice_range(self, start: int, stop: int) -> Moments:
        """Returns the moments of the elements `[start, stop)`, as views."""
        mean = self.mean[start:stop]
        square = self.square[start:stop]
        if self.scales is None:
            return Moments(mean, square)
        assert start % BLOCK_SIZE == 0, (
            f"{start} is not a multiple of {BLOCK_SIZE} and would split a block"
        )
        return Moments(mean, square, self.scales[:, start // BLOCK_SIZE : -(-stop // BLOCK_SIZE)])

    def dequantize(self, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns mean and square in dtype `wide`; not copied if they already have it."""
        if self.scales is None:
            return self.mean.to(wide), self.square.to(wide)
        mean = dequantize_moment(self.mean, self.scales[0], "mean")
        return mean.to(wide), dequantize_moment(self.square, self.scales[1], "square").to(wide)

    def round_stochastically(
        self, mean: Tensor, square: Tensor, step: Tensor, key: RoundingKey | None
    ) -> Moments:
        """Converts new values to the dtype of these moments, with stochastic rounding."""
        if self.mean.dtype == mean.dtype:
            return Moments(mean, square)
        assert key is not None, f"stochastic rounding of {self.mean.dtype} moments needs a key"
        # One 32-bit word for both moments: the high half is for the mean, the low half for the
        # square.
        bits = key.random_bits(step, mean.numel())
        if self.scales is None:
            return Moments(
                stochastic_round_bf16(mean, bits >> 16),
                stochastic_round_bf16(square, bits & 0xFFFF),
            )
        # + 0.5 centers the draw in its interval of 2⁻¹⁶, so that rounding is unbiased.
        codes, scales = _encode_blocks(mean, "mean", (bits >> 16) + 0.5)
        others, more = _encode_blocks(square, "square", (bits & 0xFFFF) + 0.5)
        return Moments(codes, others, torch.stack([scales, more]))


def stochastic_round_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds `x` to bf16 stochastically and without bias.

    bits: uniform integers in [0, 2¹⁶), which are added to the low half of the fp32 pattern; bf16
    does not have that half.
    """
    x = x.float()
    rounded = ((x.view(torch.int32) + bits.to(torch.int32)) & -0x10000).view(torch.float32)
    # Added bits would change inf to NaN and could change NaN to a number.
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def quantize_moment(x: Tensor, which: MomentName) -> tuple[Tensor, Tensor]:
    """Returns the nearest codes `[n]` (uint8) and scales `[ceil(n / BLOCK_SIZE)]` of x `[n]`."""
    return _encode_blocks(x, which, torch.full_like(x, 1 << 15, dtype=torch.float32))


def dequantize_moment(codes: Tensor, scales: Tensor, which: MomentName) -> Tensor:
    """Returns the numbers `[n]` (fp32) that codes and scales represent."""
    scale = scales[:, None].expand(-1, BLOCK_SIZE).reshape(-1)[: codes.numel()]
    if which == "mean":
        # Codes of means are signed and stored as uint8.
        c = codes.view(torch.int8).float()
        return c * c.abs() * (1.0 / 127**2) * scale
    c = codes.float() * (1.0 / 255)
    c = c * c
    return c * c * scale


def _encode_blocks(x: Tensor, which: MomentName, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of numbers x `[n]`.

    Of the two levels a ≤ x < b around x, b is chosen if draw / 2¹⁶ < p = (x - a) / (b - a), in the
    units of the codes. draw: from 0.5 to 2¹⁶ - 0.5, `[n]`. Division is correctly rounded, so the
    largest magnitude is never below its level.
    """
    count = x.numel()
    top = MAX_CODE[which]
    x = _pad_to_blocks(x)
    draw = _pad_to_blocks(draw)
    size = x.abs().float()
    scale = size.amax(1, keepdim=True)
    if which == "mean":
        scale = torch.where(scale < MIN_BLOCK_SCALE, 0.0, scale)
    else:
        scale = torch.where((x > 0.0).any(1, keepdim=True), scale.clamp(min=MIN_BLOCK_SCALE), 0.0)
    full = torch.where(scale > 0.0, scale, 1.0)
    # A tensor as numerator, as torch computes scalar / tensor as a product with the reciprocal,
    # which rounds twice.
    y = size * (torch.full_like(full, float(top) ** CODE_POWER[which]) / full)
    # `above`: distance from the lower level; `gap`: distance between the levels, (c+1)ⁿ - cⁿ.
    if which == "mean":
        c = y.sqrt().floor().clamp(max=top - 1)
        above = y - c * c
        gap = 2.0 * c + 1.0
    else:
        c = y.sqrt().sqrt().floor().clamp(max=top - 1)
        above = y - (c * c) * (c * c)
        gap = (2.0 * c + 1.0) * (2.0 * c * (c + 1.0) + 1.0)
    c = c + (draw * gap < above * 65536.0)
    if which == "mean":
        c = torch.where(x < 0.0, -c, c)
    else:
        # A positive square must not become 0, as mean / √square would be infinite.
        c = torch.where(x > 0.0, c.clamp(min=1.0), c)
    # Via int16, as the cast of a negative float to uint8 is undefined.
    return c.to(torch.int16).to(torch.uint8).view(-1)[:count], scale.view(-1)


def _pad_to_blocks(x: Tensor) -> Tensor:
    """Pads numbers `[n]` with zeros to `[ceil(n / BLOCK_SIZE), BLOCK_SIZE]`."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
