"""Norms: statistics over a dim that may be split, summed over the axes that split it.

The residual stream is split over col, so a norm of it sums one number a token (two for LayerNorm);
a norm of each head sums nothing; a norm over all heads sums over row (or row·col), shared kv heads
counted once. Statistics are taken in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.comm.pairs import share, total
from ranvier.errors import ShardingError
from ranvier.layers import Statistics
from ranvier.nn.example import Example
from ranvier.nn.leaf import Leaf, Site
from ranvier.sharding import Dim


class Norm(Leaf):
    """What all norms share: the axes that split their dim, and sums over them."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    sums = 1
    """Numbers a token that are summed over the axes."""
    shift = 0.0
    """Added to the weight."""

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        if len(dims) != 1 or not isinstance(dims[0], str):
            raise ShardingError(
                f"{site.name} has the dims {tuple(dims)}. A norm has one dim. Name one."
            )
        self.dim = dims[0]
        weight, bias = serial.weight, getattr(serial, "bias", None)
        if not isinstance(weight, torch.nn.Parameter):
            raise ShardingError(f"{site.name} has no weight. A norm on the grid has one. Add it.")
        self.size = weight.numel()
        region = site.table.region(self.dim)
        cuts = self.layer.features.cuts[0]
        self.axis = site.axis(*(cut.axis for cut in cuts))
        self.copies = 1
        for cut in cuts:
            self.copies *= cut.share
        self.shift = float(getattr(serial, "shift", 0.0))
        self.place("weight", weight, dims, rule=region, mean=1.0 - self.shift)
        self.place(
            "bias", bias if isinstance(bias, torch.nn.Parameter) else None, dims, rule=region
        )

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the whole dim.

        Communicates: all-reduce over the axes of the dim, forward and backward.
        """
        here = x.sum(-1, keepdim=True)
        return share(total(here, self.axis), self.axis) / (self.size * self.copies)

    @property
    def layer(self) -> Statistics:
        """One all-reduce for each sum."""
        return Statistics(self.site.name, self.site.ground, self.size, self.dim, self.sums)


class RMSNorm(Norm):
    """y = (shift + w) · x / sqrt(mean(x²) + eps).

    x, y: `[b, s/row, d/col]`.
    Communicates: all-reduce of one number a token over col, forward and backward.
    """

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        eps = getattr(serial, "eps", getattr(serial, "variance_epsilon", None))
        self.eps = None if eps is None else float(eps)

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        outer, inner = ("batch", "seq", "embed"), ("batch", "seq", "heads")
        shared, head = ("batch", "seq", "kv_heads"), ("batch", "seq", "heads", "head_dim")
        return [
            Example(lambda twin: twin(16, eps=1e-5), ("embed",), [outer], [outer]),
            Example(lambda twin: twin(32), ("heads",), [inner], [inner]),
            Example(lambda twin: twin(8, eps=1e-5), ("kv_heads",), [shared], [shared]),
            Example(lambda twin: twin(4, eps=1e-5), ("head_dim",), [head], [head]),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        with self.here():
            wide = _wide(x)
            eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps  # as in torch
            y = wide * torch.rsqrt(self.mean(wide * wide) + eps)
        weight = _wide(self.weight)
        return (y * (weight if self.shift == 0.0 else self.shift + weight)).to(x.dtype)


class LayerNorm(Norm):
    """y = w · (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) + b.

    x, y: `[b, s/row, d/col]`.
    Communicates: two all-reduces of one number a token over col, each way.
    """

    sums = 2

    def __init__(self, site: Site, serial: torch.nn.LayerNorm, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        self.eps = serial.eps

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        outer = ("batch", "seq", "embed")
        return [Example(lambda twin: twin(16), ("embed",), [outer], [outer])]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        with self.here():
            wide = _wide(x)
            centred = wide - self.mean(wide)
            y = centred * torch.rsqrt(self.mean(centred * centred) + self.eps) * _wide(self.weight)
        return (y if self.bias is None else y + _wide(self.bias)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
