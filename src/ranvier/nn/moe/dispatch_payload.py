"""Payload of the dispatch: the type in which rows are sent to their experts, and its error.

    same   unchanged
    bf16   rounded to 8 bits of precision               |y - x| <= 2^-8 |x|
    fp8    e4m3 and one scale per row, a power of two in fp32 that is sent after the row
                                                        |y - x| <= 2^-4 |x| + 2^-17 max |row|

Rows of fp8 are bytes: d values, then 4 of the scale. What comes back, and all gradients, are sent
unrounded: each is a sum already, and a gradient is that of rows that had not been rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier.config.plan import Dispatch
from ranvier.cost.layers import SCALE_BYTES
from ranvier.nn.float8 import E4M3, Float8Linear


def encode_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Rows `[n, d]` as they are sent."""
    if dispatch == "bf16":
        return x.to(torch.bfloat16)
    if dispatch == "fp8":
        rows = Float8Linear("rowwise").quantize(x, E4M3)
        # The scale is sent in the same message as its row: one all-to-all instead of two.
        parts = [rows.values.view(torch.uint8), rows.inverse_scale.view(torch.uint8)]
        return torch.cat(parts, 1)  # (n, d + SCALE)
    return x


def decode_rows(x: Tensor, dispatch: Dispatch, dtype: torch.dtype) -> Tensor:
    """Received rows, `[n, d]`, in `dtype`."""
    if dispatch != "fp8":
        return x.to(dtype)
    # Contiguous: a `view` to a wider type needs aligned, gapless bytes.
    values = x[:, :-SCALE_BYTES].contiguous()
    inverse = x[:, -SCALE_BYTES:].contiguous()
    wide = torch.promote_types(dtype, torch.float32)
    return (values.view(E4M3).to(wide) * inverse.view(torch.float32).to(wide)).to(dtype)
