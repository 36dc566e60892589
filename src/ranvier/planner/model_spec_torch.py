"""Builds the planner's model specification from a real model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ranvier import counter_rng
from ranvier.config.kinds import find_kind
from ranvier.config.sections import ModelConfig
from ranvier.grid import Grid
from ranvier.models.config import AdapterConfig
from ranvier.models.recurrence import ONE_CALL, LayerCalls
from ranvier.nn.attention import AttentionCore
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.dora import DoraMagnitude
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import FusedLinear, GroupedInputLinear
from ranvier.nn.layer import ParallelLayer as Real
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import LMHead
from ranvier.nn.moe.layer import MoELayer
from ranvier.nn.norm import Norm
from ranvier.nn.stream_scores import StreamScores
from ranvier.parallel.huggingface import SequenceGather
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.model_spec import ENTRY, EXIT, BlockSpec, LayerKind, LayerSpec, ModelSpec


def build_model_spec(config: ModelConfig, lora: AdapterConfig) -> ModelSpec:
    """Returns the spec of a model of any kind."""
    with torch.device("meta"), counter_rng.init_empty_weights():
        model = find_kind(config.kind).build_model(config, lora)
    return replace(build_module_spec(model), traits=config.memory_traits)


def build_module_spec(model: nn.Module) -> ModelSpec:
    """Returns the spec of a model with named dims. Parallelizes the model in place."""
    # On a grid of one rank the layers have their dims and cost models but no shards.
    parallel = get_parallel_model(parallelize(model, Grid({}), materialize=False))
    # Linears inside of fused layers are counted with these.
    together = [name for name, leaf in parallel.layers.items() if isinstance(leaf, FusedLinear)]
    children = {n for n in parallel.layers if n.rpartition(".")[0] in together}
    outside: tuple[list[LayerSpec], list[LayerSpec]] = ([], [])
    blocks: dict[str, list[LayerSpec]] = {name: [] for name in parallel.blocks}
    calls: Mapping[str, LayerCalls] = getattr(model, "mean_layer_calls", dict)()
    for name, leaf in parallel.layers.items():
        if name in children:
            continue
        block = parallel.block_of(name)
        found = _layer_spec(name, leaf, parallel.layers)
        if found is None:
            continue
        if name in calls:
            found = replace(found, calls=int(calls[name].total))
        # Layers outside of blocks belong to the exit if a block precedes them, otherwise to the
        # entry.
        if block:
            blocks[block].append(replace(found, name=found.name.removeprefix(f"{block}.")))
        else:
            outside[any(blocks.values())].append(found)
    # Blocks with equal layers, calls and inputs are one kind.
    kinds: dict[tuple[tuple[LayerSpec, ...], LayerCalls, int], list[int]] = {}
    for number, (name, leaves) in enumerate(blocks.items()):
        inputs = 2 if getattr(model.get_submodule(name), "receives_addend", False) else 1
        kind = (tuple(leaves), calls.get(name, ONE_CALL), inputs)
        kinds.setdefault(kind, []).append(number)
    middle = [
        BlockSpec(
            f"block{f' {i}' if i else ''}", len(numbers), leaves, tuple(numbers), often, inputs
        )
        for i, ((leaves, often, inputs), numbers) in enumerate(kinds.items())
    ]
    parts = (BlockSpec(ENTRY, 1, tuple(outside[0])), *middle, BlockSpec(EXIT, 1, tuple(outside[1])))
    path = next(iter(blocks), "").rpartition(".")[0]
    return ModelSpec(type(model).__name__, parts, dict(parallel.sizes), path)


def _layer_spec(name: str, leaf: Real, every: Mapping[str, Real]) -> LayerSpec | None:
    """Returns a layer's spec; None if it neither communicates nor has weights."""
    found = _spec_without_streams(name, leaf)
    if found is None or leaf.site.streams == 1:
        return found
    inside = tuple(replace(one, streams=leaf.site.streams) for one in found.inside)
    return replace(found, inside=inside, streams=leaf.site.streams)


def _spec_without_streams(name: str, leaf: Real) -> LayerSpec | None:
    """Returns the spec of a layer that runs once for each sample."""
    if isinstance(leaf, FusedLinear):
        if isinstance(leaf, GroupedInputLinear):
            kind: LayerKind = "apart"
        else:
            kind = "siblings"
        inside = tuple(_linear_spec(n, one) for n, one in leaf.named_children())
        whole = leaf.layers[0].site.whole_sequence
        return LayerSpec(name, kind, inside=inside, whole=whole)
    if isinstance(leaf, Linear):
        return _linear_spec(name, leaf)
    if isinstance(leaf, AttentionCore):
        layer = leaf.cost_model
        prefix = leaf.handles.get("prefix_k")
        return LayerSpec(
            name,
            "attention",
            (layer.dim,),
            trainable=prefix is None or prefix.trainable,
            head_dim=layer.head_dim,
            window=layer.window,
            prefix=() if prefix is None else prefix.sharding.shape,
        )
    if isinstance(leaf, StreamScores):
        scores = leaf.handles["weight"]
        return LayerSpec(name, "scores", scores.dims, scores.sharding.shape, True, scores.trainable)
    if isinstance(leaf, MoELayer):
        up = leaf.handles["up"]
        mixture = leaf.cost_model
        return LayerSpec(
            name,
            "mixture",
            up.dims,
            up.sharding.shape,
            trainable=up.trainable,
            top=mixture.experts_per_token,
            matrices=mixture.matrices,
            has_capacity=mixture.has_capacity,
            has_aux_loss=mixture.has_aux_loss,
        )
    if isinstance(leaf, CrossEntropy):
        return LayerSpec(name, "entropy", (leaf.dim,))
    if isinstance(leaf, SequenceGather):
        return LayerSpec(name, "opening")
    # A layer with weights that is missing here would be missing in all predictions.
    if not isinstance(leaf, Norm | Embedding | DoraMagnitude):
        assert not leaf.handles, f"{name} has weights that the planner does not know"
        return None
    weight = leaf.handles["weight"]
    shape = weight.sharding.shape
    trained = weight.trainable
    if isinstance(leaf, Embedding):
        return LayerSpec(name, "embedding", (leaf.rows, "embed"), shape, trainable=trained)
    if isinstance(leaf, DoraMagnitude):
        return LayerSpec(name, "lengths", leaf.dims, shape, trainable=trained)
    if leaf.num_sums == 1:
        kind = "rms"
    else:
        kind = "layer"
    return LayerSpec(name, kind, (leaf.dim,), shape, "bias" in leaf.handles, trained)


def _linear_spec(name: str, leaf: nn.Module) -> LayerSpec:
    assert isinstance(leaf, Linear) and not leaf.is_transposed, name
    factor = leaf.linear_weight
    weight = leaf.handles["weight"]
    # The weight of a tied layer has the name of its owner.
    own = weight.name.rpartition(".")[0]
    return LayerSpec(
        name,
        "head" if isinstance(leaf, LMHead) else "linear",
        factor.dims,
        factor.shape,
        "bias" in leaf.handles,
        weight.trainable,
        "" if own == leaf.site.name else own,
        whole=leaf.site.whole_sequence,
        defers_reduction=leaf.defers_reduction,
    )
