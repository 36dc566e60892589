"""Chooses kernels for the layers of a run: attention backend, fp8 matmuls, fused linear layers.

Attention uses the fastest kernel of the device, linear layers multiply in fp8 if the run asks for
it, and fused layers with the same matmul are packed into one matrix. Rank 0 measures and broadcasts
the choice, so that all ranks compute alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ranvier.comm.consensus import broadcast_text
from ranvier.config.run import RunConfig
from ranvier.config.sections import TrainConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.nn import attention_backends, float8
from ranvier.nn.attention import AttentionCore
from ranvier.nn.autotune import Autotuner
from ranvier.nn.fused_linear import FusedLinear
from ranvier.nn.linear import Linear
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.train.memory.usage import candidate_micro_batches

DEFAULT_FLOAT8_LAYERS = TrainConfig().float8_layers
MAX_PACKED_FEATURES = 4096
"""Output features up to which fused layers are packed in fp8."""


def choose_arithmetic(
    run: RunConfig, model: nn.Module, grid: Grid, device: torch.device, flow: ActivationShape
) -> list[str]:
    """Choose how attention and linear layers compute; returns notes on the choice.

    Communicates: broadcast of rank 0's measurements as texts over all axes.
    """
    parallel = get_parallel_model(model)
    dtype = next(iter(model.parameters())).dtype
    notes = _choose_attention(run, parallel, grid, device, dtype, flow)
    if run.train.float8 != "off":
        # The micro-batch may still be open: the smallest candidate must satisfy the fp8 size rules,
        # too.
        least = replace(flow, samples=candidate_micro_batches(run.plan, flow.seq)[-1])
        notes += _enable_float8(run, parallel, least)
    # Packing comes last, as it depends on which layers use fp8.
    _pack_siblings(parallel)
    return notes


def _pack_siblings(parallel: ParallelModel) -> None:
    """Pack fused layers with the same matmul; in fp8 also wider ones, as this saves casts."""
    for leaf in parallel.layers.values():
        if isinstance(leaf, FusedLinear):
            if all(isinstance(layer.matmul_backend, float8.Float8Linear) for layer in leaf.layers):
                leaf.pack_weights(MAX_PACKED_FEATURES, all_alike=True)
            else:
                leaf.pack_weights()


def _choose_attention(
    run: RunConfig,
    parallel: ParallelModel,
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype,
    flow: ActivationShape,
) -> list[str]:
    sizes = run.model.attention_heads
    if device.type != "cuda" or sizes is None:
        return []
    num_heads, num_kv_heads, head_dim = sizes
    # Any layer will do for the layout: a pipeline stage may have no attention.
    some = next(iter(parallel.layers.values()))
    ranks = grid.axis_without_group(*parallel.table.feature_axes("heads")).size
    samples = max(some.site.layout_context.local_tokens(flow, "heads") // flow.seq, 1)
    heads = num_heads // ranks
    groups = max(num_kv_heads // ranks, 1)
    shape = (samples, flow.seq, heads, groups, head_dim)
    if grid.rank == 0:
        mine = attention_backends.choose_backend(
            *shape, dtype, device, Autotuner.for_device(device)
        )
    else:
        mine = ""
    name = broadcast_text(mine, grid, device)
    for leaf in (leaf for leaf in parallel.layers.values() if isinstance(leaf, AttentionCore)):
        leaf.serial.attend = attention_backends.backend_with_fallback(name)  # type: ignore[assignment]
    return [f"attention backend for whole samples: {name}"]


def _enable_float8(run: RunConfig, parallel: ParallelModel, flow: ActivationShape) -> list[str]:
    """Use fp8 matmuls in the layers of `train.float8_layers` whose sizes allow it."""
    products, layers = float8.Float8Linear(run.train.float8), _linear_layers(parallel)  # type: ignore[arg-type]
    named = [
        name
        for name in layers
        if set(name.split(".")) & set(run.train.float8_layers) and ".adapters." not in name
    ]
    # With a pipeline another stage may have the named layers.
    if not named and parallel.grid.degrees["pipe"] == 1:
        raise PlanError(
            f"train.float8_layers={list(run.train.float8_layers)} matches no linear layer. An "
            f"entry must be a part of a layer's name. Use some of {', '.join(_name_parts(layers))}."
        )
    left = [name for name in named if not _fits_float8(layers[name], flow)]
    chosen = [name for name in named if name not in left]
    if named and not chosen:
        out, into = layers[left[0]].matrix_shape
        raise PlanError(
            f"train.float8={run.train.float8!r}, but no layer has suitable sizes: tokens per "
            "micro-batch, input and output features must be multiples of "
            f"{float8.SIZE_MULTIPLE}, not {_input_tokens(layers[left[0]], flow)}, {into} and "
            f"{out}. Change data.seq_len or the model, or use train.float8='off'."
        )
    for name in chosen:
        layers[name].matmul_backend = products
    count = sum(math.prod(layers[name].matrix_shape) for name in chosen)
    lines = [f"fp8 ({run.train.float8}): {len(chosen)} layers, {count:,} parameters per rank"]
    nowhere = sorted(
        set(run.train.float8_layers) - set(_name_parts(named)) - set(DEFAULT_FLOAT8_LAYERS)
    )
    if nowhere:
        lines.append(f"train.float8_layers matches no layer with {', '.join(nowhere)}")
    if left:
        lines.append(
            f"not in fp8, as their sizes are not multiples of {float8.SIZE_MULTIPLE}: "
            f"{', '.join(left[:4])}{' ...' if len(left) > 4 else ''}"
        )
    return lines


def _name_parts(layers: Iterable[str]) -> list[str]:
    """The parts of layer names, without numbers."""
    return sorted({word for name in layers for word in name.split(".") if not word.isdigit()})


def _fits_float8(layer: Linear, flow: ActivationShape) -> bool:
    return float8.supports_sizes(_input_tokens(layer, flow), *layer.matrix_shape)


def _linear_layers(parallel: ParallelModel) -> dict[str, Linear]:
    return {name: leaf for name, leaf in parallel.layers.items() if isinstance(leaf, Linear)}


def _input_tokens(layer: Linear, flow: ActivationShape) -> int:
    """Tokens of the matmul on this rank, after the all-gather of its input."""
    (axis, _), _ = layer.comm_axes
    return layer.site.layout_context.local_tokens(flow, layer.in_dim) * axis.size
