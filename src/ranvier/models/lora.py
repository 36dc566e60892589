"""Adapters: small trained layers next to frozen ones (LoRA, DoRA); plain PyTorch.

    LoRA   y = W x + b + s · B A drop(x)
    DoRA   y = m / ‖W + s · B A‖ · (W x + s · B A drop(x)) + b

with A `(rank, in)`, B `(out, rank)`, m `(out)` and s = alpha / rank or alpha / sqrt(rank). The norm
is computed per row and treated as constant. Adapters are attached next to their layers
(`module.adapters`), so that the layers keep their names. Layers that read the same input share one
adapter: it has one dropout, and the outputs of its A matrices are concatenated. The names of its
dims are derived from the dims of the layer; the rank dim is not split. Not supported: adapters of
embeddings and heads.

Shapes: b samples, s tokens, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ranvier.models.config import AdapterConfig, DecoderConfig
from ranvier.models.decoder import Decoder
from ranvier.models.feed_forward import FusedLinear
from ranvier.models.recurrent_decoder import RecurrentDecoder

Dim = str | tuple[int, str]
"""A named dim, or several of one name that are packed, as in `ranvier.sharding`."""
SHARED_A = "shared"
"""Name of an A matrix that several layers share."""
ADAPTER_INFIX = ".adapters."
"""Part of the names of all adapter weights, and of no others."""


@dataclass(eq=False)
class TokenAdapters:
    """Several adapters of one base, and which of them each token of a step uses.

    They are stored as one adapter whose rank R is the sum of their ranks, A stacked along its rows
    and B along its columns. The output of A is multiplied by factors of each token: the scale of
    its adapter at the ranks of this adapter, and 0 elsewhere. So all tokens share two products.
    """

    table: Tensor
    """Factors of each adapter, `[n + 1, R]`; row 0 is 0, for tokens without an adapter."""
    factors: Tensor | None = None
    """Factors of the tokens of the current step, `[b, s, R]`; None if no token has an adapter."""

    def select(self, indices: Tensor) -> None:
        """Sets the adapter of each token, `[b, s]`: its number from 1, or 0 for none."""
        self.factors = self.table[indices]


class GroupedInputLinear(nn.ModuleDict):
    """Layers that each read one part of the input; returns their outputs in order."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Applies each layer to its part of x, `[b, s, n·r]`."""
        parts = x.chunk(len(self), -1)
        return tuple(layer(part) for layer, part in zip(self.values(), parts, strict=True))


