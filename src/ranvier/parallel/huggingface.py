"""Hugging Face models: derives their `dims` tables from the tensor-parallel plan they ship with.

The plan lists the column-parallel (`colwise`) and row-parallel (`rowwise`) layers; the names of the
layers give their dims. GPT-2 ships without a plan; its table is in this module. Three things change
in the model:

* Its attention reads shapes from its input. The sequence is therefore gathered over row once, at
  the input of each attention or MLP module (`SequenceGather`), and the layers inside do not gather
  it again. For the same reason col splits features inside these modules, never samples.
* Its body would derive positions and mask from its input, which is a part of the sequence here.
  Both are computed from the whole sequence instead.
* Its `forward` gets the signature of our models: (tokens, targets, positions, documents) to a loss.

Sliding windows, soft caps and tokens that are split over context need our attention core
(`huggingface_attention`). Parameters keep their Hugging Face names. Importing this module does not
import transformers. Not supported: attention dropout, caches and generation, and without our core
attention other than `sdpa` and `eager`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ranvier.comm.autograd import all_gather
from ranvier.config.plan import InnerSplit
from ranvier.cost.layers import SequenceGatherCost
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.models.document_attention import Documents, normalize_documents
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.embedding import Embedding
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.nn.linear import Conv1D
from ranvier.nn.norm import RMSNorm
from ranvier.parallel.huggingface_attention import (
    ATTENTION_NAME,
    TYPES_WITH_CORE,
    add_attention_cores,
    find_context_problems,
    needs_core,
)
from ranvier.sharding import Dim, Sharding, ShardingTable

LayerDims = dict[str, tuple[Dim, ...]]
LayerFactories = Mapping[type[torch.nn.Module], Callable[..., ParallelLayer]]

COLUMN_PARALLEL = "enter"
ROW_PARALLEL = "leave"
PER_HEAD = "head"
EMBEDDING = "look up"
TP_STYLES = {
    "colwise": COLUMN_PARALLEL,
    "colwise_gather_output": COLUMN_PARALLEL,
    "colwise_rep": COLUMN_PARALLEL,
    "rowwise": ROW_PARALLEL,
    "replicated_with_grad_allreduce": PER_HEAD,
    "embedding_rowwise": EMBEDDING,
}
"""What each style of a tensor-parallel plan means on the grid."""
INNER_DIMS = {
    "q_proj": "heads",
    "k_proj": "kv_heads",
    "v_proj": "kv_heads",
    "o_proj": "heads",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
    "lm_head": "vocab",
}
"""The inner dim of a layer in the plan, by the last part of its name."""
TYPES_WITH_TP_PLAN = ("llama", "qwen3", "mistral", "gemma2")
"""Model types whose plan is sufficient; their other weights are norms and the embedding."""
GPT2_DIMS: LayerDims = {
    "transformer.wte": ("vocab", "embed"),
    "transformer.wpe": ("position", "embed"),
    "transformer.h.*.ln_1": ("embed",),
    "transformer.h.*.attn.c_attn": ("embed", (3, "heads")),
    "transformer.h.*.attn.c_proj": ("heads", "embed"),
    "transformer.h.*.ln_2": ("embed",),
    "transformer.h.*.mlp.c_fc": ("embed", "mlp"),
    "transformer.h.*.mlp.c_proj": ("mlp", "embed"),
    "transformer.ln_f": ("embed",),
    "lm_head": ("vocab", "embed"),
}
"""Dims of GPT-2, which ships without a plan; its Conv1D weights are (in, out)."""
REMEDY = "Pass the dims of all layers to parallelize(dims={layer: dims})."
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention implementations that accept a mask for the whole sequence."""


class ScaledEmbedding(Embedding):
    """Embedding whose rows are multiplied by a constant, as in Gemma.

    ids: `[b, s]`; y: `[b, s/row, d/col]`. Communicates: as `Embedding`.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Embedding, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        self.scale = float(serial.scalar_embed_scale)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of ids, `[b, s]`, and scales them."""
        y = super().forward(ids)
        # Rounded to the dtype of the weights, as in transformers.
        return y * torch.full((), self.scale, dtype=y.dtype, device=y.device)


