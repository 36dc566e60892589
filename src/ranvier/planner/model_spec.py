"""Model specification for the planner, without torch: the parts of a model and their layers.

All blocks of a kind are equal, so a model is its entry, one block of each kind with its count, and
its exit. A spec comes from numbers (`dense_decoder`), from the files that ship with the package
(`load_shipped_spec`) or from a run, whose model is built once on the meta device
(`resolve_model_spec`) and stored in the user's cache.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ranvier.buckets.spec import VECTORS, ParamGroup, ParamSpec
from ranvier.cost import layers
from ranvier.cost import linear as products
from ranvier.cost.layers import LayerCost, LayoutContext
from ranvier.errors import PlanError
from ranvier.models.recurrence import ONE_CALL, LayerCalls
from ranvier.sharding import Dim, Sharding, dim_name, matrix_dims

if TYPE_CHECKING:
    from ranvier.config.run import RunConfig

LayerKind = Literal[
    "linear",
    "siblings",
    "apart",
    "head",
    "embedding",
    "rms",
    "layer",
    "attention",
    "mixture",
    "lengths",
    "opening",
    "entropy",
    "scores",
]
"""Kinds of layers: linear; fused linears with the same input (siblings), or with parts of it
(apart); LM head with its loss; embedding; RMSNorm and LayerNorm; attention core; router with its
experts (mixture); DoRA magnitudes (lengths); the point where Hugging Face modules gather the
sequence (opening); a separate cross-entropy loss; the scores of streams (scores)."""
SPEC_FOLDER = Path(__file__).parent / "lists"
ENTRY = "entry"
EXIT = "exit"
"""Names of the parts before and after the blocks."""
SPEC_FORMAT = 1
"""Format version of the files; specs of another format are rebuilt."""


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a part."""

    name: str
    """Relative to its block, or to the whole model."""
    kind: LayerKind
    dims: tuple[Dim, ...] = ()
    shape: tuple[int, ...] = ()
    """Shape of the unsharded weight."""
    bias: bool = False
    trainable: bool = True
    tied: str = ""
    """The layer that owns its weight, if tied."""
    inside: tuple[LayerSpec, ...] = ()
    """The linears of a fused layer."""
    head_dim: int = 0
    window: int = 0
    """Sliding window in tokens; 0 means full causal attention."""
    whole: bool = False
    """Whether its input already has the whole sequence."""
    top: int = 0
    """Experts per token; `shape` is (experts, width, embed)."""
    matrices: int = 0
    """Matrices per expert: 3 with a gate, otherwise 2."""
    has_capacity: bool = False
    """Whether choices beyond the capacity of an expert are dropped."""
    has_aux_loss: bool = True
    """Whether an auxiliary loss depends on the choices of whole sequences."""
    calls: int = 1
    """How often its part calls it: 2 for the norm of a recurrent model."""
    defers_reduction: bool = False
    """Whether the reduction of its output runs behind the next module (ladder residual)."""
    prefix: tuple[int, ...] = ()
    """Shape of the learned keys of streams: streams, kv heads, prefix tokens, head dim."""
    streams: int = 1
    """Its samples for each sample of a batch (ParScale)."""

    @property
    def num_parameters(self) -> int:
        """Number of its parameters, without tied ones of another layer."""
        # An expert layer also has a router [experts, embed].
        if self.kind == "mixture":
            return self.num_expert_parameters + self.shape[0] * self.shape[2]
        if self.tied or not self.shape:
            own = 0
        else:
            own = math.prod(self.shape)
        # Learned keys and values.
        own += 2 * math.prod(self.prefix) if self.prefix else 0
        bias = self._bias_size if self.bias else 0
        return own + bias + sum(leaf.num_parameters for leaf in self.inside)

    @property
    def num_expert_parameters(self) -> int:
        """Number of parameters of all its experts."""
        if self.kind == "mixture":
            return self.matrices * math.prod(self.shape)
        return 0

    @property
    def _bias_size(self) -> int:
        return self.shape[0]

    def build_layer(self, prefix: str, ground: LayoutContext) -> LayerCost:
        """Returns its cost model (communication and compute) in a layout."""
        name = f"{prefix}{self.name}"
        dims = [dim_name(dim) for dim in self.dims]
        ground = replace(ground, streams=self.streams)
        match self.kind:
            case "linear" | "siblings" | "apart":
                factors = tuple(leaf._build_factor(ground) for leaf in self.inside or (self,))
                return products.LinearCost(
                    name,
                    ground,
                    factors,
                    self.kind == "apart",
                    self.whole,
                    defers_reduction=self.defers_reduction,
                )
            case "head":
                return products.LMHeadCost(name, ground, (self._build_factor(ground),))
            case "embedding":
                return layers.EmbeddingCost(name, ground, self.shape, dims[0], self.trainable)
            case "rms" | "layer":
                sums = 1 if self.kind == "rms" else 2
                return layers.NormCost(name, ground, self.shape[0], dims[0], sums)
            case "attention":
                return layers.AttentionCost(
                    name,
                    ground,
                    dims[0],
                    self.head_dim,
                    self.window,
                    context_index=ground.context_index,
                    prefix_tokens=self.prefix[2] if self.prefix else 0,
                )
            case "mixture":
                experts, width, _ = self.shape
                options = (self.has_capacity, self.has_aux_loss)
                return layers.MoECost(
                    name, ground, experts, self.top, width, self.matrices, *options
                )
            case "lengths":
                return layers.DoraNormCost(name, ground, self.shape[0], *dims)
            case "opening":
                return layers.SequenceGatherCost(name, ground)
            case "entropy":
                return layers.CrossEntropyCost(name, ground, dims[0])
            case "scores":
                streams, features = self.shape
                return layers.StreamScoresCost(name, ground, (streams, features))

    def _build_factor(self, ground: LayoutContext) -> products.LinearWeight:
        return products.LinearWeight(self.shape, self.dims, ground, self.trainable)

    def param_specs(self, prefix: str, block: str, ground: LayoutContext) -> Iterator[ParamSpec]:
        """Yields its parameters in a layout, including a tied one under its owner's name.

        block: the block that contains it; each layer outside of blocks is its own bucket.
        """
        name = f"{prefix}{self.name}"
        for leaf in self.inside:
            yield from leaf.param_specs(f"{name}.", block or name, ground)
        for own in ("prefix_k", "prefix_v") if self.prefix else ():
            names = ("stream", "kv_heads", "prefix", "head_dim")
            yield self._stored_param_spec(f"{name}.{own}", names, self.prefix, "kv_heads", ground)
        # A fused layer itself has no weight.
        if not self.shape:
            return
        if self.kind == "mixture":
            yield from self._expert_param_specs(name, block, ground)
            return
        if self.kind == "scores":
            weight = f"{name}.weight"
            yield self._stored_param_spec(weight, self.dims, self.shape, "embed", ground)
        dims = self.dims
        kind = self.kind
        trained = self.trainable
        if kind in ("linear", "head", "embedding"):
            cut = ground.weight_sharding(self.shape, dims)
            # Embeddings are a separate group of the optimizer; a tied head belongs to it.
            if kind == "embedding" or self.tied:
                group: ParamGroup = "embedding"
            else:
                group = "matrix"
            owner = self.tied or name
            yield ParamSpec(
                f"{owner}.weight",
                block or owner,
                cut,
                group,
                trained,
                matrix_dims=matrix_dims(dims) if group == "matrix" else None,
            )
        if kind in ("rms", "layer", "lengths"):
            yield self._vector_param_spec(f"{name}.weight", dims[0], self.shape[0], ground)
        if self.bias:
            yield self._vector_param_spec(f"{name}.bias", dims[0], self._bias_size, ground)

    def _expert_param_specs(
        self, name: str, block: str, ground: LayoutContext
    ) -> Iterator[ParamSpec]:
        """Yields the router, and the matrices of all experts."""
        (expert, mlp, embed), (e, f, d) = self.dims, self.shape
        found: dict[str, tuple[tuple[Dim, ...], tuple[int, ...]]]
        found = {"router.weight": (("choice", embed), (e, d))}
        found |= {"gate": ((expert, mlp, embed), (e, f, d))} if self.matrices == 3 else {}
        found |= {
            "up": ((expert, mlp, embed), (e, f, d)),
            "down": ((expert, embed, mlp), (e, d, f)),
        }
        for own, (dims, shape) in found.items():
            cut = ground.weight_sharding(shape, dims)
            yield ParamSpec(
                f"{name}.{own}",
                block or name,
                cut,
                "matrix",
                self.trainable,
                matrix_dims=matrix_dims(dims),
            )

    def _stored_param_spec(
        self,
        name: str,
        dims: tuple[Dim, ...],
        shape: tuple[int, ...],
        like: str,
        ground: LayoutContext,
    ) -> ParamSpec:
        """Returns a weight of streams, which is split like the activations of a dim."""
        region = ground.table.activation_rule(like)
        cut = Sharding.from_dims(shape, dims, region, ground.degrees, units=ground.units)
        return ParamSpec(name, VECTORS, cut, "matrix", self.trainable)

    def _vector_param_spec(
        self, name: str, dim: Dim, size: int, ground: LayoutContext
    ) -> ParamSpec:
        region = ground.table.activation_rule(dim_name(dim))
        cut = Sharding.from_dims([size], [dim], region, ground.degrees, units=ground.units)
        return ParamSpec(name, VECTORS, cut, "vector", self.trainable)


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """Layers that run together: the entry, a kind of block, or the exit."""

    name: str
    count: int
    layers: tuple[LayerSpec, ...]
    block_indices: tuple[int, ...] = ()
    """Indices of the model's blocks of this kind, from 0; empty if it is not a block."""
    calls: LayerCalls = ONE_CALL
    """How often a pass runs it, on average over training steps: a recurrent core several times."""
    num_inputs: int = 1
    """Tensors `[b, s, d]` that it reads: 2, the stream and an addend, with a ladder residual."""

    @property
    def is_block(self) -> bool:
        """Whether it is a block, of which there may be several."""
        return bool(self.block_indices)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of one such part."""
        return sum(leaf.num_parameters for leaf in self.layers)

    @cached_property
    def num_expert_parameters(self) -> int:
        """Number of its parameters that belong to experts."""
        return sum(leaf.num_expert_parameters for leaf in self.layers)

    @cached_property
    def inner_blocks(self) -> tuple[BlockSpec, ...]:
        """The layers of a recurrent core as blocks; empty for other parts."""
        found: dict[str, list[LayerSpec]] = {}
        for leaf in self.layers:
            # A core has a container of layers, `layers.0`, `layers.1`, ...
            name = re.match(r"layers\.\d+\.", leaf.name)
            if name:
                inner = replace(leaf, name=leaf.name.removeprefix(name.group()))
                found.setdefault(name.group(), []).append(inner)
        return tuple(replace(self, layers=tuple(some), calls=ONE_CALL) for some in found.values())

    @cached_property
    def streams(self) -> int:
        """Samples of a block for each sample of a batch; 1 outside of blocks."""
        return max((leaf.streams for leaf in self.layers if self.is_block), default=1)

    def layers_of_kind(self, *kinds: LayerKind) -> list[LayerSpec]:
        """Returns its layers of these kinds."""
        return [leaf for leaf in self.layers if leaf.kind in kinds]


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model: its entry, its kinds of blocks, its exit."""

    name: str
    parts: tuple[BlockSpec, ...]
    units: Mapping[str, int]
    """Number of units of each named dim (heads, not their elements)."""
    blocks_path: str = "blocks"
    """Module path of the list of blocks."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Other settings that affect memory: activation, positions, dropout."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(part.count for part in self.parts if part.is_block)

    @cached_property
    def parts_in_order(self) -> tuple[BlockSpec, ...]:
        """The part at each position: entry, blocks in order, exit."""
        # Kinds of blocks may alternate, as dense and MoE layers do.
        blocks = {n: part for part in self.parts for n in part.block_indices}
        entry, *_, leaving = self.parts
        return entry, *(blocks[n] for n in sorted(blocks)), leaving

    @cached_property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        return sum(part.count * part.num_parameters for part in self.parts)

    @cached_property
    def num_trainable(self) -> int:
        """Number of trainable parameters."""
        return sum(part.count * sum(map(_count_trainable, part.layers)) for part in self.parts)

    @cached_property
    def streams(self) -> int:
        """Samples between its blocks for each sample of a batch (ParScale)."""
        return max(part.streams for part in self.parts)

    @property
    def is_recurrent(self) -> bool:
        """Whether a pass runs a block several times."""
        return any(part.calls != ONE_CALL for part in self.parts)

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return next(
            (leaf.head_dim for p in self.parts for leaf in p.layers_of_kind("attention")), 0
        )

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return any(leaf.tied for leaf in self.parts[-1].layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-compatible dict."""
        parts = [
            {
                "name": part.name,
                "leaves": [_layer_to_dict(leaf) for leaf in part.layers],
                **({"numbers": _to_ranges(part.block_indices)} if part.block_indices else {}),
                **({"calls": astuple(part.calls)} if part.calls != ONE_CALL else {}),
                **({"inputs": part.num_inputs} if part.num_inputs > 1 else {}),
            }
            for part in self.parts
        ]
        named = {"name": self.name, "units": dict(self.units), "blocks": self.blocks_path}
        return {"format": SPEC_FORMAT, **named, "traits": dict(self.traits), "parts": parts}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> ModelSpec:
        """Returns a model from its JSON dict."""
        parts = []
        for part in facts["parts"]:
            numbers = tuple(n for a, b in part.get("numbers", ()) for n in range(a, b))
            found = tuple(_layer_from_dict(leaf) for leaf in part["leaves"])
            more = {
                "calls": LayerCalls(*part.get("calls", astuple(ONE_CALL))),
                "num_inputs": part.get("inputs", 1),
            }
            parts.append(BlockSpec(part["name"], len(numbers) or 1, found, numbers, **more))
        units = facts["units"]
        traits = facts["traits"]
        return cls(facts["name"], tuple(parts), units, facts["blocks"], traits)


