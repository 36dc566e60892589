"""parallelize: replaces the layers of a plain model by parallel ones and shards its weights.

The source of the model does not change. A module may have a table `dims` with the dim names of the
layers (or parameters) below it, and the model may have a dict `sizes` with the number of units of
each dim. Parameters without named dims raise an error. The parallel state (buckets, gradients,
predictions, shards) is stored in `model.parallel`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ranvier import sharding
from ranvier.buckets.assignment import assign_buckets
from ranvier.buckets.bucket import ShardedParameter
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.spec import VECTORS
from ranvier.config.plan import AXES, Plan, Recompute
from ranvier.errors import PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.launch import read_compile_errors
from ranvier.memory.saved_results import SavePolicy
from ranvier.models import decoder, feed_forward, lora, moe, parscale, recurrent_decoder
from ranvier.nn.attention import AttentionCore
from ranvier.nn.block import run_block
from ranvier.nn.compile import CompiledBlocks
from ranvier.nn.compile_fallback import CompileFallback
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.dora import DoraMagnitude
from ranvier.nn.dropout import Dropout
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import FusedLinear, GroupedInputLinear
from ranvier.nn.initial_state import InitialState
from ranvier.nn.layer import LayerContext, ParallelLayer, StepContext, shard_parameter
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import LMHead
from ranvier.nn.materialize import materialize_parameters
from ranvier.nn.moe import load_balancing as balances
from ranvier.nn.moe.layer import MoELayer
from ranvier.nn.moe.load_balancing import LoadBalancer
from ranvier.nn.norm import LayerNorm, Norm, RMSNorm
from ranvier.nn.stream_scores import StreamScores
from ranvier.nn.token_chunks import TokenChunks
from ranvier.parallel import huggingface
from ranvier.parallel.input_check import InputExpectation, check_inputs
from ranvier.parallel.input_layout import ActivationLayout, default_input_dims
from ranvier.parallel.parallel_model import (
    ParallelModel,
    WeightSummary,
    enclosing_block,
    find_blocks,
    get_parallel_model,
)
from ranvier.pipeline.executor import PipelineExecutor
from ranvier.pipeline.partition import TYPICAL_SEQ_LEN, OtherStageLayer, PipelineConfig
from ranvier.pipeline.pipeline import Pipeline
from ranvier.pipeline.stage import build_stage, create_stage_groups
from ranvier.sharding import Dim, ShardingTable
from ranvier.system.tested_versions import warn_if_untested

PARALLEL_LAYERS: dict[type[nn.Module], Callable[..., ParallelLayer]] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    nn.Dropout: Dropout,
    decoder.OffsetRMSNorm: RMSNorm,
    feed_forward.FusedLinear: FusedLinear,
    lora.GroupedInputLinear: GroupedInputLinear,
    lora.DoraMagnitude: DoraMagnitude,
    moe.MoELayer: MoELayer,
    decoder.AttentionCore: AttentionCore,
    decoder.LMHead: LMHead,
    decoder.CrossEntropy: CrossEntropy,
    recurrent_decoder.InitialState: InitialState,
    parscale.StreamScores: StreamScores,
}
"""Serial layers and their parallel versions. A new layer needs one file and one line here."""


ModelT = TypeVar("ModelT", bound=nn.Module)


INPUT_PARTS_REMEDY = (
    "Pass each rank its part, or pass the full batch on every rank to "
    "ranvier.call_on_full_batch(model, ...)."
)
"""Remedy in errors about inputs that are not the rank's part of the batch."""


SEED_REMEDY = (
    "Call torch.manual_seed with the same seed on every rank before you build the model, or load "
    "the same weights on every rank."
)
"""Remedy in errors about models whose initial weights differ between ranks."""


LayerDims = dict[str, tuple[Dim, ...]]


LayerFactories = Mapping[type[nn.Module], Callable[..., ParallelLayer]]