def build_offset_norm(site: LayerContext, serial: Any, dims: Sequence[Dim]) -> RMSNorm:
    """Returns the parallel version of a norm of Gemma, which adds 1 to its weight."""
    serial.weight_offset = 1.0
    return RMSNorm(site, serial, dims)


HF_LAYERS: dict[str, Callable[..., ParallelLayer]] = {
    "LlamaRMSNorm": RMSNorm,
    "Qwen3RMSNorm": RMSNorm,
    "MistralRMSNorm": RMSNorm,
    "Gemma2RMSNorm": build_offset_norm,
    "Gemma2TextScaledWordEmbedding": ScaledEmbedding,
    "Conv1D": Conv1D,
}
"""Layers of transformers and their parallel versions, by class name."""


class SequenceGatherPlaceholder(torch.nn.Module):
    """Marks the input of an attention or MLP module; replaced by `SequenceGather` on a grid."""


class LossPlaceholder(torch.nn.Module):
    """Marks where the loss is computed; replaced by `CrossEntropy` on a grid."""


class SequenceGather(ParallelLayer):
    """Gathers the whole sequence, once for all layers of a module.

    x: `[b, s/row, d/col]`; y: `[b, s, d/col]`.
    Communicates: all-gather seq over row; backward: reduce-scatter seq over row.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        self.axis = site.axis("row")

    def forward(self, x: Tensor) -> Tensor:
        """Gathers the sequence: `[b, s/row, d/col]` to `[b, s, d/col]`."""
        with self.trace_scope():
            return all_gather(x, self.axis, 1)

    @property
    def cost_model(self) -> SequenceGatherCost:
        """All-gather of the tokens, reduce-scatter of their gradients."""
        return SequenceGatherCost(self.site.name, self.site.layout_context)


def local_units(units: int, dim: str, table: ShardingTable, grid: Grid) -> int:
    """Returns the number of units of `dim` per rank; several ranks may share a kv head."""
    return Sharding.from_dims([units], [dim], table.activation_rule(dim), grid.degrees).local_shape[
        0
    ]


def is_huggingface_model(model: torch.nn.Module) -> bool:
    """Whether a model is from Hugging Face: its config has a type, and it has input embeddings."""
    config = getattr(model, "config", None)
    return hasattr(config, "model_type") and hasattr(model, "get_input_embeddings")


def adapt_model(
    model: Any,
    grid: Grid,
    *,
    inner: InnerSplit,
    dims: LayerDims | None,
    layers: LayerFactories | None,
    device: torch.device | str | None,
) -> tuple[LayerDims, LayerFactories]:
    """Returns the dims of all layers and their parallel layer types, and adapts the model.

    Sets `forward`, `sizes` and `init` of the model. dims, layers: arguments of `parallelize`;
    without dims they are derived from the tensor-parallel plan or the table of the model type.
    Communicates: nothing.
    """
    problems = _find_problems(model, grid, inner)
    if problems:
        raise ShardingError("\n".join(problems))
    names = dict(dims or derive_dims(model))
    sizes = model.sizes = dim_units(model.config)
    model.init = initial_stds(model.config)
    # Attention and MLP modules: the parents of layers between the residual stream and inner dims.
    entrances = sorted(
        {path.rpartition(".")[0] for path, dims in names.items() if _is_inner_layer(dims)}
    )
    for path in entrances:
        module = model.get_submodule(path)
        module.add_module("entrance", SequenceGatherPlaceholder())
        module.register_forward_pre_hook(_gather_input, with_kwargs=True)
        names[f"{path}.entrance"] = ("embed",)
        # Modules read their number of heads from attributes; set them to this rank's numbers.
        _set_local_heads(module, sizes, ShardingTable(inner), grid)
    if needs_core(model, grid.degrees["context"]):
        names |= dict.fromkeys(add_attention_cores(model), ("heads",))
    model.loss = LossPlaceholder()
    names["loss"] = ("vocab",)
    _rebuild_buffers(model, device)
    model.forward = MethodType(forward, model)
    # By class name, as transformers must not be imported here.
    own = {
        type(m): HF_LAYERS[type(m).__name__]
        for m in model.modules()
        if type(m).__name__ in HF_LAYERS
    }
    ours = {SequenceGatherPlaceholder: SequenceGather, LossPlaceholder: CrossEntropy}
    return names, {**own, **ours, **(layers or {})}


# ---- requirements --------------------------------------------------------------------------------


def _find_problems(model: Any, grid: Grid, inner: InnerSplit) -> list[str]:
    """Returns all reasons why a model cannot run on the grid."""
    config = model.config
    name = type(model).__name__
    problems = []
    # Collect all problems, so that one error reports all of them.
    if inner == "samples" and grid.degrees["col"] > 1:
        problems.append(
            f"{name} does not support col_splits='samples' with col={grid.degrees['col']}. "
            "Hugging Face attention reads the number of samples from its input, so col must split "
            "features. Use col_splits='features'."
        )
    problems += find_context_problems(model, grid.degrees["context"])
    if model.get_output_embeddings() is None:
        problems.append(
            f"{name} has no language-model head. The loss predicts the next token. "
            "Use a causal language model class (...ForCausalLM)."
        )
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    has_windows = windows or getattr(config, "sliding_window", None) is not None
    if has_windows and config.model_type not in TYPES_WITH_CORE:
        problems.append(
            f"{name} uses sliding-window attention. Windows are supported for "
            f"{', '.join(TYPES_WITH_CORE)}. Build it with use_sliding_window=False and "
            "sliding_window=None."
        )
    # Our core replaces any implementation.
    own = needs_core(model, grid.degrees["context"])
    if not own and config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        problems.append(
            f"{name} does not support attn_implementation={config._attn_implementation!r}. "
            "Attention must accept a mask for the whole sequence "
            f"({', '.join(ATTENTION_IMPLEMENTATIONS)}). Build the model with 'sdpa'."
        )
    if _recomputes_layers(model):
        problems.append(
            f"{name} has gradient checkpointing enabled. Activation checkpointing is set in the "
            "plan. Call gradient_checkpointing_disable() and use Plan(recompute=...)."
        )
    return problems + list(_find_attention_dropout(model))


def _recomputes_layers(model: Any) -> bool:
    """Whether transformers' own activation checkpointing is enabled."""
    # transformers 5.23 renamed the property; reading the old name emits a warning since then.
    if hasattr(model, "is_activation_checkpointing"):
        return bool(model.is_activation_checkpointing)
    return bool(getattr(model, "is_gradient_checkpointing", False))


