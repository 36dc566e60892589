"""parallelize: swap the layers of a plain model for leaves, place its weights, refuse unnamed ones.

The model is read, not rewritten: each module may carry an inert table `dims` that names the dims
of the layers (or parameters) below it, the model a dict `sizes` with the number of units of each
dim. Everything a run needs afterwards (buckets, gradients, predictions, state) hangs on
`model.parallel`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ranvier import sharding
from ranvier.buckets import spec
from ranvier.buckets.assignment import fill
from ranvier.buckets.bucket import Weight
from ranvier.buckets.scheduler import Deferred
from ranvier.buckets.spec import VECTORS, Group, Types
from ranvier.comm.consensus import everyone
from ranvier.config.plan import AXES, Dispatch, Inner, Recompute
from ranvier.cost.layers import Flow, Line
from ranvier.errors import ShardingError
from ranvier.grid import Axis, Grid
from ranvier.memory.saved_results import Collectives, Keeping
from ranvier.models import decoder, feed_forward, lora, moe
from ranvier.nn.attention import Core
from ranvier.nn.block import run_block
from ranvier.nn.compile import Compiled
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.dora import Magnitude
from ranvier.nn.dropout import Dropout
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import Apart, Siblings
from ranvier.nn.layer import Leaf, Moment, Site, place
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import Head
from ranvier.nn.materialize import fill_values
from ranvier.nn.moe import load_balancing as balances
from ranvier.nn.moe.layer import NOTES, Experts
from ranvier.nn.moe.load_balancing import Balance
from ranvier.nn.norm import LayerNorm, Norm, RMSNorm
from ranvier.parallel import huggingface
from ranvier.parallel.input_check import Expected, check_inputs
from ranvier.parallel.input_layout import Layout, dims_of_input
from ranvier.pipeline.executor import Runtime
from ranvier.pipeline.partition import Absent, Cut
from ranvier.pipeline.pipeline import Pipeline
from ranvier.pipeline.stage import meet, staged
from ranvier.sharding import Dim, State, Table
from ranvier.trace import Event

LEAVES: dict[type[nn.Module], Callable[..., Leaf]] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    nn.Dropout: Dropout,
    decoder.ShiftedNorm: RMSNorm,
    feed_forward.Siblings: Siblings,
    lora.Apart: Apart,
    lora.Magnitude: Magnitude,
    moe.Experts: Experts,
    decoder.Core: Core,
    decoder.Head: Head,
    decoder.CrossEntropy: CrossEntropy,
}
"""Serial layers and their leaves: a new leaf is one file and one line here."""

Model = TypeVar("Model", bound=nn.Module)
PARTS = (
    "Give each rank its part, or give ranvier.call_on_full_batch(model, ...) the full batch on "
    "every rank."
)
"""What to do about inputs that are not those of a rank."""
SEEDED = (
    "Call torch.manual_seed with the same number on every rank before the model is built, or load "
    "the same values."
)
"""What to do about models whose values differ from rank to rank."""
Names = dict[str, tuple[Dim, ...]]
Leaves = Mapping[type[nn.Module], Callable[..., Leaf]]


@dataclass(eq=False)
class Parallel:
    """What a parallel model knows of itself."""

    grid: Grid
    table: Table
    queue: Deferred
    moment: Moment
    weights: dict[str, Weight]
    leaves: dict[str, Leaf]
    pipeline: Pipeline
    """Which parts of the model are here, and how they take turns."""
    sizes: Mapping[str, int]
    """Units of each named dim."""
    shapes: dict[str, tuple[Group, bool, int]]
    """Group, whether it is trained, and elements of every weight of the model, of all stages."""
    compiled: Compiled | None = None
    """The compiled function of its blocks."""
    balance: Balance | None = None
    """Of its mixtures of experts; None: it has none."""
    kinds: dict[str, Recompute] = field(default_factory=dict)
    """How the activations of each block, in order, are computed again; read at each call."""
    samples_seen: int = 0
    """Samples of training that full batches have had so far: dropout depends on their numbers."""
    parts_checked: bool = False
    """The inputs of the call that runs are compared already, or need not be."""

    def __post_init__(self) -> None:
        """Have the groups made that steps use besides those of layers."""
        for axis in (self.token_axis, everyone(self.grid), self.grid.axis("pipe")):
            assert axis.size == 1 or not self.grid.connected or axis.group is not None, axis

    @property
    def token_axis(self) -> Axis:
        """Ranks whose losses are of different tokens: the sum over it is the loss of the batch."""
        region = self.table.region("vocab")
        return self.grid.axis(*region["batch"], *region["seq"])

    @property
    def speaking(self) -> dict[str, Leaf]:
        """Leaves that communicate for themselves: siblings do it together."""
        together = {name for name, leaf in self.leaves.items() if isinstance(leaf, Siblings)}
        return {n: leaf for n, leaf in self.leaves.items() if n.rpartition(".")[0] not in together}

    @property
    def ragged(self) -> frozenset[str]:
        """Leaves whose communication depends on what tokens say."""
        expert = self.grid.degrees["expert"] > 1
        return frozenset(self.balance.names if expert and self.balance is not None else ())

    def state(self) -> State:
        """My part of every parameter."""
        self.queue.settle()
        state = {name: (weight.rest, weight.place) for name, weight in self.weights.items()}
        return state if self.balance is None else {**state, **self.balance.state}

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Take my part of whole tensors."""
        missing = sorted(set(self.weights) - set(whole))
        if missing:
            raise ShardingError(
                f"The state lacks {len(missing)} weights: {', '.join(missing)}. "
                "Every weight must be there. Load the state of the same model."
            )
        self.queue.settle()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.rest.copy_(weight.place.take(whole[name]))
            for name, (bias, _) in (self.balance.state if self.balance else {}).items():
                bias.copy_(whole.get(name, torch.zeros_like(bias)))
        self.queue.loads += 1
        self.queue.begin("")

    def events(self, flow: Flow, *, micro_batches: int = 1) -> list[Event]:
        """Predicted communication of the forward and backward passes of a step."""
        events: list[Event] = []
        for name, leaf in self.speaking.items():
            events += leaf.events(flow, recomputed=self._recomputed(name))
        events += self.pipeline.events(flow)
        gathers, scatters = self._depth_events()
        kept = 1 if self.queue.keep else micro_batches
        return (events + scatters) * micro_batches + gathers * kept

    def _recomputed(self, name: str) -> bool:
        """Whether a leaf communicates again what it communicated in its first run."""
        if self.moment.keeping.keeps(name):
            return False
        kinds = (kind for block, kind in self.kinds.items() if name.startswith(f"{block}."))
        return next(kinds, "none") != "none"

    def _depth_events(self) -> tuple[list[Event], list[Event]]:
        """Gathers of a micro-batch, forward, then backward, and reductions.

        Embedding and head need their weights forward only. A bucket's gradients are reduced once.
        """
        queue = self.queue
        line = Line(queue.gather_axis.names, queue.gather_axis.size)
        if line.size == 1:
            return [], []
        forward = self._uses(lambda leaf: True)
        alone = self.pipeline.runtime.stage.count == 1
        once = Embedding if alone else (Embedding, Head)
        backward = self._uses(lambda leaf: not isinstance(leaf, once))[::-1]
        split = [bucket.bulk for bucket in queue.buckets if bucket.split]
        gathers = [
            spec.gather(bulk, line, self._types)
            for block in spec.used(forward, backward, alone=alone, keep=queue.keep)
            for bulk in split
            if bulk.block == block
        ]
        reduced = [bulk for bulk in split if bulk.trainable and not bulk.late]
        return gathers, [spec.scatter(bulk, line, self._types) for bulk in reduced]

    @property
    def _types(self) -> Types:
        wide = self.queue.dtype.itemsize
        return Types(next((b.data.element_size() for b in self.queue.buckets), wide), wide)

    def _uses(self, which: Callable[[Leaf], bool]) -> list[str]:
        """Blocks in the order in which the leaves use their weights."""
        leaves = [leaf for leaf in self.leaves.values() if which(leaf)]
        weights = [weight for leaf in leaves for weight in leaf.handles.values()]
        return [weight.bucket.name for weight in weights if weight.split]

    def update_events(self, *, votes: int = 0) -> list[Event]:
        """Predicted communication of the optimizer step: gradients, norm, updated weights."""
        queue = self.queue
        depth, data = (Line(x.names, x.size) for x in (queue.gather_axis, queue.data_axis))
        found = [
            event
            for bucket in queue.buckets
            for event in spec.update(bucket.bulk, depth, data, self._types)
        ]
        if self.balance is not None and self.balance.axis.size > 1:
            numbers = len(self.balance.names) * (self.balance.experts + len(NOTES))
            found.append(Event("all_reduce", self.balance.axis.names, numbers * 8, "experts"))
        return found + spec.norm(self.grid.degrees, self._types, votes=votes)


