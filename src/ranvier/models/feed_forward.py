"""The MLP of a block, with and without a gate, and fused layers that read the same input.

Shapes: b samples, s tokens, d embed, f mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.config import GATED_ACTIVATIONS, DecoderConfig

_GELU_TANH = partial(F.gelu, approximate="tanh")
GATED_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _GELU_TANH,
    "geglu_exact": F.gelu,
    "reglu": F.relu,
}
# models.config lists the names without importing torch; both lists must agree.
assert set(GATED_FUNCTIONS) == set(GATED_ACTIVATIONS), GATED_FUNCTIONS
UNGATED_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _GELU_TANH,
    "gelu_exact": F.gelu,
    "relu": F.relu,
}


class FusedLinear(nn.ModuleDict):
    """Layers that read the same input; returns their outputs in order."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Applies each layer to x."""
        return tuple(layer(x) for layer in self.values())


class GatedMLP(nn.Module):
    """A gated MLP, y = down(f(gate(x)) · up(x))."""

    dims = {"enter.gate": ("mlp", "embed"), "enter.up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d = config.embed
        f = config.mlp
        bias = config.has_bias("mlp")
        self.enter = FusedLinear(
            {"gate": nn.Linear(d, f, bias=bias), "up": nn.Linear(d, f, bias=bias)}
        )
        self.down = nn.Linear(f, d, bias=bias)
        self.function = GATED_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP; x, y: `[b, s, d]`."""
        return self.project_down(self.compute_hidden(x))

    # Two methods, so that an MoE layer can overlap each half of its shared expert with one
    # all-to-all.
    def compute_hidden(self, x: Tensor) -> Tensor:
        """Returns the hidden layer, `[b, s, f]`."""
        gate, up = apply_with_adapter(self, "enter", x)  # (b, s, f)
        hidden: Tensor = self.function(gate) * up
        return hidden

    def project_down(self, hidden: Tensor) -> Tensor:
        """Projects the hidden layer to the output, `[b, s, d]`."""
        out: Tensor = apply_with_adapter(self, "down", hidden)
        return out


class UngatedMLP(nn.Module):
    """An MLP without a gate, y = down(f(up(x)))."""

    dims = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.has_bias("mlp")
        self.up = nn.Linear(config.embed, config.mlp, bias=bias)
        self.down = nn.Linear(config.mlp, config.embed, bias=bias)
        self.function = UNGATED_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP; x, y: `[b, s, d]`."""
        return self.project_down(self.compute_hidden(x))

    def compute_hidden(self, x: Tensor) -> Tensor:
        """Returns the hidden layer, `[b, s, f]`."""
        return self.function(apply_with_adapter(self, "up", x))

    def project_down(self, hidden: Tensor) -> Tensor:
        """Projects the hidden layer to the output, `[b, s, d]`."""
        out: Tensor = apply_with_adapter(self, "down", hidden)
        return out


def apply_with_adapter(module: nn.Module, name: str, x: Tensor) -> Any:
    """Applies a layer of a module to x, and its adapter if it has one."""
    layer = getattr(module, name)
    adapters = getattr(module, "adapters", None)
    y = layer(x)
    if adapters is None or name not in adapters:
        return y
    # The adapter also gets the layer, as DoRA needs its weight.
    return adapters[name](x, y, layer)