def _find_attention_dropout(model: Any) -> Iterator[str]:
    """Yields a problem for the first module with attention dropout."""
    for path, module in model.named_modules():
        layer = getattr(module, "attn_dropout", None)
        p = getattr(module, "attention_dropout", getattr(layer, "p", 0.0))
        if p:
            if layer is None:
                key = "attention_dropout"
            else:
                key = "attn_pdrop"
            yield (
                f"{path} uses attention dropout ({key}={p}). Its random masks would depend on the "
                f"grid. Build the model with {key}=0.0."
            )
            return


# ---- tables --------------------------------------------------------------------------------------


def derive_dims(model: Any) -> LayerDims:
    """Returns the dims of all layers, from the plan or from the table of the model type."""
    kind = model.config.model_type
    if kind == "gpt2":
        return {
            path: dims for key, dims in GPT2_DIMS.items() for path in _matching_layers(model, key)
        }
    if kind not in TYPES_WITH_TP_PLAN:
        raise ShardingError(
            f"{type(model).__name__} has model_type {kind!r}, whose dims are unknown. "
            f"Known types are gpt2, {', '.join(TYPES_WITH_TP_PLAN)}. {REMEDY}"
        )
    prefix = model.base_model_prefix
    # The plan in the config is relative to the body; the plan of the class covers the head.
    plan = {f"{prefix}.{key}": s for key, s in (model.config.base_model_tp_plan or {}).items()}
    plan |= model._tp_plan or {}
    if not plan:
        raise ShardingError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan is empty). "
            f"The dims of {kind} models are derived from it. {REMEDY}"
        )
    names = {
        path: _dims_from_style(path, plan[key])
        for key in plan
        for path in _matching_layers(model, key)
    }
    # A plan does not list norms and may not list the embedding.
    for path, module in model.named_modules():
        if type(module).__name__ in HF_LAYERS and path not in names:
            names[path] = ("embed",)
        if module is model.get_input_embeddings():
            names[path] = ("vocab", "embed")
        if module is model.get_output_embeddings():
            names[path] = ("vocab", "embed")
    return names