def parallelize(
    model: Model,
    grid: Grid,
    *,
    inner: Inner = "samples",
    overlap: Iterable[str] = ("dx", "dw", "gather", "tokens"),
    recompute: Recompute = "none",
    collectives: Collectives = "again",
    dispatch: Dispatch = "same",
    fast: bool = True,
    compiled: str = "",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Names | None = None,
    leaves: Leaves | None = None,
    materialize: bool = True,
    how: Cut | None = None,
    keep: bool = False,
    room: int | None = None,
) -> Model:
    """The model with its layers on the grid; weights keep their values, or get initial ones (meta).

    names: dims of layers by full name, for models without `dims` tables. leaves: further layers.
    fast=False: pairs, for comparison. compiled: torch's compiler. how: the cut into stages. keep:
    weights gathered over depth stay. room: bytes of the host where weights rest and come from;
    None: they stay on the device. Communicates: the making of groups.

    Example:
        >>> from ranvier import Grid, parallelize
        >>> from ranvier.models import SIZES, Decoder
        >>> model = parallelize(Decoder(SIZES["tiny"]), Grid({}))
        >>> len(model.parallel.weights)
        39
    """
    _refuse_use(model, recompute, compiled)
    meet(grid, how or Cut())
    dtype, where = _one_type(model, dtype), _exactly(device, model)
    if grid.trace.check:
        _check_values(model, grid, where)
    if huggingface.recognised(model):
        names, leaves = huggingface.adapt(
            model, grid, inner=inner, names=names, leaves=leaves, device=device
        )
    site = Site(
        name="",
        grid=grid,
        table=Table(inner, how is not None and how.spread),
        units=dict(getattr(model, "sizes", {})),
        queue=Deferred(grid, overlap=overlap, dtype=_wide(dtype), keep=keep),
        moment=Moment(seed=seed, keeping=Keeping.on(grid, collectives)),
        fast=fast,
        compiled=compiled,
        dispatch=dispatch,
        init=dict(getattr(model, "init", {})),
    )
    found = dict(_swap(model, site, {**LEAVES, **(leaves or {})}, names or dict(named(model))))
    made = _assembled(model, site, found, recompute, how or Cut(), where)
    model.parallel = made  # type: ignore[assignment]
    if grid.trace.check and grid.degrees["pipe"] == 1:  # stages never call the whole model
        model.register_forward_pre_hook(_check_parts, with_kwargs=True)
    if materialize:
        fill_values(made.queue, made.leaves, seed=seed, dtype=dtype, device=device, room=room)
    return model