def parallelize(
    model: ModelT,
    grid: Grid,
    plan: Plan | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    seq_len: int = TYPICAL_SEQ_LEN,
    dims: LayerDims | None = None,
    layers: LayerFactories | None = None,
    materialize: bool = True,
) -> ModelT:
    """Replaces the layers of a model by parallel layers and shards its weights over the grid.

    The model is modified in place and returned. Weights keep their values; a model on the meta
    device gets initial values, without ever storing a full weight. Afterwards `model.parallel` is
    its `ParallelModel`, and the inputs of the model are this rank's part of the batch (see
    `call_on_full_batch` for full batches).

    Communicates: creation of process groups.

    Args:
        model: A model with `dims` tables that name the dims of its weights, or a Hugging Face
            causal language model.
        grid: The grid of ranks.
        plan: Settings such as `recompute`, `overlap`, `compile` and the pipeline schedule. Its
            degrees must equal the degrees of the grid; -1 takes the degree from the grid. Blocks
            are compiled only with compile='on'. By default all settings except the degrees have
            their default values.
        dtype: Dtype of the weights. By default they keep their dtype.
        device: Device of the weights. By default they stay on their device.
        seed: Seed for initial values and dropout.
        seq_len: Tokens per sample, used to balance pipeline stages.
        dims: Dim names of the layers by full layer name, for models without `dims` tables.
        layers: Additional parallel layers, by the type of the serial layer that they replace.
        materialize: Whether to allocate and fill the weights now. If False, weights have no memory
            until `materialize_parameters` is called.

    Returns:
        The same model.

    Raises:
        PlanError: The plan does not match the grid.
        ShardingError: A weight has no named dims, a layer has no parallel version, or an axis does
            not divide the dim that it splits.

    Example:
        >>> from ranvier import Grid, Plan, parallelize
        >>> from ranvier.models import MODEL_SIZES, Decoder
        >>> model = parallelize(Decoder(MODEL_SIZES["tiny"]), Grid({}), Plan(recompute="full"))
        >>> len(model.parallel.weights)
        39
    """
    plan = _resolve_plan(plan, grid)
    _refuse_bad_arguments(model, plan)
    pipeline = PipelineConfig.from_plan(plan, seq_len=seq_len)
    if grid.rank == 0:
        warn_if_untested()
    # Groups that span stages are created first; later each stage creates the groups of its layers.
    create_stage_groups(grid, pipeline)
    dtype = _resolve_dtype(model, dtype)
    where = _resolve_device(device, model)
    if grid.trace.check_collectives:
        _check_same_values(model, grid, where)
    if huggingface.is_huggingface_model(model):
        dims, layers = huggingface.adapt_model(
            model, grid, inner=plan.col_splits, dims=dims, layers=layers, device=device
        )
    table = ShardingTable.from_plan(plan)
    queue = BucketScheduler(
        grid,
        overlap=plan.overlap,
        dtype=_accumulation_dtype(dtype),
        keep=plan.reshard_after == "step",
        gather_axes=table.gather_axes,
    )
    policy = SavePolicy.for_grid(grid, queue.gather_axis)
    # Root context: each layer gets a copy with its own name (`for_layer`).
    site = LayerContext(
        name="",
        grid=grid,
        table=table,
        units=dict(getattr(model, "sizes", {})),
        bucket_scheduler=queue,
        step_context=StepContext(seed=seed, save_policy=policy),
        has_compiled_blocks=plan.compile == "on",
        dispatch=plan.moe_dispatch_dtype,
        context_attention=plan.context_attention,
        init=dict(getattr(model, "init", {})),
    )
    blocks = find_blocks(model)
    found = dict(
        _swap_layers(
            model,
            site,
            {**PARALLEL_LAYERS, **(layers or {})},
            dims or dict(named_dims(model)),
            blocks,
        )
    )
    _refuse_own_attention(model, site, found)
    _refuse_unlike_layers(found)
    _defer_reductions(model, site, found)
    made = _build_parallel_model(model, site, found, blocks, plan, pipeline, where)
    made.token_order = plan.token_order
    model.parallel = made  # type: ignore[assignment]
    # With pipeline stages the whole model is never called, so the hook would not run.
    if grid.trace.check_collectives and grid.degrees["pipe"] == 1:
        model.register_forward_pre_hook(_check_parts_hook, with_kwargs=True)
    if materialize:
        materialize_parameters(
            made.bucket_scheduler, made.layers, seed=seed, dtype=dtype, device=device
        )
    return model


def _check_same_values(model: nn.Module, grid: Grid, device: torch.device) -> None:
    """Raises if ranks have built the model with different values; used in debug mode.

    Communicates: all-gather of two numbers per parameter over all axes.
    """
    values = {name: param for name, param in model.named_parameters() if not param.is_meta}
    same = [InputExpectation(name, equal_over=AXES) for name in values]
    check_inputs(values, same, grid, device, remedy=SEED_REMEDY)