def _count_trainable(leaf: LayerSpec) -> int:
    if leaf.inside:
        return sum(map(_count_trainable, leaf.inside))
    if leaf.trainable:
        return leaf.num_parameters
    return 0


def _to_ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Returns the numbers as half-open ranges [start, stop]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1][1] = n + 1
        else:
            found.append([n, n + 1])
    return found


def _layer_to_dict(leaf: LayerSpec) -> dict[str, Any]:
    """Returns a layer as a JSON-compatible dict, without fields that have their default value."""
    usual = asdict(LayerSpec(leaf.name, leaf.kind))
    found = {k: v for k, v in asdict(leaf).items() if k in ("name", "kind") or v != usual[k]}
    if leaf.inside:
        found["inside"] = [_layer_to_dict(one) for one in leaf.inside]
    # A round trip turns tuples into lists, as a reader of the file sees them.
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _layer_from_dict(facts: Mapping[str, Any]) -> LayerSpec:
    dims = tuple(dim if isinstance(dim, str) else (dim[0], dim[1]) for dim in facts.get("dims", ()))
    lists = ("shape", "prefix")
    more = {k: v for k, v in facts.items() if k not in ("dims", *lists, "inside")}
    more |= {name: tuple(facts.get(name, ())) for name in lists}
    inside = tuple(_layer_from_dict(one) for one in facts.get("inside", ()))
    return LayerSpec(**more, dims=dims, inside=inside)


