"""Matmuls: how fast this device multiplies the matrices of a model, layout by layout.

The shapes are those of the model's linear layers on one rank; each product is timed in all layouts
of `nn/matmul.py`, or taken from the cache, which is filled with what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from ranvier.errors import PlanError
from ranvier.models import SIZES, Decoder, DecoderConfig
from ranvier.nn.fastest import Fastest, Measured
from ranvier.nn.matmul import WAYS, label, pick
from ranvier.settings import ModelConfig
from ranvier.terminal import print

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = tuple(dict.fromkeys(name for ways in WAYS.values() for name in ways))
"""The ways of all products."""


@dataclass(frozen=True)
class Row:
    """One product of the layers of one shape."""

    layers: str
    product: str
    shape: tuple[int, int, int]
    """Tokens, features out, features in."""
    measured: Measured

    @property
    def gain(self) -> float:
        """Share of the plain way's time that the chosen one saves."""
        times = self.measured["milliseconds"]
        if not {"plain", self.measured["choice"]} <= {*times}:
            return 0.0
        return 1.0 - times[self.measured["choice"]] / max(times["plain"], 1e-9)

    def cell(self, name: str) -> str:
        """Milliseconds and TFLOP/s of one way; 2·t·o·i FLOPs."""
        if name in self.measured["failed"]:
            return "failed"
        if name not in self.measured["milliseconds"]:
            return "-"
        t, o, i = self.shape
        taken = max(self.measured["milliseconds"][name], 1e-6)
        speed = 2e-9 * t * o * i / taken
        return f"{taken:.3f} ({speed:.{3 if speed < 10.0 else 0}f})"


def shapes(config: DecoderConfig) -> dict[tuple[int, int], str]:
    """Features out and in of the linear layers, and the names of those that have them."""
    with torch.device("meta"):
        model = Decoder(replace(config, layers=1))
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            found[layer.out_features, layer.in_features].append(name.rpartition(".")[2])
    return {shape: ", ".join(names) for shape, names in found.items()}


def show(*, size: str, tokens: int, dtype: str, fastest: Fastest | None = None) -> int:
    """Time and print all; an empty size or type and 0 tokens are what suits the device."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cuda = device.type == "cuda"
    size = size or ("llama3-1b" if cuda else "tiny")
    tokens = tokens or (16384 if cuda else 512)
    dtype = dtype or ("bf16" if cuda and torch.cuda.is_bf16_supported() else "fp32")
    if tokens < 1:
        raise PlanError(
            f"tokens={tokens}. A matrix has at least one row. Give the tokens of a micro-batch."
        )
    if dtype not in DTYPES:
        raise PlanError(
            f"dtype={dtype!r} is not known. Matrices are multiplied in {', '.join(DTYPES)}. "
            "Use one of these."
        )
    ModelConfig.of(size)  # refuses a size that is not known
    fastest = Fastest.of(device) if fastest is None else fastest
    where = torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"{size} with {tokens} tokens in {dtype} on {where}: milliseconds (TFLOP/s) of")
    print("y = x Wᵀ, dx = dy W and dw = dyᵀ x in several layouts")
    found = shapes(SIZES[size])
    width = max(map(len, found.values()))
    line = f"{{:<{width}}}  {{:<7}}  {{:<18}}{'  {:<15}' * len(NAMES)}  {{:<10}}  {{:>6}}"
    print(line.format("layer", "product", "tokens out in", *NAMES, "fastest", "gain"))
    rows = []
    for (out, into), layers in found.items():
        for product in WAYS:
            row = measure(product, layers, (tokens, out, into), DTYPES[dtype], fastest)
            rows.append(row)
            cells = [row.cell(name) for name in NAMES]
            text = " ".join(map(str, row.shape))
            choice = row.measured["choice"] if row.measured["milliseconds"] else "-"
            gain = f"{row.gain:.1%}"
            print(line.format(layers, product, text, *cells, choice, gain), flush=True)
    print(f"\n{verdict(rows, fastest.gain)}")
    if fastest.path is not None and fastest.path.exists():
        print(f"Kept in {fastest.path}; delete it to measure again.")
    return 0


def measure(
    product: str,
    layers: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    fastest: Fastest,
) -> Row:
    """Time one product, or find it in the cache."""
    pick(product, shape, dtype, fastest.device, fastest)
    measured = fastest.found(*label(product, shape, dtype))
    assert measured is not None, (product, shape)
    return Row(layers, product, shape, measured)


def verdict(rows: list[Row], gain: float) -> str:
    """What the table says, in a sentence or two."""
    failed = [row for row in rows if row.measured["failed"]]
    better = [row for row in rows if row.measured["choice"] != "plain" and row.gain > 0.0]
    if better:
        named = [
            f"{row.product} of {row.layers} ({row.measured['choice']}, {row.gain:.0%})"
            for row in better
        ]
        text = (
            f"{len(better)} of {len(rows)} products gain {gain:.0%} or more over plain: "
            f"{'; '.join(named)}."
        )
    else:
        text = f"No product gains {gain:.0%}; layouts stay plain."
    if failed:
        why = next(iter(failed[0].measured["failed"].values()))
        text += f" {len(failed)} could not be timed in every layout: {why}"
    return text