def _check_parts_hook(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Compares the inputs of all ranks before the model is called; used in debug mode."""
    parallel = get_parallel_model(model)
    if not parallel.parts_checked:
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        check_input_parts(parallel, bound, getattr(model, "input_dims", {}))


def check_input_parts(
    parallel: ParallelModel, inputs: Mapping[str, object], named: Mapping[str, Sequence[str]]
) -> None:
    """Raises unless each rank has its part of the batch.

    Along an axis that splits no dim of an input all ranks must have the same values. Along the
    other axes ranks must have different parts if gradients are computed.
    Communicates: all-gather of two numbers per input over all axes.
    """
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    expected = []
    for name, x in tensors.items():
        layout = ActivationLayout.from_dims(
            tuple(named.get(name, default_input_dims(x))), parallel.table
        )
        splits = {axis for axes in layout.axes for axis in axes}
        own = tuple(axis for axis in AXES if axis in splits)
        same = tuple(axis for axis in AXES if axis not in splits)
        # Without gradients equal parts are harmless: an evaluation may repeat samples.
        expected.append(InputExpectation(name, same, own if torch.is_grad_enabled() else ()))
    device = parallel.pipeline.executor.device
    check_inputs(tensors, expected, parallel.grid, device, remedy=INPUT_PARTS_REMEDY)


def _resolve_plan(plan: Plan | None, grid: Grid) -> Plan:
    """Returns the plan with the degrees of the grid; raises if the plan is for another grid."""
    if plan is None:
        plan = Plan().with_degrees(grid.degrees)
    # A degree of -1 uses the remaining ranks: the degree of the grid if the other degrees agree.
    wrong = [axis for axis, n in plan.degrees.items() if n not in (-1, grid.degrees[axis])]
    if wrong:
        have = ", ".join(f"{axis}={plan.degrees[axis]}" for axis in wrong)
        want = ", ".join(f"{axis}={grid.degrees[axis]}" for axis in wrong)
        raise PlanError(
            f"The plan has {have}, but the grid has {want}. They must have the same degrees. Use "
            f"Plan({want}, ...), or create the grid with Grid.from_plan."
        )
    if sum(n == -1 for n in plan.degrees.values()) > 1:
        plan.resolve(grid.world_size)
    plan = plan.with_degrees(grid.degrees)
    placed = Grid.from_plan(plan, rank=0, connected=False)
    if plan.rank_order and (placed.ranks != grid.ranks).any():
        raise PlanError(
            f"The plan has rank_order={list(plan.rank_order)}, but the grid orders its ranks "
            "differently. They must have the same order. Create the grid with Grid.from_plan."
        )
    return plan


def _refuse_bad_arguments(model: nn.Module, plan: Plan) -> None:
    """Raises if `parallelize` does not support the arguments."""
    if hasattr(model, "parallel"):
        raise ShardingError(
            "The model is already parallel. A model can be parallelized once. Build a new model "
            "for another grid."
        )
    if plan.recompute == "memory_budget":
        raise ShardingError(
            "recompute='memory_budget' is only available through `ranvier train`, which measures "
            "memory. Pass 'none', 'selective' or 'full' to parallelize()."
        )
    streams: Mapping[str, int] = getattr(model, "streams", {})
    if plan.compile == "on" and plan.context > 1 and streams:
        raise ShardingError(
            f"compile='on' with context={plan.context} is not supported for a model with "
            f"{max(streams.values())} streams. A graph cannot merge attention over context "
            "with that to the prefix of a stream. Use compile='off', or context=1."
        )
    if plan.compile == "on" and huggingface.is_huggingface_model(model):
        raise ShardingError(
            f"compile='on' is not supported for {type(model).__name__}. Blocks of Hugging Face "
            "models cannot be compiled. Use compile='off'."
        )


def _resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Returns the device with an explicit index, as each thread has its own current device."""
    first = list(model.parameters())[:1]
    where = torch.device(device or next((p.device for p in first if not p.is_meta), "cpu"))
    if where == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return where


def _resolve_dtype(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of all weights: the requested dtype, or the one that they have."""
    dtypes = {param.dtype for param in model.parameters()}
    if dtype is None and len(dtypes) > 1:
        raise ShardingError(
            f"The parameters have different dtypes: {', '.join(sorted(map(str, dtypes)))}. All "
            "weights of a parallel model must have the same dtype. Pass dtype= to parallelize()."
        )
    return dtype or next(iter(dtypes), torch.float32)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients are accumulated."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return dtype


def _build_compile_fallback(plan: Plan, grid: Grid) -> CompileFallback:
    """Returns what happens where a compiler fails; the first rank of each stage reports it."""
    policy = read_compile_errors() if plan.compile_errors == "auto" else plan.compile_errors
    is_first = not any(index for axis, index in grid.index.items() if axis != "pipe")
    return CompileFallback(policy, is_reporter=is_first)


def _build_parallel_model(
    model: nn.Module,
    site: LayerContext,
    found: Mapping[str, ParallelLayer],
    blocks: Sequence[str],
    plan: Plan,
    how: PipelineConfig,
    device: torch.device,
) -> ParallelModel:
    """Assigns the weights of the swapped layers to buckets and builds the `ParallelModel`."""
    _refuse_unnamed(model, site)
    balance = _build_load_balancer(site, found)
    # Summarize the whole model before `build_stage` drops the layers of other stages.
    shapes = {
        name: WeightSummary(
            weight.param_group, weight.trainable, math.prod(weight.sharding.shape), weight.dims
        )
        for name, weight in site.weights.items()
    }
    for name, (bias, _) in (balance.sharded_state if balance is not None else {}).items():
        shapes[name] = WeightSummary("vector", False, bias.numel())
    runtime = PipelineExecutor(
        site.grid,
        build_stage(model, site, found, how),
        site.bucket_scheduler,
        site.step_context,
        device,
    )
    # After `build_stage` only the layers of this stage remain; take them in model order.
    here = dict(model.named_modules())
    order = {name: leaf for name, leaf in here.items() if name in found}
    assign_buckets(
        site.bucket_scheduler,
        site.weights.values(),
        _bucket_of_each_weight(model, site.weights, blocks),
    )
    kinds: dict[str, Recompute] = {
        name: plan.recompute
        for name in blocks
        if name in here and not isinstance(here[name], OtherStageLayer)
    }
    fallback = _build_compile_fallback(plan, site.grid)
    if site.has_compiled_blocks:
        compiled = CompiledBlocks(site.grid.trace, site.step_context, fallback)
    else:
        compiled = None
    chunks = TokenChunks(plan, site) if plan.token_chunk else None
    # A norm outside of all blocks (the final one) is compiled separately.
    norms = [name for name, leaf in order.items() if isinstance(leaf, Norm)]
    outside = [name for name in norms if compiled is not None and not found[name].site.block_name]
    for name in [*kinds, *outside]:
        block = model.get_submodule(name)
        # `kinds` is shared, not copied: a later change of `recompute_modes` takes effect at the
        # next call.
        block.forward = partial(
            run_block, block, block.forward, name, kinds, site, compiled, chunks
        )
    return ParallelModel(
        grid=site.grid,
        table=site.table,
        bucket_scheduler=site.bucket_scheduler,
        step_context=site.step_context,
        weights=site.weights,
        layers={name: leaf for name, leaf in order.items() if isinstance(leaf, ParallelLayer)},
        compiled_blocks=compiled,
        compile_fallback=fallback,
        pipeline=Pipeline(
            runtime,
            how,
            site.units.get("embed", 0),
            streams=max(getattr(model, "streams", {}).values(), default=1),
            can_split_backward=compiled is None,
        ),
        sizes=site.units,
        weight_summaries=shapes,
        recompute_modes=kinds,
        layer_calls=getattr(model, "layer_calls", dict),
        load_balancer=balance and _keep_local_layers(balance, order, site.bucket_scheduler),
    )


def _refuse_own_attention(
    model: nn.Module, site: LayerContext, found: Mapping[str, ParallelLayer]
) -> None:
    """Raises if context splits the tokens of a model that attends in its own code.

    It would see the tokens of its rank only, and nothing would say so.
    """
    ranks = site.grid.degrees["context"]
    heads = [name for name, weight in site.weights.items() if "heads" in weight.dims]
    has_core = any(isinstance(layer, AttentionCore) for layer in found.values())
    if ranks > 1 and heads and not has_core:
        raise ShardingError(
            f"{type(model).__name__} has heads ({heads[0]}), but no attention core, with "
            f"context={ranks}. Attention in the model's own code would see the tokens of one rank "
            "only. Use ranvier.models.decoder.AttentionCore for it, or context=1."
        )


def _refuse_unlike_layers(found: Mapping[str, ParallelLayer]) -> None:
    """Raises if the layers of a fused layer, which share collectives, need different ones."""
    for name, leaf in found.items():
        if not isinstance(leaf, FusedLinear):
            continue
        if len({layer.linear_comm.comm for layer in leaf.layers}) > 1:
            dims = ", ".join(str((layer.out_dim, layer.in_dim)) for layer in leaf.layers)
            raise ShardingError(
                f"{name} fuses layers with the dims {dims}. Fused layers share their collectives, "
                "so all must enter, leave or stay in a region alike. Do not fuse the others."
            )


def _defer_reductions(
    model: nn.Module, site: LayerContext, found: Mapping[str, ParallelLayer]
) -> None:
    """Lets the layers in the tables `deferred_outputs` overlap their reduction."""
    for path, module in model.named_modules():
        for name in getattr(module, "deferred_outputs", ()):
            layer = found[f"{path}.{name}"]
            assert isinstance(layer, Linear), type(layer)
            # The inputs and results of a graph are complete.
            layer.defers_reduction = not site.has_compiled_blocks


def _build_load_balancer(
    site: LayerContext, found: Mapping[str, ParallelLayer]
) -> LoadBalancer | None:
    """Returns the balancer that sums expert loads, or None without MoE layers.

    Communicates: creation of process groups.
    """
    leaves = {name: leaf for name, leaf in found.items() if isinstance(leaf, MoELayer)}
    if not leaves:
        return None
    # All MoE layers have the same number of experts, so one tensor holds all loads.
    (count,) = {leaf.rule.num_experts for leaf in leaves.values()}
    return LoadBalancer(list(leaves), leaves, count, site.grid.axis(*balances.LOAD_SUM_AXES))


def _keep_local_layers(
    balance: LoadBalancer, here: Mapping[str, ParallelLayer], queue: BucketScheduler
) -> LoadBalancer:
    """Restricts the balancer to the layers of this stage and runs it after each optimizer step."""
    # The names of all stages are kept: the summed tensor has the same shape on every rank.
    balance.local_layers = {
        name: leaf for name, leaf in balance.local_layers.items() if name in here
    }
    queue.on_optimizer_step = balance.step
    return balance


def named_dims(model: nn.Module) -> Iterator[tuple[str, tuple[Dim, ...]]]:
    """Yields the full name and dims of every entry in the `dims` tables of a model."""
    for path, module in model.named_modules():
        for key, dims in getattr(module, "dims", {}).items():
            yield f"{path}.{key}".lstrip("."), tuple(dims)


def _swap_layers(
    model: nn.Module,
    site: LayerContext,
    table: LayerFactories,
    names: LayerDims,
    blocks: Container[str],
) -> Iterator[tuple[str, ParallelLayer]]:
    """Replaces serial layers by parallel ones and yields their names.

    Parameters that are listed in `dims` are sharded without a layer.
    """
    modules = dict(model.named_modules())
    groups = (feed_forward.FusedLinear, lora.GroupedInputLinear)
    implied: LayerDims = {path: () for path, m in modules.items() if type(m) in groups}
    # Dropout of Hugging Face models acts on embeddings and on the residual stream.
    if huggingface.is_huggingface_model(model):
        implied |= {path: ("embed",) for path, m in modules.items() if type(m) is nn.Dropout}
    names = {**implied, **names}
    entries = [
        path for path, m in modules.items() if type(m) is huggingface.SequenceGatherPlaceholder
    ]
    entered = tuple(path.removesuffix("entrance") for path in entries)
    order = {path: i for i, path in enumerate(modules)}
    streams: Mapping[str, int] = getattr(model, "streams", {})
    # In model order: a tied weight gets its first name, as in named_parameters().
    for path in sorted(names, key=lambda name: order.get(name, order.get(_parent_path(name), 0))):
        parent = model.get_submodule(_parent_path(path))
        attribute = path.rpartition(".")[2]
        if not hasattr(parent, attribute):
            raise ShardingError(
                f"dims contains {path!r}, which the model does not have. A key of dims must be the "
                f"name of a layer or parameter. Use one of {', '.join(_member_names(parent))} of "
                f"{type(parent).__name__}, or remove the key."
            )
        child = getattr(parent, attribute)
        if isinstance(child, nn.Parameter):
            _shard_lone_parameter(
                parent, attribute, child, names[path], site.for_layer(_parent_path(path))
            )
        elif child is not None and not isinstance(child, nn.Identity):
            # Layers after a `SequenceGather` get the whole sequence and must not gather it again.
            here = site.for_layer(
                path,
                block_name=enclosing_block(path, blocks),
                streams=streams.get(path.partition(".")[0], 1),
                whole_sequence=path.startswith(entered),
            )
            leaf = _build_layer(child, here, table, names[path])
            setattr(parent, attribute, leaf)
            yield path, leaf


def _parent_path(path: str) -> str:
    return path.rpartition(".")[0]


def _shard_lone_parameter(
    module: nn.Module,
    attribute: str,
    param: nn.Parameter,
    dims: tuple[Dim, ...],
    site: LayerContext,
) -> None:
    """Shards a parameter outside of all layers like the activations it is combined with."""
    # The first named feature dim decides which activations it is combined with.
    region = next((dim for dim in dims if dim in sharding.WEIGHT_RULE), "embed")
    assert isinstance(region, str), dims
    rule = site.table.activation_rule(region)
    shard_parameter(module, attribute, param, dims, site, rule=rule, mean=1.0)


def _build_layer(
    child: nn.Module, site: LayerContext, table: LayerFactories, dims: tuple[Dim, ...]
) -> ParallelLayer:
    """Returns the parallel version of a layer; members of a `FusedLinear` are replaced next."""
    if type(child) not in table:
        raise ShardingError(
            f"{site.name} is a {type(child).__name__}, which has no parallel version. Supported "
            f"layers are {', '.join(sorted(t.__name__ for t in table))}. Use one of them, or pass "
            "your own to parallelize(layers={type: parallel layer})."
        )
    leaf = table[type(child)](site, child, dims)
    for name, grandchild in child.named_children() if isinstance(leaf, FusedLinear) else ():
        leaf.add_module(name, grandchild)
    return leaf


def _member_names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))]


def _refuse_unnamed(model: nn.Module, site: LayerContext) -> None:
    """Raises if a parameter or dropout has no named dims."""
    # By identity, so that a tied parameter is found under each of its names.
    placed = {id(getattr(owner, name)) for w in site.weights.values() for owner, name in w.owners}
    lost = [
        f"{name} {tuple(param.shape)}"
        for name, param in model.named_parameters()
        if id(param) not in placed
    ]
    dropping = [
        f"{name} (p={module.p})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0
    ]
    if dropping:
        raise ShardingError(
            f"{type(model).__name__} has dropout layers without named dimensions: "
            f"{', '.join(dropping)}. A dropout mask depends on the global position of each "
            "element. Add the layers to dims of their class, e.g. as ('embed',) in the residual "
            "stream, or set p=0."
        )
    if lost:
        raise ShardingError(
            f"{type(model).__name__} has {len(lost)} weights without named dimensions: "
            f"{', '.join(lost)}. Every weight must have named dims. Add each weight to dims of "
            "its class; use () to replicate it."
        )


def _bucket_of_each_weight(
    model: nn.Module, weights: Mapping[str, ShardedParameter], blocks: Container[str]
) -> dict[str, str]:
    """Returns the bucket of each weight: its block, or outside of blocks its layer.

    All vectors share one bucket. So do the weights of streams, which layers use as stored.
    """
    buckets = {}
    for name, weight in weights.items():
        layer = name.rpartition(".")[0]
        above = layer.rpartition(".")[0]
        # Members of a fused layer share its bucket.
        if isinstance(model.get_submodule(above), FusedLinear):
            layer = above
        if len(weight.dims) == 1 or "stream" in weight.dims:
            buckets[name] = VECTORS
        else:
            buckets[name] = enclosing_block(name, blocks) or _numbered_element(name) or layer
    return buckets


def _numbered_element(name: str) -> str:
    """Returns the outermost numbered module that contains a weight, or "" if there is none.

    An `nn.Sequential` of blocks thus has one bucket per block, as a module list does.
    """
    found = re.match(r"((?:.*?\.)?\d+)\.", name)
    return found.group(1) if found else ""