class DoraMagnitude(nn.Module):
    """The DoRA factor of each output feature of a layer, m / ‖W + s · B A‖."""

    def __init__(self, out: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(out))
        self.scale = scale

    def forward(self, layer: nn.Module, a: nn.Module, b: nn.Module) -> Tensor:
        """Returns the factors `[out]`; the norm is treated as constant."""
        # The norm gets no gradient, which the DoRA paper suggests to save memory.
        return self.weight / self.weight_norm(layer, a, b)

    @torch.no_grad()
    def weight_norm(self, layer: nn.Module, a: nn.Module, b: nn.Module) -> Tensor:
        """Returns ‖W + s · B A‖ of each row."""
        w, first, second = (one.get_parameter("weight") for one in (layer, a, b))
        return self.squared_row_norms(w, first, second, self.scale).sqrt().to(self.weight.dtype)

    @staticmethod
    def squared_row_norms(w: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Returns Σ (W + s · B A)² of each row without computing B A.

        ‖w‖² + 2s · b·(A w) + s² · bᵀ(A Aᵀ)b; w: `[o, i]`, a: `[r, i]`, b: `[o, r]`. The result for
        all columns is the sum of the results for ranges of columns.
        """
        # Squares are summed in fp32, as bf16 would lose small terms.
        wide = torch.promote_types(w.dtype, torch.float32)
        own: Tensor = torch.linalg.vector_norm(w, dim=1, dtype=wide).square()
        mixed = (b.to(wide) * (w @ a.T).to(wide)).sum(1)
        added = (b.to(wide) * (b @ (a @ a.T)).to(wide)).sum(1)
        return own + 2.0 * scale * mixed + scale * scale * added


class Adapter(nn.Module):
    """An adapter of one layer, or of several layers that read the same input."""

    def __init__(
        self,
        config: AdapterConfig,
        layers: Mapping[str, nn.Linear],
        dims: Mapping[str, tuple[Dim, Dim]],
    ) -> None:
        """layers: all layers with this input, in order; dims: (out, in) of the adapted layers."""
        super().__init__()
        self.scale, self.names = config.scale, tuple(dims)
        self.layer_indices = tuple(i for i, name in enumerate(layers) if name in dims)
        (features,), (into,) = (
            {layer.in_features for layer in layers.values()},
            {into for _, into in dims.values()},
        )
        # With a shared A all B matrices read the same input (FusedLinear), otherwise different
        # parts of it.
        first = (SHARED_A,) if config.shared and len(layers) > 1 else self.names
        self.dropout = nn.Dropout(config.dropout)
        self.a = FusedLinear({name: nn.Linear(features, config.rank, bias=False) for name in first})
        seconds = {
            name: nn.Linear(config.rank, layers[name].out_features, bias=False) for name in dims
        }
        self.b = FusedLinear(seconds) if first == (SHARED_A,) else GroupedInputLinear(seconds)
        self.m = nn.ModuleDict(
            {n: DoraMagnitude(layers[n].out_features, config.scale) for n in dims if config.dora}
        )
        self.token_adapters: TokenAdapters | None = None
        """Which ranks each token uses; set by an inference engine that serves several adapters."""
        # Set on the instance, as they depend on the adapted layers.
        self.dims: dict[str, tuple[Dim, ...]] = {"dropout": (into,)}
        self.dims |= {f"a.{name}": ("rank", into) for name in first}
        self.dims |= {f"b.{name}": (out, "rank") for name, (out, _) in dims.items()}
        self.dims |= {f"m.{name}": dims[name] for name in self.m}

    def reset_parameters(self) -> None:
        """Sets B to zero, so that the output is initially zero; A keeps its initial values."""
        for layer in self.b.children():
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor | tuple[Tensor, ...], layer: nn.Module) -> object:
        """Adds the output of the adapter for x to y, the output of the layer."""
        chosen = self.token_adapters
        if chosen is not None and chosen.factors is None:
            return y
        parts = self.a(self.dropout(x))  # (b, s, r) each
        if chosen is not None:
            parts = tuple(part * chosen.factors for part in parts)
        added = self.b(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        if isinstance(y, tuple):
            ys = list(y)
        else:
            ys = [y]
        for place, name, more in zip(self.layer_indices, self.names, added, strict=True):
            ys[place] = self._add_to_output(ys[place], self.scale * more, layer, name)
        if isinstance(y, tuple):
            return tuple(ys)
        return ys[0]

    def _add_to_output(self, y: Tensor, more: Tensor, layer: nn.Module, name: str) -> Tensor:
        """Adds the adapter's output `more` to y; DoRA does not scale the bias."""
        if name not in self.m:
            return y + more
        factor: Tensor = self.m[name](*self.layer_with_a_and_b(layer, name))
        bias: Tensor | None = getattr(self.adapted_layer(layer, name), "bias", None)
        if bias is None:
            return factor * (y + more)
        # y includes the bias, which must not be scaled.
        return factor * (y - bias.flatten() + more) + bias.flatten()

    def adapted_layer(self, layer: nn.Module, name: str) -> nn.Module:
        """Returns the child of a fused layer with this name, or the layer if it is not fused."""
        found = getattr(layer, name, layer)
        assert isinstance(found, nn.Module), name
        return found

    def layer_with_a_and_b(
        self, layer: nn.Module, name: str
    ) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Returns the adapted layer, its A and its B."""
        a = getattr(self.a, SHARED_A, None) or self.a.get_submodule(name)
        return self.adapted_layer(layer, name), a, self.b.get_submodule(name)

    @torch.no_grad()
    def init_magnitudes(self, layer: nn.Module) -> None:
        """Sets the DoRA magnitudes to the current row norms, so that all factors are 1."""
        for name, magnitude in self.m.items():
            assert isinstance(magnitude.weight, nn.Parameter)
            magnitude.weight.copy_(magnitude.weight_norm(*self.layer_with_a_and_b(layer, name)))  # type: ignore[operator]


def attach_adapters(model: Decoder, config: AdapterConfig) -> None:
    """Attaches adapters to the layers that the config selects, and freezes all other weights."""
    model.requires_grad_(False)
    init: dict[str, float | tuple[float, float]] = {}
    for i, block in enumerate(model.blocks):
        if config.layers and i not in config.layers:
            continue
        # A list, as attaching adapters adds modules during the iteration.
        for module in list(block.modules()):
            adapters = {
                group: Adapter(config, layers, dims)
                for group, layers, dims in _adapter_groups(module, config.target_modules)
            }
            if adapters:
                module.adapters = nn.ModuleDict(adapters)
            for group, adapter in adapters.items():
                adapter.reset_parameters()
                init |= _initial_values(f".adapters.{group}", adapter)
    # The first match counts, so the entries of adapters come before general ones.
    model.init = {**init, **model.init}


def _initial_values(path: str, adapter: Adapter) -> dict[str, tuple[float, float]]:
    """Returns mean and std of initial values by name suffix: A as in PEFT, B zero."""
    found = {f"{path}.b.{name}.weight": (0.0, 0.0) for name in adapter.names}
    found |= {f"{path}.m.{name}.weight": (1.0, 0.0) for name in adapter.m}
    for name, layer in adapter.a.items():
        assert isinstance(layer, nn.Linear)
        # Standard deviation of a uniform distribution on ±1 / sqrt(in).
        found[f"{path}.a.{name}.weight"] = (0.0, 1.0 / math.sqrt(3 * layer.in_features))
    return found


def _adapter_groups(
    module: nn.Module, on: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, nn.Linear], dict[str, tuple[Dim, Dim]]]]:
    """Yields the name of a (fused) layer, its linear layers, and the dims of the adapted ones."""
    chosen: dict[str, dict[str, tuple[Dim, Dim]]] = {}
    for key, dims in getattr(module, "dims", {}).items():
        group, _, name = key.partition(".")
        # Matrices have two dims. A target matches the name of a layer or one of its dims.
        if len(dims) == 2 and {name or group, *dims} & {*on}:
            chosen.setdefault(group, {})[name or group] = dims
    for group, dims in chosen.items():
        layer = module.get_submodule(group)
        inside = layer.items() if isinstance(layer, FusedLinear) else [(group, layer)]
        yield group, {name: one for name, one in inside if isinstance(one, nn.Linear)}, dims


@dataclass(frozen=True)
class AdaptedWeight:
    """Names of the adapter parameters of an adapted layer."""

    a: str
    b: str
    m: str
    """Only with DoRA."""
    shape: tuple[int, int]
    """(out, in) features of the layer."""


def adapted_weights(config: DecoderConfig, lora: AdapterConfig) -> dict[str, AdaptedWeight]:
    """Returns the adapter parameters of each adapted weight of a decoder, by weight name."""
    # One block on the meta device is enough: all blocks have the same names.
    with torch.device("meta"):
        shape = replace(config, layers=1, window_layers=(), ladder_layers=())
        one = build_decoder(shape, replace(lora, layers=()))
    found = {}
    for path, adapter, layer in named_adapters(one):
        above, _, group = path.rpartition(".adapters.")
        for name in adapter.names:
            base, _, _ = adapter.layer_with_a_and_b(layer, name)
            assert isinstance(base, nn.Linear), name
            single = base is layer
            if hasattr(adapter.a, SHARED_A):
                first = SHARED_A
            else:
                first = name
            found[f"{above}.{group}{'' if single else f'.{name}'}.weight"] = AdaptedWeight(
                f"{path}.a.{first}.weight",
                f"{path}.b.{name}.weight",
                f"{path}.m.{name}.weight",
                (base.out_features, base.in_features),
            )
    blocks = lora.layers or range(config.layers)
    return {
        _with_block_index(name, i): AdaptedWeight(
            _with_block_index(own.a, i),
            _with_block_index(own.b, i),
            _with_block_index(own.m, i),
            own.shape,
        )
        for i in blocks
        for name, own in found.items()
    }


def _with_block_index(name: str, block: int) -> str:
    return f"blocks.{block}.{name.removeprefix('blocks.0.')}"


def named_adapters(model: nn.Module) -> Iterator[tuple[str, Adapter, nn.Module]]:
    """Yields name, adapter and adapted layer of all adapters; also on a grid or a stage."""
    for path, module in model.named_modules():
        for group, adapter in (getattr(module, "adapters", None) or {}).items():
            yield f"{path}.adapters.{group}", adapter, getattr(module, group)


def build_decoder(config: DecoderConfig, lora: AdapterConfig) -> Decoder:
    """Returns a decoder, with adapters if `lora.rank` is not 0."""
    model = RecurrentDecoder(config) if config.is_recurrent else Decoder(config)
    if lora.rank > 0:
        attach_adapters(model, lora)
    return model