# ---- sources of specs -------------------------------------------------------------------


@cache
def dense_decoder(
    *,
    layers: int,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    gated: bool,
    vocab: int,
    tied: bool = False,
    biases: bool = False,
    norm: Literal["rms", "layer"] = "rms",
    positions: int = 0,
    name: str = "",
) -> ModelSpec:
    """Returns a decoder with these sizes. positions: number of learned ones; 0 means rotary."""
    units = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "vocab": vocab}

    def linear(name: str, out: str, into: str, *shape: int) -> LayerSpec:
        return LayerSpec(name, "linear", (out, into), shape, biases)

    def normed(name: str) -> LayerSpec:
        return LayerSpec(name, norm, ("embed",), (embed,), biases and norm == "layer")

    width = heads * head_dim
    narrow = kv_heads * head_dim
    qkv = (
        linear("q", "heads", "embed", width, embed),
        linear("k", "kv_heads", "embed", narrow, embed),
        linear("v", "kv_heads", "embed", narrow, embed),
    )
    enter = tuple(linear(one, "mlp", "embed", mlp, embed) for one in ("gate", "up"))
    up = LayerSpec("mlp.enter", "siblings", inside=enter)
    block = (
        normed("norm1"),
        LayerSpec("attention.qkv", "siblings", inside=qkv),
        LayerSpec("attention.core", "attention", ("heads",), head_dim=head_dim),
        linear("attention.o", "embed", "heads", embed, width),
        normed("norm2"),
        up if gated else linear("mlp.up", "mlp", "embed", mlp, embed),
        linear("mlp.down", "embed", "mlp", embed, mlp),
    )
    entry = [LayerSpec("embed", "embedding", ("vocab", "embed"), (vocab, embed))]
    if positions:
        entry.append(LayerSpec("position", "embedding", ("position", "embed"), (positions, embed)))
    head = LayerSpec("head", "head", ("vocab", "embed"), (vocab, embed), tied="embed" * tied)
    traits = {
        "activation": "swiglu" if gated else "gelu",
        "position_embedding": "learned" if positions else "rope",
    }
    parts = (
        BlockSpec(ENTRY, 1, tuple(entry)),
        BlockSpec("block", layers, block, tuple(range(layers))),
        BlockSpec(EXIT, 1, (normed("norm"), head)),
    )
    return ModelSpec(name, parts, units, traits=traits)