def _matching_layers(model: Any, pattern: str) -> list[str]:
    """Returns the names of the layers that match a pattern in which `*` stands for a number."""
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [path for path, _ in model.named_modules() if regex.fullmatch(path)]


def _dims_from_style(path: str, style: str) -> tuple[Dim, ...]:
    """Returns the dims of a layer from its style and the last part of its name."""
    move = TP_STYLES.get(style)
    inside = INNER_DIMS.get(path.rpartition(".")[2])
    if move is None or (move in (COLUMN_PARALLEL, ROW_PARALLEL) and inside is None):
        raise ShardingError(
            f"The tensor-parallel plan has the style {style!r} for {path}, which is not supported. "
            f"Known styles are {', '.join(TP_STYLES)}; known layers are {', '.join(INNER_DIMS)}. "
            f"{REMEDY}"
        )
    if move == PER_HEAD:
        return ("head_dim",)
    if move == EMBEDDING:
        return ("vocab", "embed")
    assert inside is not None
    if move == COLUMN_PARALLEL:
        return (inside, "embed")
    return ("embed", inside)


def _is_inner_layer(dims: tuple[Dim, ...]) -> bool:
    """Whether a layer maps between the residual stream and the inside of attention or MLP."""
    inside = {dim if isinstance(dim, str) else dim[1] for dim in dims} - {"embed"}
    return len(dims) == 2 and inside <= {"heads", "kv_heads", "mlp"}


def dim_units(config: Any) -> dict[str, int]:
    """Returns the number of units of each dim, in the format of `sizes` of our models."""
    heads = config.num_attention_heads
    embed = config.hidden_size
    # GPT-2 calls it n_inner and leaves it None for 4 · hidden_size.
    mlp = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return {
        "embed": embed,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "mlp": mlp or 4 * embed,
        "vocab": config.vocab_size,
    }


def initial_stds(config: Any) -> dict[str, float]:
    """Returns the std of initial weights by the suffix of a layer's name, for models on meta."""
    std = float(config.initializer_range)
    # GPT-2 scales projections onto the residual stream by 1 / √(2 · layers).
    out = std / float(2 * config.num_hidden_layers) ** 0.5
    if config.model_type == "gpt2":
        return {".c_proj": out, "": std}
    return {"": std}


# ---- the model -----------------------------------------------------------------------------------


def _set_local_heads(
    module: Any, sizes: Mapping[str, int], table: ShardingTable, grid: Grid
) -> None:
    """Sets the number of heads of an attention module to the number on this rank."""
    if not hasattr(module, "head_dim"):
        return
    heads = local_units(sizes["heads"], "heads", table, grid)
    kv_heads = local_units(sizes["kv_heads"], "kv_heads", table, grid)
    width = heads * module.head_dim
    # Attributes differ by model: the first is for Llama and Qwen, the others are for GPT-2.
    here = {
        "num_key_value_groups": heads // kv_heads,
        "num_heads": heads,
        "split_size": width,
        "embed_dim": width,
    }
    for attribute, value in here.items():
        if hasattr(module, attribute):
            setattr(module, attribute, value)


