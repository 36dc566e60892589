"""Attention core: heads are split over row (or row·col), and samples may be split over col.

With context = 1 the layer does not communicate. It calls the serial core unchanged; positions and
documents, which cover the whole micro-batch, are sliced to the samples of this rank. If context
splits the tokens of a sample, a rank attends from its tokens to those of all ranks
(`nn.context_attention`).

In a step of an inference engine, the ranks of context store the pages of a sequence in turn. Every
rank attends from all tokens of the step to its own pages, and the results are merged by their
log-sum-exps, in fp32. Where the tokens of the step are split over context, as they are if prompts
are computed, they are gathered before, and each rank merges the results of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice
from ranvier.cost.context_attention import KeyShape, check_ulysses_heads, choose_method
from ranvier.cost.layers import AttentionCost
from ranvier.errors import ShardingError
from ranvier.nn.context_attention import (
    AxisExchange,
    KVGather,
    Ring,
    Ulysses,
    build_context_attention,
)
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.context_graph import BlockAttention, attend_over_context
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.sharding import Dim
from ranvier.trace import Event

PREFIX_DIMS = ("stream", "kv_heads", "prefix", "head_dim")
"""Dims of the learned keys and values of the streams of a sample (ParScale)."""


class AttentionCore(ParallelLayer):
    """Causal attention for the heads, samples and tokens of this rank.

    q, y: `[b/col, s/context, h/row, k]`; k, v: `[b/col, s/context, g/row, k]`; angles: rotary
    angles or positions; documents: `[b, s]`, None, `ContextDocuments`, or `BlockAttention` in a
    compiled graph.
    Communicates: keys and values over context, as `nn.context_attention` describes; in an inference
    engine all-gather of outputs and log-sum-exps over context, or, if context splits tokens,
    all-gather of q, k and v, and all-to-all of outputs and log-sum-exps.

    Args:
        site: Name and context of the layer.
        serial: The serial attention core, which does the computation.
        dims: Name of the dim of the query heads, ("heads",).
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        (dim,) = dims
        assert isinstance(dim, str), dims
        self.dim = dim
        self.serial = serial
        self.batch_axis = site.axis(*site.table.axes_inside_replica(dim, "batch"))
        # Learned keys and values of the streams of a sample, split like those of tokens.
        self.prefix_k: torch.nn.Parameter | None
        self.prefix_v: torch.nn.Parameter | None
        for name in ("prefix_k", "prefix_v"):
            rule = site.table.activation_rule("kv_heads")
            param = getattr(serial, name, None)
            self.shard_parameter(name, param, PREFIX_DIMS, rule=rule, std=0.02)
            if param is not None:
                # The serial core gets those of this rank's samples.
                serial.register_parameter(name, None)
        self.context_axis = site.axis(
            *(axis for axis in site.table.token_axes(dim, "seq") if axis == "context")
        )
        if self.context_axis.size > 1 and site.context_attention == "ulysses":
            # Before the first step, where the sizes of a model are known.
            parts = site.axis(*site.table.feature_axes(dim)).size
            heads, kv_heads = (max(site.units[name] // parts, 1) for name in (dim, "kv_heads"))
            check_ulysses_heads(heads, kv_heads, self.context_axis.size)

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        q, k = (("batch", "seq", dim, "head_dim") for dim in ("heads", "kv_heads"))
        ids = ("batch", "seq")
        y = ("batch", "seq", "heads")
        config = _example_config()
        return [LayerExample(lambda twin: twin(config), ("heads",), [q, k, k, ids, ids], [y])]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Any,
        *,
        is_rotated: bool = False,
    ) -> Tensor:
        """Computes attention. documents: ids, or `Documents`, of which a token range is used.

        is_rotated: q and k are results of `rotate`.
        """
        tokens = q.shape[0] * q.shape[1]
        angles = self._local_samples(angles, tokens)
        core: Any = self.serial
        if isinstance(documents, BlockAttention):
            assert self.prefix_k is None, "refused by `parallelize`"
            q, k = core.rotate(q, k, angles)
            found: Tensor = attend_over_context(q, k, v, documents.number, self.local_name)[0]
            return found.flatten(2)
        documents = self._local_samples(documents, tokens)
        prefix = self._local_prefix(q.shape[0])
        if self.context_axis.size == 1:
            options: dict[str, Any] = {"is_rotated": True} if is_rotated else {}
            if prefix is not None:
                options["prefix"] = prefix
            out: Tensor = core(q, k, v, angles, documents, **options)
            return out
        if not isinstance(documents, ContextDocuments):
            if getattr(core, "kv_caches", ()):
                q, k = core.rotate(q, k, angles)
                return self._attend_to_pages(q, k, v, documents)
            raise ShardingError(
                f"{self.site.name} received documents of type {type(documents).__name__} with "
                f"context={self.context_axis.size}. The batch must be split over context. Call the "
                "model with ranvier.call_on_full_batch, or use `ranvier train`."
            )
        if not is_rotated:
            q, k = self.rotate(q, k, angles)
        how = self._context_attention(q, k, documents)
        with self.trace_scope():
            exchange = AxisExchange(self.context_axis)
            return how.attend(q, k, v, exchange, core.cap, self._run_once, prefix).flatten(2)

    def _local_prefix(self, samples: int) -> tuple[Tensor, Tensor] | None:
        """Returns keys and values of the prefix of each of this rank's samples, `[b·n, g/row, k]`.

        samples: number of them. None without streams.
        """
        if self.prefix_k is None or self.prefix_v is None:
            return None
        core: Any = self.serial
        first = self.batch_axis.index * samples
        both = (self.prefix_k, self.prefix_v)
        prefix_k, prefix_v = (core.prefix_rows(x, first, samples) for x in both)
        return prefix_k, prefix_v

    def rotate(self, q: Tensor, k: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns scaled queries and keys, rotated by their positions."""
        core: Any = self.serial
        rotated: tuple[Tensor, Tensor] = core.rotate(q, k, angles)
        return rotated

    def forward_rows(
        self, q: Tensor, k: Tensor, v: Tensor, documents: ContextDocuments
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns attention `[b/col, s/context, h, k]` outside of autograd, and what else
        `backward_rows` needs."""
        core: Any = self.serial
        how = self._context_attention(q, k, self._local_samples(documents, q.shape[0] * q.shape[1]))
        q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
        y, saved = how.forward_rows(q_rows, k_rows, v_rows, self._graph_exchange(), core.cap)
        return y.view(q.shape), saved

    def backward_rows(
        self,
        dy: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        y: Tensor,
        saved: tuple[Tensor, ...],
        documents: ContextDocuments,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs q, k and v of `forward_rows`, whose output is y."""
        core: Any = self.serial
        q, k, _ = inputs
        how = self._context_attention(q, k, self._local_samples(documents, q.shape[0] * q.shape[1]))
        q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in inputs)
        rows = (dy.flatten(0, 1), q_rows, k_rows, v_rows, y.flatten(0, 1))
        grads = how.backward_rows(*rows, saved, self._graph_exchange(), core.cap)
        return tuple(x.unflatten(0, q.shape[:2]) for x in grads)

    def _graph_exchange(self) -> AxisExchange:
        """Returns the communication of a graph, whose events have the name of this layer."""
        return AxisExchange(self.context_axis, self.site.name)

    def _context_attention(
        self, q: Tensor, k: Tensor, documents: ContextDocuments
    ) -> KVGather | Ring | Ulysses:
        """Returns the attention to the tokens of all ranks of context, for these documents."""
        core: Any = self.serial
        site = self.site
        shape = KeyShape(q.shape[2], k.shape[2], q.shape[3], q.element_size(), 0)
        overlap = "context_keys" in site.bucket_scheduler.overlap
        window = core.window if core.window < sum(documents.orders[0].lengths) else 0
        method = documents.get_or_build(
            ("method", shape, window),
            lambda: choose_method(site.context_attention, documents.orders, shape, window),
        )
        return documents.get_or_build(
            ("attention", method, window, overlap),
            lambda: build_context_attention(
                documents.find_layout(method, window), core.segment_attention, overlap
            ),
        )

    def _attend_to_pages(self, q: Tensor, k: Tensor, v: Tensor, sequences: Any) -> Tensor:
        """Returns attention to the pages of all ranks of context, `[1, T, h·k]`.

        q: `[1, T, h, k]`; k, v: `[1, T, g, k]`, the tokens of one home, equal on all ranks of
        context; if context splits them, `[1, T/context, ...]`. sequences: those of the step.
        Communicates: as the class describes.
        """
        core: Any = self.serial
        axis = self.context_axis
        is_split = self.site.step_context.context_splits == "tokens"
        shape = q.shape
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if is_split:
            sizes = [x.shape[1] for x in (q, k, v)]
            with self.trace_scope():
                whole = collectives.all_gather(torch.cat([q, k, v], 1), axis).wait()
            q, k, v = whole.split(sizes, 1)  # (T, h, k), (T, g, k), (T, g, k)
        o, lse = core.attend_to_own_pages(q, k, v, sequences)
        parts = torch.cat([o, lse.T.unsqueeze(-1)], -1)  # (T, h, k + 1)
        with self.trace_scope():
            if is_split:
                parts = collectives.all_to_all(parts, axis).wait()
            else:
                parts = collectives.all_gather(parts, axis).wait()
        y = merge_parts(parts.unflatten(0, (axis.size, -1)))
        return y.to(q.dtype).view(shape).flatten(2)

    def paged_events(self, num_tokens: int, itemsize: int) -> list[Event]:
        """Predicts the communication of a step of an inference engine.

        num_tokens: tokens of this rank's home; itemsize: bytes per element of activations.
        """
        axis = self.context_axis
        if axis.size == 1:
            return []
        cost = self.cost_model
        heads = cost.local_width // cost.head_dim
        size = num_tokens * heads * (cost.head_dim + 1) * max(itemsize, 4)
        if self.site.step_context.context_splits == "none":
            return [Event("all_gather", ("context",), axis.size * size, self.site.name)]
        kv_heads = self.site.layout_context.feature_sharding(
            self.site.units["kv_heads"], "kv_heads"
        )
        width = (heads + 2 * kv_heads.local_shape[0]) * cost.head_dim
        return [
            Event("all_gather", ("context",), num_tokens * width * itemsize, self.site.name),
            Event("all_to_all", ("context",), size, self.site.name),
        ]

    def _run_once(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Runs attention; the recomputation of a block gets the saved result."""
        results = self.site.grid.trace.saved_results
        if results is None:
            return work()
        found: tuple[Tensor, ...] = results.run_once(work, always=True)
        return found

    def _local_samples(self, x: Any, tokens: int) -> Any:
        """Returns the part of x for this rank's samples, which have `tokens` tokens in total."""
        if isinstance(x, Tensor):
            # All samples have the same positions.
            if x.shape[0] == 1:
                return x
            return local_slice(x, self.batch_axis, 0)
        if x is None or self.batch_axis.size == 1:
            return x
        # `Documents` count tokens of all samples, so a range of samples is a range of tokens.
        return x.narrow(self.batch_axis.index * tokens, tokens)

    @property
    def cost_model(self) -> AttentionCost:
        """Cost of the scores and values of the local heads."""
        width, window = (getattr(self.serial, name, 0) for name in ("head_dim", "window"))
        return AttentionCost(
            self.site.name,
            self.site.layout_context,
            self.dim,
            width,
            window or 0,
            context_index=self.context_axis.index,
            sample_part=self.batch_axis.index,
            prefix_tokens=0 if self.prefix_k is None else self.prefix_k.shape[2],
        )


def merge_parts(parts: Tensor) -> Tensor:
    """Returns attention to all keys from attention to disjoint sets of them.

    l = log Σ exp(l_i), o = Σ o_i exp(l_i - l); parts: o_i and l_i, `[C, T, h, k + 1]`; o: `[T, h,
    k]`. A part without visible keys has l_i = -inf; without any, o = 0.
    """
    o, lse = parts[..., :-1], parts[..., -1:]
    total = torch.logsumexp(lse, 0)
    # -inf minus -inf would be NaN.
    shift = total.masked_fill(total == float("-inf"), 0.0)
    return (o * (lse - shift).exp()).sum(0)


def _example_config() -> Any:
    """Returns the fields of a decoder's config that an attention core reads."""
    rope = dict.fromkeys(("rope_scale", "attention_factor", "partial_rotary_factor"), 1.0)
    plain = {
        "query_pre_attn_scalar": 0.0,
        "attn_logit_softcap": 0.0,
        "window_of_layer": lambda layer: 0,
        "streams": 1,
        "is_recurrent": False,
    }
    return SimpleNamespace(
        head_dim=4, position_embedding="rope", rope="llama3", rope_theta=1e4, **rope, **plain
    )
