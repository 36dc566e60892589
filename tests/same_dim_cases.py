"""A small decoder with layers from a dim to itself, in all regions, packed and fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models import AdapterConfig, Decoder, DecoderConfig
from ranvier.models.decoder import Attention, Block
from ranvier.models.feed_forward import FusedLinear, apply_with_adapter
from ranvier.models.lora import attach_adapters

SAME_DIM_SHAPE = {"embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 29}


class MixedOutput(nn.Module):
    """The output projection of attention, after a layer that mixes all heads."""

    dims = {"mix": ("heads", "heads"), "o": ("embed", "heads")}

    def __init__(self, heads: int, embed: int) -> None:
        super().__init__()
        self.mix = nn.Linear(heads, heads)
        self.o = nn.Linear(heads, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(apply_with_adapter(self, "mix", x))
        return y


class MixedMLP(nn.Module):
    """An MLP whose input and hidden features are mixed; x, y: `[b, s, d]`."""

    dims = {
        "pair": ("embed", (2, "embed")),
        "up": ("mlp", "embed"),
        "hidden.a": ("mlp", "mlp"),
        "hidden.b": ("mlp", "mlp"),
        "down": ("embed", (2, "mlp")),
        "last": ("embed", "embed"),
    }

    def __init__(self, embed: int, mlp: int) -> None:
        super().__init__()
        self.pair = nn.Linear(2 * embed, embed, bias=False)
        self.up = nn.Linear(embed, mlp)
        self.hidden = FusedLinear({"a": nn.Linear(mlp, mlp), "b": nn.Linear(mlp, mlp, bias=False)})
        self.down = nn.Linear(2 * mlp, embed)
        self.last = nn.Linear(embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        x = apply_with_adapter(self, "pair", torch.cat([x, x.sin()], -1))
        a, b = apply_with_adapter(self, "hidden", F.gelu(self.up(x)))
        y: Tensor = apply_with_adapter(self, "down", torch.cat([a, F.silu(b)], -1))
        mixed: Tensor = apply_with_adapter(self, "last", y)
        return mixed


def build_same_dim_model(layers: int = 2, lora: AdapterConfig | None = None) -> Decoder:
    """A decoder with such layers; with adapters of them if `lora` is given."""
    config = DecoderConfig(layers=layers, max_seq=16, **SAME_DIM_SHAPE)  # type: ignore[arg-type]
    model = Decoder(config)
    for block in model.blocks:
        assert isinstance(block, Block)
        _mix(block.attention, config)
        block.mlp = MixedMLP(config.embed, config.mlp)
    if lora is not None:
        attach_adapters(model, lora)
        for name, param in model.named_parameters():
            # B is zero in the beginning, so that A would have no gradient.
            if ".b." in name:
                nn.init.normal_(param, std=0.1)
    return model


def _mix(attention: Attention, config: DecoderConfig) -> None:
    attention.dims = {name: dims for name, dims in attention.dims.items() if name != "o"}
    output = MixedOutput(config.heads * config.head_dim, config.embed)
    attention.o = output  # type: ignore[assignment]
