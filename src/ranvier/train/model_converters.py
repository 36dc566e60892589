"""Arithmetic: how the layers of a run compute, where there are several ways to the same.

Attention takes the fastest kernel of the device, linear layers multiply in fp8 where the run asks
for it, siblings that multiply alike as one matrix. What is measured is measured by rank 0, which
tells the others, so that all ranks compute alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ranvier.comm.consensus import told
from ranvier.config.run import Run
from ranvier.config.sections import TrainConfig
from ranvier.cost.layers import Flow
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.nn import attention_backends, float8
from ranvier.nn.attention import Core
from ranvier.nn.autotune import Fastest
from ranvier.nn.fused_linear import Siblings
from ranvier.nn.linear import Linear
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.train.memory.probe import candidates

DEFAULT = TrainConfig().fp8_layers
PACKED = 4096
"""Output features up to which siblings are packed in fp8."""


def choose_arithmetic(
    run: Run, model: nn.Module, grid: Grid, device: torch.device, flow: Flow
) -> list[str]:
    """Settle how attention and linear layers compute; lines that say what was chosen.

    Communicates: what rank 0 has measured, as texts over all axes.
    """
    parallel, dtype = parallel_of(model), next(iter(model.parameters())).dtype
    notes = _attention(run, parallel, grid, device, dtype, flow)
    if run.train.fp8 != "off":
        least = replace(flow, samples=candidates(run.plan, flow.seq)[-1])
        notes += _eighths(run, parallel, least)
    _pack(parallel)
    return notes


def _pack(parallel: Parallel) -> None:
    """Pack siblings that multiply alike; in fp8 wider ones, too: there are fewer casts."""
    for leaf in parallel.leaves.values():
        if isinstance(leaf, Siblings):
            if all(isinstance(layer.products, float8.Scaled) for layer in leaf.layers):
                leaf.pack(PACKED, all_alike=True)
            else:
                leaf.pack()


def _attention(
    run: Run,
    parallel: Parallel,
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype,
    flow: Flow,
) -> list[str]:
    if device.type != "cuda":
        return []
    model, some = run.model, next(iter(parallel.leaves.values()))  # a stage may have no attention
    ranks = grid.line(*parallel.table.axes("heads")).size
    samples = max(some.site.ground.tokens(flow, "heads") // flow.seq, 1)
    heads, groups = model.heads // ranks, max(model.kv_heads // ranks, 1)
    shape = (samples, flow.seq, heads, groups, model.head_dim)
    mine = (
        attention_backends.tuned(*shape, dtype, device, Fastest.of(device))
        if grid.rank == 0
        else ""
    )
    name = told(mine, grid, device)
    for leaf in (leaf for leaf in parallel.leaves.values() if isinstance(leaf, Core)):
        leaf.serial.attend = attention_backends.way(name)  # type: ignore[assignment]
    return [f"attention of whole samples: {name}"]


def _eighths(run: Run, parallel: Parallel, flow: Flow) -> list[str]:
    """Have the named layers multiply in fp8 where their sizes allow it."""
    products, layers = float8.Scaled(run.train.fp8), _linear(parallel)  # type: ignore[arg-type]
    named = [
        name
        for name in layers
        if set(name.split(".")) & set(run.train.fp8_layers) and ".adapters." not in name
    ]
    if not named and parallel.grid.degrees["pipe"] == 1:  # else another stage may have them
        raise PlanError(
            f"train.fp8_layers={list(run.train.fp8_layers)} names no linear layer. A word of its "
            f"name means a layer. Words are {', '.join(_words(layers))}."
        )
    left = [name for name in named if not _even(layers[name], flow)]
    chosen = [name for name in named if name not in left]
    if named and not chosen:
        raise PlanError(
            f"train.fp8={run.train.fp8!r}, but no layer can be multiplied so: tokens of a "
            f"micro-batch, inputs and outputs must be multiples of {float8.EVEN}, not "
            f"{_tokens(layers[left[0]], flow)}, {_matrix(layers[left[0]])[1]} and "
            f"{_matrix(layers[left[0]])[0]}. Change data.seq or the model, or use train.fp8='off'."
        )
    for name in chosen:
        layers[name].products = products
    count = sum(math.prod(_matrix(layers[name])) for name in chosen)
    lines = [f"fp8 ({run.train.fp8}): {len(chosen)} layers, {count:,} parameters on a rank"]
    nowhere = sorted(set(run.train.fp8_layers) - set(_words(named)) - set(DEFAULT))
    if nowhere:
        lines.append(f"train.fp8_layers has words of no layer: {', '.join(nowhere)}")
    if left:
        lines.append(
            f"not in fp8, as their sizes are no multiples of {float8.EVEN}: {', '.join(left[:4])}"
            f"{' ...' if len(left) > 4 else ''}"
        )
    return lines


def _words(layers: Iterable[str]) -> list[str]:
    """The words in the names of layers, without numbers."""
    return sorted({word for name in layers for word in name.split(".") if not word.isdigit()})


def _even(layer: Linear, flow: Flow) -> bool:
    return float8.takes(_tokens(layer, flow), *_matrix(layer))


def _linear(parallel: Parallel) -> dict[str, Linear]:
    return {name: leaf for name, leaf in parallel.leaves.items() if isinstance(leaf, Linear)}


def _matrix(layer: Linear) -> tuple[int, int]:
    """Out and in features of the product on this rank."""
    *out, into = layer.handles["weight"].sharding.gathered
    size = 1
    for extent in out:
        size *= extent
    return (into, size) if layer.transposed else (size, into)


def _tokens(layer: Linear, flow: Flow) -> int:
    """Tokens of the product on this rank: those of the gathered input."""
    (axis, _), _ = layer.steps
    return layer.site.ground.tokens(flow, layer.into) * axis.size