def _check_values(model: nn.Module, grid: Grid, device: torch.device) -> None:
    """Refuse ranks that have built models of different values, in debug mode.

    Communicates: two numbers for each parameter over all axes.
    """
    values = {name: param for name, param in model.named_parameters() if not param.is_meta}
    same = [Expected(name, equal=AXES) for name in values]
    check_inputs(values, same, grid, device, remedy=SEEDED)


def _check_parts(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Compare what the ranks were given, in debug mode, before the model is called."""
    parallel = parallel_of(model)
    if not parallel.parts_checked:
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        check_parts(parallel, bound, getattr(model, "input_dims", {}))


def check_parts(
    parallel: Parallel, inputs: Mapping[str, object], named: Mapping[str, Sequence[str]]
) -> None:
    """Refuse inputs that are not the part of the batch that each rank should have.

    All ranks of an axis that splits none of the dims of an input must have the same values; where
    gradients are computed, ranks of the others must have parts of their own.
    Communicates: two numbers for each input over all axes.
    """
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    expected = []
    for name, x in tensors.items():
        layout = Layout.make(tuple(named.get(name, dims_of_input(x))), parallel.table)
        splits = {axis for axes in layout.axes for axis in axes}
        own = tuple(axis for axis in AXES if axis in splits)
        same = tuple(axis for axis in AXES if axis not in splits)
        expected.append(Expected(name, same, own if torch.is_grad_enabled() else ()))
    device = parallel.pipeline.runtime.device
    check_inputs(tensors, expected, parallel.grid, device, remedy=PARTS)


def _refuse_use(model: nn.Module, recompute: Recompute, compiled: str) -> None:
    """Refuse what cannot be asked of `parallelize`."""
    if hasattr(model, "parallel"):
        raise ShardingError("The model is parallel already. Build a new one for another grid.")
    if recompute == "budget":
        raise ShardingError(
            "recompute='budget' is a matter of a run, which measures. A model has a kind for each "
            "block. Use none, selective or full, or set model.parallel.kinds."
        )
    if compiled and huggingface.recognised(model):
        raise ShardingError(
            f"compiled={compiled!r} for {type(model).__name__}. Blocks of Hugging Face models are "
            "not compiled here. Leave compiled out."
        )


def _exactly(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """A device with its number: threads have a current device of their own."""
    first = list(model.parameters())[:1]
    where = torch.device(device or next((p.device for p in first if not p.is_meta), "cpu"))
    if where == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return where


def _one_type(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """The type of all weights: as asked for, or the one they have."""
    dtypes = {param.dtype for param in model.parameters()}
    if dtype is None and len(dtypes) > 1:
        raise ShardingError(
            f"The parameters are of the types {', '.join(sorted(map(str, dtypes)))}. All weights "
            "of a parallel model have one. Give parallelize dtype=."
        )
    return dtype or next(iter(dtypes), torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _assembled(
    model: nn.Module,
    site: Site,
    found: Mapping[str, Leaf],
    recompute: Recompute,
    how: Cut,
    device: torch.device,
) -> Parallel:
    """What a model whose layers are swapped knows of itself; its weights are in buckets now."""
    _refuse_unnamed(model, site)
    balance = _balance(site, found)
    shapes: dict[str, tuple[Group, bool, int]] = {
        name: (weight.group, weight.trainable, math.prod(weight.sharding.shape))
        for name, weight in site.weights.items()
    }
    for name, (bias, _) in (balance.state if balance is not None else {}).items():
        shapes[name] = ("vector", False, bias.numel())
    runtime = Runtime(site.grid, staged(model, site, found, how), site.queue, site.moment, device)
    here = dict(model.named_modules())
    order = {name: leaf for name, leaf in here.items() if name in found}
    fill(site.queue, site.weights.values(), _blocks(model, site.weights))
    blocks = [name for name in _blocks_of(model) if not isinstance(here[name], Absent)]
    kinds = dict.fromkeys(blocks, recompute)
    compiled = Compiled(site.grid.trace, site.moment, site.compiled) if site.compiled else None
    norms = [name for name, leaf in order.items() if isinstance(leaf, Norm)]
    outside = [name for name in norms if compiled is not None and not found[name].site.block]
    for name in [*kinds, *outside]:
        block = model.get_submodule(name)
        block.forward = partial(run_block, block, block.forward, name, kinds, site, compiled)
    return Parallel(
        grid=site.grid,
        table=site.table,
        queue=site.queue,
        moment=site.moment,
        weights=site.weights,
        leaves={name: leaf for name, leaf in order.items() if isinstance(leaf, Leaf)},
        compiled=compiled,
        pipeline=Pipeline(
            runtime,
            replace(how, splits=how.splits and site.fast and compiled is None),
            site.units.get("embed", 0),
        ),
        sizes=site.units,
        shapes=shapes,
        kinds=kinds,
        balance=balance and _kept(balance, order, site.queue),
    )


def _balance(site: Site, found: Mapping[str, Leaf]) -> Balance | None:
    """What sums the loads of experts, if there are any. Communicates: the making of groups."""
    leaves = {name: leaf for name, leaf in found.items() if isinstance(leaf, Experts)}
    if not leaves:
        return None
    (count,) = {leaf.rule.experts for leaf in leaves.values()}
    return Balance(list(leaves), leaves, count, site.grid.axis(*balances.AXES))


def _kept(balance: Balance, here: Mapping[str, Leaf], queue: Deferred) -> Balance:
    """Of layers those of this stage; the optimizer's steps tell it."""
    balance.here = {name: leaf for name, leaf in balance.here.items() if name in here}
    queue.stepped = balance.step
    return balance


def parallel_of(model: nn.Module) -> Parallel:
    """What a parallel model knows of itself."""
    parallel = model.parallel
    assert isinstance(parallel, Parallel), type(model)
    return parallel


def named(model: nn.Module) -> Iterator[tuple[str, tuple[Dim, ...]]]:
    """Full names and dims of all that the `dims` tables of a model name."""
    for path, module in model.named_modules():
        for key, dims in getattr(module, "dims", {}).items():
            yield f"{path}.{key}".lstrip("."), tuple(dims)


def _swap(model: nn.Module, site: Site, table: Leaves, names: Names) -> Iterator[tuple[str, Leaf]]:
    """Put leaves in the place of layers.

    Parameters that are named themselves are placed as they are.
    """
    modules = dict(model.named_modules())
    groups = (feed_forward.Siblings, lora.Apart)
    implied: Names = {path: () for path, m in modules.items() if type(m) in groups}
    if huggingface.recognised(model):  # theirs are of embeddings and of the residual stream
        implied |= {path: ("embed",) for path, m in modules.items() if type(m) is nn.Dropout}
    names = {**implied, **names}
    entries = [path for path, m in modules.items() if type(m) is huggingface.Entry]
    entered = tuple(path.removesuffix("entrance") for path in entries)
    order = {path: i for i, path in enumerate(modules)}
    # In the order of the model: a tied weight bears its first name, as in named_parameters().
    for path in sorted(names, key=lambda name: order.get(name, order.get(_parent(name), 0))):
        parent, attribute = model.get_submodule(_parent(path)), path.rpartition(".")[2]
        if not hasattr(parent, attribute):
            raise ShardingError(
                f"dims names {path!r}, which the model has not. A name in dims is a layer or a "
                f"parameter. {type(parent).__name__} has {', '.join(_members(parent))}."
            )
        child = getattr(parent, attribute)
        if isinstance(child, nn.Parameter):
            _place_alone(parent, attribute, child, names[path], site.at(_parent(path)))
        elif child is not None and not isinstance(child, nn.Identity):
            here = site.at(path, whole_sequence=path.startswith(entered))
            leaf = _leaf_for(child, here, table, names[path])
            setattr(parent, attribute, leaf)
            yield path, leaf


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _place_alone(
    module: nn.Module, attribute: str, param: nn.Parameter, dims: tuple[Dim, ...], site: Site
) -> None:
    """A parameter outside of any layer is cut as the activations it meets, and used as it lies."""
    region = next((dim for dim in dims if dim in sharding.WEIGHTS), "embed")
    assert isinstance(region, str), dims
    rule = site.table.region(region)
    place(module, attribute, param, dims, site, rule=rule, mean=1.0)


def _leaf_for(child: nn.Module, site: Site, table: Leaves, dims: tuple[Dim, ...]) -> Leaf:
    """The leaf of a layer; siblings keep their layers, which are swapped next."""
    if type(child) not in table:
        raise ShardingError(
            f"{site.name} is a {type(child).__name__}, which has no leaf. Layers with leaves are "
            f"{', '.join(sorted(t.__name__ for t in table))}. Write one (nn/, one file) or use one "
            "of them."
        )
    leaf = table[type(child)](site, child, dims)
    for name, grandchild in child.named_children() if isinstance(leaf, Siblings) else ():
        leaf.add_module(name, grandchild)
    return leaf


def _members(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))]


def _refuse_unnamed(model: nn.Module, site: Site) -> None:
    """Every parameter must have been placed."""
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
            f"{', '.join(lost)}. Every weight must say which dims it has. "
            "Add them to dims of their class, or () to replicate."
        )


def _blocks(model: nn.Module, weights: Mapping[str, Weight]) -> dict[str, str]:
    """The block of each weight: the last list element above it, else its layer.

    Vectors have one for all.
    """
    blocks = {}
    for name, weight in weights.items():
        inside = re.match(r"(.*\.\d+)\.", name)
        layer = name.rpartition(".")[0]
        above = layer.rpartition(".")[0]
        if isinstance(model.get_submodule(above), Siblings):
            layer = above
        blocks[name] = VECTORS if len(weight.dims) == 1 else inside.group(1) if inside else layer
    return blocks


def _blocks_of(model: nn.Module) -> list[str]:
    """Names of the blocks: the elements of the lists of a model."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return [f"{path}.{i}" for path, blocks in lists for i in range(len(blocks))]