@cache
def load_shipped_spec(name: str) -> ModelSpec:
    """Returns the model of a built-in size, from the spec that ships with the package."""
    path = SPEC_FOLDER / f"{name}.json"
    if not path.is_file():
        known = sorted(one.stem for one in SPEC_FOLDER.glob("*.json"))
        raise PlanError(
            f"No layer list ships for the model size {name!r}. Known sizes: {', '.join(known)}. "
            "Use one of these, or a run."
        )
    return ModelSpec.from_dict(json.loads(path.read_text()))


def resolve_model_spec(run: RunConfig) -> ModelSpec:
    """Returns the model of a run: a built-in size, from the cache, or built on the meta device."""
    config = asdict(run.model)
    lora = asdict(run.lora)
    size = config.pop("size")
    # Shipped specs have no adapters.
    if run.lora.rank == 0 and _is_shipped_size(run):
        return load_shipped_spec(size)
    # Local imports, so that reading a shipped spec does not load them.
    import hashlib

    from ranvier import launch

    # The key covers everything that the spec depends on, except the name of the size.
    known = [one.name for one in fields(LayerSpec)]
    text = json.dumps([SPEC_FORMAT, known, config, lora], sort_keys=True)
    path = launch.cache_dir() / "leaves" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        return ModelSpec.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        # Not cached yet, or written by another version.
        pass
    # Building the model needs torch, which is only imported here.
    from ranvier.planner.model_spec_torch import build_model_spec

    model = replace(build_model_spec(run.model, run.lora), name=size)
    # A cache that cannot be written is not an error: the next run builds the model again.
    with suppress(OSError):
        _write_atomically(path, json.dumps(model.to_dict()))
    return model


def _write_atomically(path: Path, text: str) -> None:
    """Writes a file by renaming a temporary one; other ranks may write the same file."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def _is_shipped_size(run: RunConfig) -> bool:
    """Returns whether a run has a built-in size in all settings that its spec depends on."""
    from ranvier.config.kinds import named_model

    size = run.model.size
    return (SPEC_FOLDER / f"{size}.json").is_file() and run.model == named_model(size)
