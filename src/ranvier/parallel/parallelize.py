"""parallelize: replace the layers of a plain model by parallel ones and shard its weights.

The model is read, not rewritten: each module may carry an inert table `dims` that names the dims of
the layers (or parameters) below it, and the model a dict `sizes` with the number of units of each
dim. Parameters without named dims are refused. Everything a run needs afterwards (buckets,
gradients, predictions, state) is in `model.parallel`.
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
from ranvier.buckets.spec import VECTORS, ParamGroup
from ranvier.config.plan import AXES, Plan, Recompute
from ranvier.errors import PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.memory.saved_results import SavePolicy
from ranvier.models import decoder, feed_forward, lora, moe
from ranvier.nn.attention import AttentionCore
from ranvier.nn.block import run_block
from ranvier.nn.compile import CompiledBlocks
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.dora import DoraMagnitude
from ranvier.nn.dropout import Dropout
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import FusedLinear, GroupedInputLinear
from ranvier.nn.layer import LayerContext, ParallelLayer, StepContext, shard_parameter
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import LMHead
from ranvier.nn.materialize import materialize_parameters
from ranvier.nn.moe import load_balancing as balances
from ranvier.nn.moe.layer import MoELayer
from ranvier.nn.moe.load_balancing import LoadBalancer
from ranvier.nn.norm import LayerNorm, Norm, RMSNorm
from ranvier.parallel import huggingface
from ranvier.parallel.input_check import InputExpectation, check_inputs
from ranvier.parallel.input_layout import ActivationLayout, default_input_dims
from ranvier.parallel.parallel_model import (
    ParallelModel,
    enclosing_block,
    find_blocks,
    get_parallel_model,
)
from ranvier.pipeline.executor import PipelineExecutor
from ranvier.pipeline.partition import TYPICAL_SEQ_LEN, OtherStageLayer, PipelineConfig
from ranvier.pipeline.pipeline import Pipeline
from ranvier.pipeline.stage import build_stage, create_stage_groups
from ranvier.sharding import Dim, ShardingTable

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
}
"""Serial layers and their parallel versions: a new layer is one file and one line here."""


ModelT = TypeVar("ModelT", bound=nn.Module)


INPUT_PARTS_REMEDY = (
    "Give each rank its part, or give ranvier.call_on_full_batch(model, ...) the full batch on "
    "every rank."
)
"""Remedy in errors about inputs that are not the part of their rank."""


SEED_REMEDY = (
    "Call torch.manual_seed with the same number on every rank before the model is built, or load "
    "the same values."
)
"""Remedy in errors about models whose values differ between ranks."""


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
    """The model with its layers on the grid; weights keep their values, or get initial ones (meta).

    plan: its degrees are those of the grid (-1: as on the grid), and blocks are compiled with
    compile='on' only; None: all settings but the degrees have their defaults. dtype, device: of the
    weights; None: as they are. seed: of initial values and dropout. seq_len: tokens per sample for
    which pipeline stages are balanced. dims: those of layers by full name, for models without
    `dims` tables. layers: additional parallel layers by the type of their serial twin.
    materialize=False: weights get no memory before `materialize_parameters`.
    Communicates: creation of process groups.

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
    # Groups that span stages are created first: later each stage creates those of its own layers.
    create_stage_groups(grid, pipeline)
    dtype = _resolve_dtype(model, dtype)
    where = _resolve_device(device, model)
    if grid.trace.check_collectives:
        _check_same_values(model, grid, where)
    if huggingface.is_huggingface_model(model):
        dims, layers = huggingface.adapt_model(
            model, grid, inner=plan.col_splits, dims=dims, layers=layers, device=device
        )
    # Root context: each layer gets a copy with its own name (`for_layer`).
    site = LayerContext(
        name="",
        grid=grid,
        table=ShardingTable(plan.col_splits, plan.vocab_over_pipe),
        units=dict(getattr(model, "sizes", {})),
        bucket_scheduler=BucketScheduler(
            grid,
            overlap=plan.overlap,
            dtype=_accumulation_dtype(dtype),
            keep=plan.reshard_after == "step",
        ),
        step_context=StepContext(seed=seed, save_policy=SavePolicy.for_grid(grid)),
        has_compiled_blocks=plan.compile == "on",
        dispatch=plan.moe_dispatch_dtype,
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
    made = _build_parallel_model(model, site, found, blocks, plan.recompute, pipeline, where)
    model.parallel = made  # type: ignore[assignment]
    # Pipeline stages never call the whole model, so the hook would not run.
    if grid.trace.check_collectives and grid.degrees["pipe"] == 1:
        model.register_forward_pre_hook(_check_parts_hook, with_kwargs=True)
    if materialize:
        materialize_parameters(
            made.bucket_scheduler, made.layers, seed=seed, dtype=dtype, device=device
        )
    return model


def _check_same_values(model: nn.Module, grid: Grid, device: torch.device) -> None:
    """Refuse models that were built with different values on different ranks, in debug mode.

    Communicates: two numbers for each parameter over all axes.
    """
    values = {name: param for name, param in model.named_parameters() if not param.is_meta}
    same = [InputExpectation(name, equal_over=AXES) for name in values]
    check_inputs(values, same, grid, device, remedy=SEED_REMEDY)


def _check_parts_hook(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Compare the inputs of all ranks, in debug mode, before the model is called."""
    parallel = get_parallel_model(model)
    if not parallel.parts_checked:
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        check_input_parts(parallel, bound, getattr(model, "input_dims", {}))


def check_input_parts(
    parallel: ParallelModel, inputs: Mapping[str, object], named: Mapping[str, Sequence[str]]
) -> None:
    """Refuse inputs that are not the part of the batch that each rank should have.

    All ranks of an axis that splits none of the dims of an input must have the same values; where
    gradients are computed, ranks of the other axes must have different parts.
    Communicates: two numbers for each input over all axes.
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
        # Without gradients equal parts do no harm: an evaluation may repeat samples.
        expected.append(InputExpectation(name, same, own if torch.is_grad_enabled() else ()))
    device = parallel.pipeline.executor.device
    check_inputs(tensors, expected, parallel.grid, device, remedy=INPUT_PARTS_REMEDY)


def _resolve_plan(plan: Plan | None, grid: Grid) -> Plan:
    """The plan with the degrees of the grid; a plan of another grid is refused."""
    if plan is None:
        plan = Plan().with_degrees(grid.degrees)
    # A degree of -1 takes what the others leave, which is the grid's if the others are.
    wrong = [axis for axis, n in plan.degrees.items() if n not in (-1, grid.degrees[axis])]
    if wrong:
        have = ", ".join(f"{axis}={plan.degrees[axis]}" for axis in wrong)
        want = ", ".join(f"{axis}={grid.degrees[axis]}" for axis in wrong)
        raise PlanError(
            f"The plan has {have}, the grid {want}. A plan has the degrees of its grid. Use "
            f"Plan({want}, ...) or make the grid with Grid.from_plan."
        )
    if sum(n == -1 for n in plan.degrees.values()) > 1:
        plan.resolve(grid.world_size)
    plan = plan.with_degrees(grid.degrees)
    placed = Grid.from_plan(plan, rank=0, connected=False)
    if plan.rank_order and (placed.ranks != grid.ranks).any():
        raise PlanError(
            f"The plan has rank_order={list(plan.rank_order)}, but the ranks of the grid are in "
            "another order. A plan has the order of its grid. Make the grid with Grid.from_plan."
        )
    return plan


def _refuse_bad_arguments(model: nn.Module, plan: Plan) -> None:
    """Refuse arguments that `parallelize` does not support."""
    if hasattr(model, "parallel"):
        raise ShardingError("The model is parallel already. Build a new one for another grid.")
    if plan.recompute == "memory_budget":
        raise ShardingError(
            "recompute='memory_budget' is only available through `ranvier train`, which measures "
            "memory. Pass 'none', 'selective' or 'full' to parallelize()."
        )
    if plan.compile == "on" and huggingface.is_huggingface_model(model):
        raise ShardingError(
            f"compile='on' for {type(model).__name__}. Blocks of Hugging Face models are not "
            "compiled here. Use compile='off'."
        )


def _resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """The device with an explicit index: each thread has its own current device."""
    first = list(model.parameters())[:1]
    where = torch.device(device or next((p.device for p in first if not p.is_meta), "cpu"))
    if where == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return where


def _resolve_dtype(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of all weights: the requested one, or the one they have."""
    dtypes = {param.dtype for param in model.parameters()}
    if dtype is None and len(dtypes) > 1:
        raise ShardingError(
            f"The parameters are of the types {', '.join(sorted(map(str, dtypes)))}. All weights "
            "of a parallel model have one. Give parallelize dtype=."
        )
    return dtype or next(iter(dtypes), torch.float32)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients are accumulated."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return dtype


def _build_parallel_model(
    model: nn.Module,
    site: LayerContext,
    found: Mapping[str, ParallelLayer],
    blocks: Sequence[str],
    recompute: Recompute,
    how: PipelineConfig,
    device: torch.device,
) -> ParallelModel:
    """Assign the weights of the swapped layers to buckets and build the `ParallelModel`."""
    _refuse_unnamed(model, site)
    balance = _build_load_balancer(site, found)
    # Before `build_stage` drops the layers of other stages: these are facts of the whole model.
    shapes: dict[str, tuple[ParamGroup, bool, int]] = {
        name: (weight.param_group, weight.trainable, math.prod(weight.sharding.shape))
        for name, weight in site.weights.items()
    }
    for name, (bias, _) in (balance.sharded_state if balance is not None else {}).items():
        shapes[name] = ("vector", False, bias.numel())
    runtime = PipelineExecutor(
        site.grid,
        build_stage(model, site, found, how),
        site.bucket_scheduler,
        site.step_context,
        device,
    )
    # After `build_stage` only the layers of this stage are left; take them in model order.
    here = dict(model.named_modules())
    order = {name: leaf for name, leaf in here.items() if name in found}
    assign_buckets(
        site.bucket_scheduler,
        site.weights.values(),
        _bucket_of_each_weight(model, site.weights, blocks),
    )
    kinds: dict[str, Recompute] = {
        name: recompute
        for name in blocks
        if name in here and not isinstance(here[name], OtherStageLayer)
    }
    if site.has_compiled_blocks:
        compiled = CompiledBlocks(site.grid.trace, site.step_context)
    else:
        compiled = None
    # A norm outside of any block (the final one) is compiled on its own.
    norms = [name for name, leaf in order.items() if isinstance(leaf, Norm)]
    outside = [name for name in norms if compiled is not None and not found[name].site.block_name]
    for name in [*kinds, *outside]:
        block = model.get_submodule(name)
        # `kinds` is shared, not copied: changing `recompute_modes` later takes effect at the next
        # call.
        block.forward = partial(run_block, block, block.forward, name, kinds, site, compiled)
    return ParallelModel(
        grid=site.grid,
        table=site.table,
        bucket_scheduler=site.bucket_scheduler,
        step_context=site.step_context,
        weights=site.weights,
        layers={name: leaf for name, leaf in order.items() if isinstance(leaf, ParallelLayer)},
        compiled_blocks=compiled,
        pipeline=Pipeline(
            runtime,
            how,
            site.units.get("embed", 0),
            can_split_backward=compiled is None,
        ),
        sizes=site.units,
        weight_summaries=shapes,
        recompute_modes=kinds,
        load_balancer=balance and _keep_local_layers(balance, order, site.bucket_scheduler),
    )


def _build_load_balancer(
    site: LayerContext, found: Mapping[str, ParallelLayer]
) -> LoadBalancer | None:
    """The balancer that sums expert loads, if there are MoE layers.

    Communicates: creation of process groups.
    """
    leaves = {name: leaf for name, leaf in found.items() if isinstance(leaf, MoELayer)}
    if not leaves:
        return None
    # All MoE layers have the same number of experts, so that one tensor holds all loads.
    (count,) = {leaf.rule.num_experts for leaf in leaves.values()}
    return LoadBalancer(list(leaves), leaves, count, site.grid.axis(*balances.LOAD_SUM_AXES))


def _keep_local_layers(
    balance: LoadBalancer, here: Mapping[str, ParallelLayer], queue: BucketScheduler
) -> LoadBalancer:
    """Restrict the balancer to the layers of this stage and run it after each optimizer step."""
    # Names of all stages are kept: the summed tensor has the same shape on every rank.
    balance.local_layers = {
        name: leaf for name, leaf in balance.local_layers.items() if name in here
    }
    queue.on_optimizer_step = balance.step
    return balance


def named_dims(model: nn.Module) -> Iterator[tuple[str, tuple[Dim, ...]]]:
    """Full names and dims of everything in the `dims` tables of a model."""
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
    """Replace serial layers by parallel ones.

    Parameters that are named themselves are sharded as they are.
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
    # In the order of the model: a tied weight gets its first name, as in named_parameters().
    for path in sorted(names, key=lambda name: order.get(name, order.get(_parent_path(name), 0))):
        parent = model.get_submodule(_parent_path(path))
        attribute = path.rpartition(".")[2]
        if not hasattr(parent, attribute):
            raise ShardingError(
                f"dims names {path!r}, which the model has not. A name in dims is a layer or a "
                f"parameter. {type(parent).__name__} has {', '.join(_member_names(parent))}."
            )
        child = getattr(parent, attribute)
        if isinstance(child, nn.Parameter):
            _shard_lone_parameter(
                parent, attribute, child, names[path], site.for_layer(_parent_path(path))
            )
        elif child is not None and not isinstance(child, nn.Identity):
            # Layers after a `SequenceGather` get the whole sequence and must not gather it
            # themselves.
            here = site.for_layer(
                path,
                block_name=enclosing_block(path, blocks),
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
    """Shard a parameter outside of any layer like the activations it is combined with."""
    # The first named feature dim decides which activations it is combined with.
    region = next((dim for dim in dims if dim in sharding.WEIGHT_RULE), "embed")
    assert isinstance(region, str), dims
    rule = site.table.activation_rule(region)
    shard_parameter(module, attribute, param, dims, site, rule=rule, mean=1.0)


def _build_layer(
    child: nn.Module, site: LayerContext, table: LayerFactories, dims: tuple[Dim, ...]
) -> ParallelLayer:
    """The parallel version of a layer; members of a `FusedLinear` are replaced next."""
    if type(child) not in table:
        raise ShardingError(
            f"{site.name} is a {type(child).__name__}, which has no leaf. Layers with leaves are "
            f"{', '.join(sorted(t.__name__ for t in table))}. Write one (nn/, one file) or use one "
            "of them."
        )
    leaf = table[type(child)](site, child, dims)
    for name, grandchild in child.named_children() if isinstance(leaf, FusedLinear) else ():
        leaf.add_module(name, grandchild)
    return leaf


def _member_names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))]


def _refuse_unnamed(model: nn.Module, site: LayerContext) -> None:
    """Check that every parameter is sharded."""
    # By identity, so that a tied parameter counts under each of its names.
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
            f"{type(model).__name__} drops elements without named dimensions: "
            f"{', '.join(dropping)}. A mask depends on where in the whole an element lies. "
            "Add them to dims of their class, as ('embed',) in the residual stream, or set p to 0."
        )
    if lost:
        raise ShardingError(
            f"{type(model).__name__} has {len(lost)} weights without named dimensions: "
            f"{', '.join(lost)}. Every weight must say which dims it has. Add them to dims of "
            "their class, or () to replicate."
        )


def _bucket_of_each_weight(
    model: nn.Module, weights: Mapping[str, ShardedParameter], blocks: Container[str]
) -> dict[str, str]:
    """The bucket of each weight: that of its block, outside of blocks that of its layer.

    All vectors share one.
    """
    buckets = {}
    for name, weight in weights.items():
        layer = name.rpartition(".")[0]
        above = layer.rpartition(".")[0]
        # Members of a fused layer share its bucket.
        if isinstance(model.get_submodule(above), FusedLinear):
            layer = above
        if len(weight.dims) == 1:
            buckets[name] = VECTORS
        else:
            buckets[name] = enclosing_block(name, blocks) or _numbered_element(name) or layer
    return buckets


def _numbered_element(name: str) -> str:
    """The outermost element of a container that a weight is in, by its number; empty: none.

    An `nn.Sequential` of blocks has a bucket for each of them, as a module list has.
    """
    found = re.match(r"((?:.*?\.)?\d+)\.", name)
    return found.group(1) if found else ""