def _rebuild_buffers(model: Any, device: torch.device | str | None) -> None:
    """Moves buffers to the device; rotary buffers on meta are recomputed."""
    for path, module in list(model.named_modules()):
        buffers = dict(module.named_buffers(recurse=False))
        if any(buffer.is_meta for buffer in buffers.values()):
            # The parallel version of a layer does not use its buffers.
            if type(module).__name__ in HF_LAYERS:
                continue
            if "inv_freq" not in buffers:
                raise ShardingError(
                    f"{path} has buffers without values: {', '.join(buffers)}. Only rotary "
                    "frequencies can be recomputed. Do not build the model on the meta device."
                )
            # A rotary embedding needs only the config.
            with torch.device(device or "cpu"):
                made = type(module)(config=module.config)
            model.set_submodule(path, made)
        elif device is not None:
            for name, buffer in buffers.items():
                setattr(module, name, buffer.to(device))


def forward(
    self: Any,
    tokens: Tensor,
    targets: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | Documents | ContextDocuments | None = None,
) -> Tensor:
    """Returns logits `[b, s, V/(row·col)]`, or the sum of the token losses if targets are given.

    All inputs: `[b, s/context]`. documents: tokens attend only to tokens with the same number; if
    context splits samples, the order of their tokens. positions: 0, 1, 2, ... by default.
    Communicates: the collectives of its layers.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    x = self.get_input_embeddings()(tokens)  # (b, s/row, d/col)
    implementation = self.config._attn_implementation
    more: dict[str, Any] = {}
    if implementation == ATTENTION_NAME:
        more["documents"] = normalize_documents(documents)
        documents = None
    assert documents is None or isinstance(documents, Tensor), type(documents)
    mask = _attention_mask(tokens, documents, x.dtype, implementation)
    # Pass embeddings, not tokens: GPT-2 would reshape its output to the shape of its tokens.
    out = self.base_model(
        inputs_embeds=x,
        position_ids=positions,
        attention_mask=mask,
        use_cache=False,
        return_dict=True,
        **more,
    )
    logits: Tensor = self.get_output_embeddings()(out.last_hidden_state)
    cap = getattr(self.config, "final_logit_softcapping", None)
    if cap:
        logits = torch.tanh(logits / cap) * cap
    if targets is None:
        return logits
    loss: Tensor = self.loss(logits, targets)
    return loss


def _attention_mask(
    tokens: Tensor, documents: Tensor | None, dtype: torch.dtype, implementation: str
) -> Tensor:
    """Returns a mask `[b or 1, 1, s, s]` of the whole sequence, or an empty one if none is needed:
    for causal SDPA, and for our attention core.

    The body forwards any 4-D mask unchanged. Without a mask it creates one itself, with the length
    of its input (a part of the sequence) and, where positions restart, with document boundaries
    that are not wanted. An empty mask prevents that; `_gather_input` replaces it by None.
    """
    if documents is None and implementation in ("sdpa", ATTENTION_NAME):
        return torch.empty(0, 0, 0, 0, device=tokens.device)
    seq = tokens.shape[1]
    seen = torch.ones(1, seq, seq, dtype=torch.bool, device=tokens.device).tril()
    if documents is not None:
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1))  # (b, s, s)
    seen = seen.unsqueeze(1)  # (b, 1, s, s)
    if implementation == "sdpa":
        return seen
    # Eager attention adds the mask to the scores.
    added = torch.zeros_like(seen, dtype=dtype)
    return added.masked_fill(~seen, torch.finfo(dtype).min)


def _gather_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Gathers the input of an attention or MLP module; a forward pre-hook.

    Communicates: all-gather seq over row (`SequenceGather`).
    """
    if args:
        args = (module.entrance(args[0]), *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": module.entrance(kwargs["hidden_states"])}
    mask = kwargs.get("attention_mask")
    # The mask of `_attention_mask` is empty: SDPA runs with is_causal instead.
    if mask is not None and mask.numel() == 0:
        kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs
