"""Listed: the list of layers of a real model, read from its leaves on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ranvier import counter_rng
from ranvier.grid import Grid
from ranvier.models import AdapterConfig, DecoderConfig, build
from ranvier.nn.attention import Core
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.dora import Magnitude
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import Apart, Siblings
from ranvier.nn.layer import Leaf as Real
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import Head
from ranvier.nn.moe.layer import Experts
from ranvier.nn.norm import Norm
from ranvier.parallel.huggingface import Entrance
from ranvier.parallel.parallelize import parallel_of, parallelize
from ranvier.planner.model_spec import ENTRY, EXIT, Kind, Leaf, Model, Part

TRAITS = ("activation", "positions", "dropout", "embed_scale", "norms", "qk_norm", "qk_whole")
"""Settings of a decoder that decide what its blocks keep."""


def listed(config: DecoderConfig, lora: AdapterConfig) -> Model:
    """The list of a decoder."""
    with torch.device("meta"), counter_rng.blank():
        model = build(config, lora)
    found = listed_of(model)
    return replace(found, traits={name: getattr(config, name) for name in TRAITS})


def listed_of(model: nn.Module) -> Model:
    """The list of a model with named dims; it is used up."""
    parallel = parallel_of(parallelize(model, Grid({}), materialize=False))
    together = [name for name, leaf in parallel.leaves.items() if isinstance(leaf, Siblings)]
    children = {n for n in parallel.leaves if n.rpartition(".")[0] in together}
    outside: tuple[list[Leaf], list[Leaf]] = ([], [])
    blocks: dict[str, list[Leaf]] = {name: [] for name in parallel.kinds}
    for name, leaf in parallel.leaves.items():
        if name in children:
            continue
        inside = re.match(r"(.*\.\d+)\.", name)
        block = inside.group(1) if inside else ""
        found = _leaf(name, leaf, parallel.leaves)
        if found is None:
            continue
        if block in blocks:
            blocks[block].append(replace(found, name=found.name.removeprefix(f"{block}.")))
        else:
            outside[any(blocks.values())].append(found)
    kinds: dict[tuple[Leaf, ...], list[int]] = {}
    for number, leaves in enumerate(blocks.values()):
        kinds.setdefault(tuple(leaves), []).append(number)
    middle = [
        Part(f"block{f' {i}' if i else ''}", len(numbers), leaves, tuple(numbers))
        for i, (leaves, numbers) in enumerate(kinds.items())
    ]
    parts = (Part(ENTRY, 1, tuple(outside[0])), *middle, Part(EXIT, 1, tuple(outside[1])))
    path = next(iter(blocks), "").rpartition(".")[0]
    return Model(type(model).__name__, parts, dict(parallel.sizes), path)


def _leaf(name: str, leaf: Real, every: Mapping[str, Real]) -> Leaf | None:
    """A layer as the planner sees it; None: one that neither communicates nor has weights."""
    if isinstance(leaf, Siblings):
        kind: Kind = "apart" if isinstance(leaf, Apart) else "siblings"
        inside = tuple(_linear(n, one) for n, one in leaf.named_children())
        whole = leaf.layers[0].site.whole_sequence
        return Leaf(name, kind, inside=inside, whole=whole)
    if isinstance(leaf, Linear):
        return _linear(name, leaf)
    if isinstance(leaf, Core):
        layer = leaf.layer
        return Leaf(name, "attention", (layer.dim,), head_dim=layer.head_dim, window=layer.window)
    if isinstance(leaf, Experts):
        up, mixture = leaf.handles["up"], leaf.layer
        return Leaf(
            name,
            "mixture",
            up.dims,
            up.sharding.shape,
            trainable=up.trainable,
            top=mixture.top,
            matrices=mixture.matrices,
        )
    if isinstance(leaf, CrossEntropy):
        return Leaf(name, "entropy", (leaf.dim,))
    if isinstance(leaf, Entrance):
        return Leaf(name, "opening")
    if not isinstance(leaf, Norm | Embedding | Magnitude):
        assert not leaf.handles, f"{name} has weights that the planner does not know"
        return None
    weight = leaf.handles["weight"]
    shape, trained = weight.sharding.shape, weight.trainable
    if isinstance(leaf, Embedding):
        return Leaf(name, "embedding", (leaf.rows, "embed"), shape, trainable=trained)
    if isinstance(leaf, Magnitude):
        return Leaf(name, "lengths", leaf.dims, shape, trainable=trained)
    kind = "rms" if leaf.sums == 1 else "layer"
    return Leaf(name, kind, (leaf.dim,), shape, "bias" in leaf.handles, trained)


def _linear(name: str, leaf: nn.Module) -> Leaf:
    assert isinstance(leaf, Linear) and not leaf.transposed, name
    factor, weight = leaf.factor, leaf.handles["weight"]
    own = weight.name.rpartition(".")[0]
    return Leaf(
        name,
        "head" if isinstance(leaf, Head) else "linear",
        factor.dims,
        factor.shape,
        "bias" in leaf.handles,
        weight.trainable,
        "" if own == leaf.site.name else own,
        whole=leaf.site.whole_sequence,
    )
