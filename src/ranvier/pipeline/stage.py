"""Stage: removes the layers of other pipeline stages from a parallelized model.

All ranks first replace the layers of the whole model, without values. So all of them create the
same groups in the same order, and weights keep their names in the whole model, including tied ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ranvier.buckets.assignment import create_replica_groups
from ranvier.comm.consensus import world_axis
from ranvier.comm.p2p import connect_pairs
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import CONTROL_CHANNEL, Grid
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.pipeline.partition import (
    ModelStage,
    OtherStageLayer,
    PipelineConfig,
    part_layer_names,
    partition_model,
    segment_runner,
)
from ranvier.pipeline.traffic import BACKWARD, FORWARD, channel_links

VOCAB_LAYERS = ("embed", "head")
"""Layers that all stages have if the vocabulary is sharded over pipe."""


def create_stage_groups(grid: Grid, how: PipelineConfig) -> None:
    """Creates the groups that several stages share, before the programs of the stages differ.

    Communicates: creation of groups.
    """
    if grid.degrees["pipe"] == 1:
        return
    world_axis(grid)
    grid.axis("pipe")
    if not grid.rendezvous:
        for way in (FORWARD, BACKWARD):
            grid.axis("pipe", channel=way)
        return
    grid.axis("pipe", channel=CONTROL_CHANNEL)
    for channel, pairs in channel_links(
        grid.degrees["pipe"], how.chunks, spread=how.vocab_over_pipe
    ).items():
        connect_pairs(grid.axis("pipe", channel=channel), pairs)


def build_stage(
    model: nn.Module, site: LayerContext, found: Mapping[str, ParallelLayer], how: PipelineConfig
) -> ModelStage:
    """Returns this rank's stage. Removes layers and weights of other stages from model and site.

    Communicates: creation of groups.
    """
    grid = site.grid
    count = grid.degrees["pipe"]
    if count == 1 and type(model).forward is nn.Sequential.forward:
        return ModelStage(
            chunks=(slice(0, len(part_layer_names(model))),), run_parts=segment_runner(model)
        )
    if count == 1:
        return ModelStage(run_parts=lambda x, parts, **inputs: model(**inputs))
    # All ranks create the groups of all weights while their programs are still the same: c10d needs
    # equal numbers of groups on the members of later ones.
    create_replica_groups(grid, site.weights.values())
    parts = part_layer_names(model)
    if how.vocab_over_pipe and not all(hasattr(model, name) for name in (*VOCAB_LAYERS, "segment")):
        raise PlanError(
            f"vocab_over_pipe=True is not supported for {type(model).__name__}. Only models with "
            "the layers embed and head can split their vocabulary over pipe. Use "
            "vocab_over_pipe=False."
        )
    stage = partition_model(
        model, _part_flops(parts, found, site, how), how, grid.index["pipe"], count
    )
    bounds = [*stage.stage_starts, len(parts)]
    everywhere = VOCAB_LAYERS if how.vocab_over_pipe else ()
    # Stage of each layer; layers that all stages have count as layers of this stage.
    owner = {
        name: stage.index if name in everywhere else v % count
        for v in range(len(stage.stage_starts))
        for names in parts[bounds[v] : bounds[v + 1]]
        for name in names
    }
    # Drop weights of other stages. A tied weight is used on several stages, which sum its gradient.
    # All ranks ask for its axis, including ranks of other stages (see `Grid.axis_subset`).
    paths = {id(module): path for path, module in model.named_modules()}
    for name, weight in list(site.weights.items()):
        stages = [_stage_of_module(paths[id(module)], owner) for module, _ in weight.owners]
        weight.owners = [
            one for one, at in zip(weight.owners, stages, strict=True) if at == stage.index
        ]
        if len(set(stages)) > 1:
            axis = grid.axis_subset("pipe", sorted(set(stages)))
            if weight.owners:
                weight.tied_axis = axis
            else:
                weight.tied_axis = None
        if not weight.owners:
            del site.weights[name]
    stage = replace(stage, input_tensors=tuple(_num_inputs(model, names) for names in parts))
    if how.vocab_over_pipe:
        layers = (model.get_submodule(name) for name in VOCAB_LAYERS)
        stage = replace(stage, vocab_layers=tuple(layers))
    for name, at in owner.items():
        if at != stage.index and _has_layer(model, name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, OtherStageLayer())
    return stage


def _num_inputs(model: nn.Module, names: Sequence[str]) -> int:
    """Returns the number of tensors that a part reads: a ladder layer also reads an addend."""
    first = model.get_submodule(names[0])
    return 2 if getattr(first, "receives_addend", False) else 1


def _has_layer(model: nn.Module, name: str) -> bool:
    """Returns whether a model has a layer of this name; some are optional."""
    parent, _, attribute = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(parent), attribute, None), nn.Module)


def _stage_of_module(path: str, owner: Mapping[str, int]) -> int:
    """Returns the stage of a module, which is the stage of its enclosing layer."""
    while path and path not in owner:
        path = path.rpartition(".")[0]
    return owner[path]


def _part_flops(
    parts: list[tuple[str, ...]],
    found: Mapping[str, ParallelLayer],
    site: LayerContext,
    how: PipelineConfig,
) -> list[float]:
    """Returns the FLOPs of each part per sample; a part without layers gets a small value."""
    # The smallest number of samples that every region divides.
    degrees = site.grid.degrees
    samples = site.table.batch_multiple(degrees) * site.table.seq_multiple(degrees)
    flow = ActivationShape(samples, how.seq, itemsize=2, statistics_itemsize=4)
    work = []
    for names in parts:
        inside = (
            leaf
            for path, leaf in found.items()
            if any(f"{path}.".startswith(f"{name}.") for name in names)
        )
        work.append(1.0 + sum(leaf.flops(flow) for leaf in inside))
    # The head is split over all stages, so it is not only the work of the last one.
    if how.vocab_over_pipe:
        work[-1] = 1.0
    return work
