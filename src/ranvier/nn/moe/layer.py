"""Mixture-of-experts layer on the grid: tokens are dispatched over `expert`, features stay on col.

The residual stream is `[b, s/row, d/col]`, weights are `[E/expert, f/row, d/col]`. Each of the k
choices of a token is one row of d/col features, which exactly one rank of every group has:

    logits          x · Wᵀ of local features, summed over col, in fp32: all ranks of col agree
    counts          choices per sequence and expert, from all ranks of (expert, row)
    dispatch        rows by expert -all-to-all over expert-> -gather over row->  [T, d/col]
    up, gate        grouped GEMMs, -scatter features over col->                  [T, f/(row·col)]
    down            -gather features over col-> grouped GEMM (partial over row)
    combine         -scatter over row-> -all-to-all over expert-> weighted sum

The all-to-all therefore sends no token twice, and its bytes decrease with row·col (DeepSpeed-TED,
Singh et al. 2023, drops such duplicates; here they do not occur). The ranks of row gather and
scatter as many rows as each of them has, without padding. With expert = 1 all have equally many,
and the host does not wait; otherwise it waits once, for the counts, which are copied while rows are
permuted for the dispatch. The dispatch overlaps with the hidden layer of the shared expert, the
combine with its down projection; backward does the same in reverse (`token_dispatcher`).

Load-balancing losses are not part of the loss that the head returns: their gradient is added in
backward, with the same factor as the loss. Loads are also recorded in backward, which runs once
even if forward is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier import counter_rng
from ranvier.buckets.bucket import ShardedParameter
from ranvier.comm import collectives
from ranvier.comm.autograd import (
    all_gather,
    all_to_all,
    copy_to_axis,
    local_slice,
    reduce_from_axis,
    reduce_scatter,
)
from ranvier.config.plan import Dispatch
from ranvier.cost.layers import MoECost
from ranvier.errors import DataError, ShardingError
from ranvier.nn.layer import (
    LayerContext,
    ParallelLayer,
    StepContext,
    apply_autograd,
    shard_parameter,
)
from ranvier.nn.moe.grouped_gemm import grouped_linear, grouped_mm, grouped_mm_weight_grad
from ranvier.nn.moe.local import local_moe, sharded_local_moe
from ranvier.nn.moe.permutation import TokenPermutation, permute, sort_by_expert, unpermute
from ranvier.nn.moe.token_dispatcher import PendingAllToAll, start_all_to_all
from ranvier.sharding import Dim

ROUTING_STATS = ("drops", "entropy", "extra", "tokens")
"""Statistics recorded per layer, in addition to the load of each expert."""


@dataclass(frozen=True)
class DispatchPlan:
    """How rows are exchanged between the ranks of expert and row."""

    input_splits: list[int]
    """Rows sent to each rank of expert; empty if nothing is sent."""
    output_splits: list[int]
    row_counts: list[int] | None
    """Rows of each rank of row for the experts of this rank; None if they are equal."""
    permutation: TokenPermutation | None
    """Sorts the gathered rows by local expert; None if they are already sorted."""
    ends: Tensor
    """End of the rows of each local expert."""


class MoELayer(ParallelLayer):
    """A mixture of experts, y = Σ_k w_k · expert_k(x) + shared(x).

    x, y: `[b, s/row, d/col]`.
    Communicates: all-reduce of logits over col, all-gather of counts over (expert, row), then
    all-to-all over expert, all-gather over row, reduce-scatter and all-gather over col,
    reduce-scatter over row, all-to-all over expert; backward: the duals in reverse. If row
    splits no tokens, each rank of row takes a share of them, and their outputs are gathered.

    Args:
        site: Name and context of the layer.
        serial: The serial `models.moe.MoELayer` to replace.
        dims: Names of the dims of the expert weights: ("expert", "mlp", "embed").
    """

    gate: torch.nn.Parameter | None
    up: torch.nn.Parameter
    down: torch.nn.Parameter
    bias: Tensor | None

    def __init__(self, site: LayerContext, serial: Any, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        self.rule = serial.rule
        self.function = serial.function
        self.has_gate = serial.has_gate
        expert, mlp, embed = dims
        self.router, beside = torch.nn.Module(), site.for_layer(f"{site.name}.router")
        # The router is a plain submodule, not a parallel layer, so that its weight keeps the serial
        # name `router.weight`.
        self.handles["router"] = shard_parameter(
            self.router, "weight", serial.router.weight, ("choice", embed), beside, std=0.02
        )
        self.shard_parameter("gate", serial.gate, (expert, mlp, embed), std=0.02)
        self.shard_parameter("up", serial.up, (expert, mlp, embed), std=0.02)
        self.shard_parameter("down", serial.down, (expert, embed, mlp), std=0.02)
        self.width = serial.up.shape[1]
        self.shared = serial.shared
        self.expert, self.row, self.col = (site.axis(name) for name in ("expert", "row", "col"))
        self.peer_axis = site.axis("expert", "row")
        self.context = site.axis("context")
        self.seq_axis = site.axis("context", "row")
        self.activation = serial.activation
        self.is_local = self.peer_axis.size == self.col.size == 1
        """Whether nothing is split over ranks, so that the whole layer can be one operation."""
        self.num_local_experts = self.rule.num_experts // self.expert.size
        """Number of experts on this rank."""
        self.duplicate_tokens = False
        """Whether every rank of row and col sends each token, as with replicated tokens; only for
        comparisons."""
        self.assumed_load = 1.0
        """Rows of this rank's experts relative to the mean, for a dry run, in which counts have no
        values."""
        if serial.bias is None:
            bias = None
        else:
            bias = torch.zeros(self.rule.num_experts)
        # A serial model with values, e.g. an imported one, has a trained bias.
        if bias is not None and not serial.bias.is_meta:
            bias = serial.bias.detach().clone()
        self.register_buffer(
            "bias", None if bias is None else bias.to(site.bucket_scheduler.reduce_dtype)
        )
        self.routing_stats = torch.zeros(
            self.rule.num_experts + len(ROUTING_STATS), dtype=torch.float64
        )
        """Loads and ROUTING_STATS of this rank's tokens since the last step."""
        self.rng_stream = torch.tensor(
            counter_rng.random_key(site.step_context.seed, "jitter", site.name)
        )

    @property
    def needs_all_to_all(self) -> bool:
        """Whether tokens are sent to other ranks, so that the host must know their number."""
        return self.expert.size > 1

    def move_buffers_to(self, device: torch.device | str) -> None:
        """Moves tensors that are not parameters to the device of the parameters."""
        self.rng_stream, self.routing_stats = (
            self.rng_stream.to(device),
            self.routing_stats.to(device),
        )
        if self.bias is not None:
            self.bias = self.bias.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Routes tokens to experts, computes the experts and combines their outputs."""
        whole = x
        keeps_tokens = self.site.step_context.row_splits == "none"
        if keeps_tokens:
            # Otherwise the ranks of row would dispatch the same tokens.
            x = local_slice(x, self.row, 1)
        with self.trace_scope():
            logits, routes = self._route_tokens(x)
            counts = self.rule.count_choices(routes, len(x))
            # Every rank gets the counts of all its peers. They determine the splits of the
            # all-to-all, the capacity mask and the balancing loss of whole sequences.
            pending = collectives.all_gather(counts.int().unsqueeze(0), self.peer_axis)
            table = pending.wait().unflatten(0, (self.expert.size, -1))  # (expert, row, b, E)
            kept = self._capacity_mask(routes, table, x)
            sent = self._count_kept_choices(routes, table, kept)
            host = self._start_counts_copy(sent)
            order = sort_by_expert(routes.experts, self.rule.num_experts, kept)
        # The shared expert has its own trace scope, so it runs outside of this layer's scope.
        if self.is_local and self.site.step_context.overlapped_autograd:
            if self.shared is None:
                beside = None
            else:
                beside = self.shared(x)
            with self.trace_scope():
                y = self._run_local_moe(x.flatten(0, 1), routes.weights, order).view(x.shape)
        else:
            y, beside = self._dispatch_and_combine(x, whole, routes, order, sent, host)
        with self.trace_scope():
            y = self._record_stats(y, logits, routes, table, kept)
            if keeps_tokens:
                y = all_gather(y, self.row, 1)
        return y if beside is None else y + beside

    def _dispatch_and_combine(
        self,
        x: Tensor,
        whole: Tensor,
        routes: Any,
        order: TokenPermutation,
        table: Tensor,
        host: Callable[[], Any] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs of the routed experts, like x, and of the shared expert, like whole.

        whole: the input of the layer; x is its part that this rank dispatches. The shared expert
        overlaps with the all-to-all.
        """
        with self.trace_scope():
            # Enqueued before the host waits for the counts, so that the device stays busy.
            rows = permute(x.flatten(0, 1), order)
            lanes = self._plan_dispatch(
                order, table, None if host is None else self._read_host_counts(host), x
            )
            there = self._dispatch_rows(rows, lanes)
            # Delete this reference, so that the rows are freed as soon as they are sent.
            del rows
        if self.shared is None:
            hidden = None
        else:
            # Overlaps with the dispatch.
            hidden = self.shared.compute_hidden(whole)
        with self.trace_scope():
            rows = self._receive_rows(there, lanes)
            del there
            back = self._return_rows(self._apply_experts(rows, lanes), lanes)
            del rows
        if hidden is None:
            beside = None
        else:
            # Overlaps with the all-to-all that returns the rows.
            beside = self.shared.project_down(hidden)
        with self.trace_scope():
            y = self._finish_all_to_all(back)
            # Choices beyond the capacity were not sent. Their rows are zeros.
            if len(y) < order.choices.numel():
                y = F.pad(y, (0, 0, 0, order.choices.numel() - len(y)))
            # Each rank of col has a part of the features, so the gradient of the weights is summed
            # over col.
            weights = copy_to_axis(routes.weights, self.col)
            return unpermute(y, order, weights).view(x.shape), beside

    # ---- routing ------------------------------------------------------------------------

    def _route_tokens(self, x: Tensor) -> tuple[Tensor, Any]:
        """Returns logits `[t, E]` and the chosen experts, equal on all ranks of col."""
        router: Any = self.router
        weight = self._gather_weight("router", router.weight)
        logits = reduce_from_axis(
            self.rule.compute_logits(x.flatten(0, 1), weight), self.col
        )  # (t, E)
        if self.training and self.rule.jitter > 0.0:
            logits = logits * (1.0 + self.rule.jitter * self._router_noise(x).to(logits.dtype))
        return logits, self.rule.route_tokens(logits, self.bias)

    def _gather_weight(self, name: str, param: Tensor) -> Tensor:
        """Returns a weight gathered over depth; differentiable."""
        handle = self.handles[name]
        if torch.compiler.is_compiling() and not handle.is_gathered:
            return param
        if not self.site.step_context.overlapped_autograd or torch.compiler.is_compiling():
            return handle.unsharded_param()
        whole: Tensor = apply_autograd(_GatheredWeight, param, handle, self.site.step_context)
        return whole

    def _router_noise(self, x: Tensor) -> Tensor:
        """Returns numbers in [-1, 1) that depend only on (seed, layer, sample, token, expert).

        `[t, E]`, float64. The sample index counts all samples of the run, so it determines the
        step.
        """
        samples = self.site.sample_numbers
        if samples is None:
            raise DataError(
                f"{self.site.name} uses router noise (router_jitter={self.rule.jitter}), but the "
                "indices of the samples are not set. Random numbers depend on them. Set "
                "model.parallel.step_context.samples before each forward pass."
            )
        # Global token positions: the noise must not depend on the grid.
        tokens = self._token_numbers(x)
        experts = torch.arange(self.rule.num_experts, device=x.device)
        bits = self.rng_stream.to(x.device)
        for counter in (samples.to(x.device).view(-1, 1, 1), tokens.unsqueeze(-1), experts):
            bits = counter_rng.scramble_bits(bits ^ counter)
        return (counter_rng.uniform_bits(bits).double() / 2**31 - 1.0).flatten(0, 1)

    def _token_numbers(self, x: Tensor) -> Tensor:
        """Returns the numbers of the tokens of x in their sequences, `[1 or b, s/row]`."""
        documents = self.site.context_documents
        if documents is not None:
            return documents.sequence_numbers(self.row)
        if self.context.size > 1:
            raise ShardingError(
                f"{self.site.name} does not know which tokens this rank of context has. They are "
                "set for the micro-batches of training steps. Use `ranvier.train.step`."
            )
        first = self.row.index * x.shape[1]
        return torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)

    def _capacity_mask(self, routes: Any, table: Tensor, x: Tensor) -> Tensor | None:
        """Returns which choices are within the expert capacity, `[t, k]`; None for all.

        Communicates: all-gather of the choices over (context, row), if context splits tokens.
        """
        if self.rule.capacity_factor == 0.0:
            return None
        documents = self.site.context_documents
        if documents is not None:
            # Tokens have any order over context: the capacity is assigned in sequence order.
            local = routes.experts.view(*x.shape[:2], -1)  # (b, s/(context·row), k)
            every = collectives.all_gather(local.int(), self.seq_axis, 1).wait().long()
            ordered = every.take_along_dim(documents.places.unsqueeze(-1), 1)  # (b, s, k)
            whole = replace(routes, experts=ordered.flatten(0, 1))
            mask: Tensor = self.rule.capacity_mask(whole, len(x), ordered.shape[1], None)
            numbers = self._token_numbers(x).unsqueeze(-1)
            return mask.view_as(ordered).take_along_dim(numbers, 1).flatten(0, 1)
        # The sequence is split over row: earlier ranks of row have the earlier tokens, which have
        # priority.
        before = table[self.expert.index, : self.row.index].sum(0)  # (b, E)
        kept: Tensor = self.rule.capacity_mask(routes, len(x), x.shape[1] * self.row.size, before)
        return kept

    def _count_kept_choices(self, routes: Any, table: Tensor, kept: Tensor | None) -> Tensor:
        """Returns a table of the choices that ranks send, `[expert, row, b, E]`.

        Without context, `_admitted_counts` derives the choices within the capacity from all.
        Communicates: all-gather of counts over (expert, row), if context splits tokens.
        """
        if kept is None or self.context.size == 1:
            return table
        hot = F.one_hot(routes.experts, self.rule.num_experts) * kept.unsqueeze(-1)
        counts = hot.view(table.shape[2], -1, self.rule.num_experts).sum(1)  # (b, E)
        pending = collectives.all_gather(counts.int().unsqueeze(0), self.peer_axis)
        return pending.wait().view_as(table)

    def _admitted_counts(self, table: Tensor, seq: int) -> Tensor:
        """Returns the number of choices within the capacity on each rank, `[expert, row, E]`."""
        if self.rule.capacity_factor > 0.0:
            # Slots are assigned in sequence order, so the cumulative sum over row is capped at the
            # capacity.
            through = table.cumsum(1).clamp(max=self.rule.expert_capacity(seq))
            zero = torch.zeros_like(through[:, :1])
            table = through.diff(dim=1, prepend=zero)
        return table.sum(2)

    # ---- dispatch and combine -----------------------------------------------------------

    def _start_counts_copy(self, table: Tensor) -> Callable[[], Any] | None:
        """Starts copying the counts to the host; returns None if they are not needed or on meta."""
        if self.expert.size == 1 or table.is_meta:
            return None
        return _copy_to_host_async(table)

    def _read_host_counts(self, host: Callable[[], Any]) -> Any:
        """Returns the counts on the host; a recomputed block reuses its saved counts."""
        results = self.site.grid.trace.saved_results
        if results is None:
            return host()
        return results.run_once(host)

    def _all_to_all_splits(
        self, known: Any, choices: int, seq: int
    ) -> tuple[list[int], list[int], list[int] | None]:
        """Returns rows to send to and receive from each rank of expert, and rows of ranks of row.

        known: the counts. If None (dry run), this rank's experts get `assumed_load` times the mean
        from each rank of row.
        """
        ranks = self.expert.size
        mine = self.expert.index
        if known is None:
            receive = split_evenly(math.ceil(choices * self.assumed_load), ranks)
            send = split_evenly(choices - receive[mine], ranks - 1)
            return [*send[:mine], receive[mine], *send[mine:]], receive, None
        all_ = (
            self._admitted_counts(torch.tensor(known), seq)
            .unflatten(2, (-1, self.num_local_experts))
            .sum(3)
        )
        send = all_[mine, self.row.index].tolist()
        receive = all_[:, self.row.index, mine].tolist()
        return send, receive, all_[:, :, mine].sum(0).tolist()

    def _plan_dispatch(
        self, order: TokenPermutation, table: Tensor, known: Any, x: Tensor
    ) -> DispatchPlan:
        """Computes the splits of the all-to-all and the permutation of the received rows."""
        # Nothing is exchanged: rows are already sorted by expert.
        if self.peer_axis.size == 1:
            return DispatchPlan([], [], None, None, order.ends)
        rows = order.choices.numel()
        seq = x.shape[1] * self.seq_axis.size
        send = list[int]()
        receive = list[int]()
        row_counts: list[int] | None = None
        if self.expert.size > 1:
            send, receive, row_counts = self._all_to_all_splits(known, rows, seq)
            rows = sum(receive)
        # After the gather over row, rows are ordered by (rank of row, sending rank of expert,
        # expert). List the expert of each row, and sort by it.
        mine = self.num_local_experts
        first = self.expert.index * mine
        taken = self._admitted_counts(table, seq)[
            :, :, first : first + mine
        ]  # (expert, row, E/expert)
        here = taken.transpose(0, 1).flatten(1)  # (row, expert · E/expert)
        ids = torch.arange(mine, device=x.device).repeat(self.expert.size)
        # The host does not know how many choices are beyond the capacity if it does not wait. They
        # are the last rows of each rank of row, with the id `mine`.
        has_drops = self.expert.size == 1 and self.rule.capacity_factor > 0.0
        if has_drops:
            here = torch.cat([here, rows - here.sum(1, keepdim=True)], 1)
            ids = F.pad(ids, (0, 1), value=mine)
        total = rows * self.row.size if row_counts is None else sum(row_counts)
        # With `output_size` the host does not wait for the device.
        each = ids.repeat(self.row.size).repeat_interleave(here.flatten(), output_size=total)
        each = each.unsqueeze(1)
        order = sort_by_expert(each, mine, each < mine if has_drops else None)
        return DispatchPlan(send, receive, row_counts, order, order.ends)

    def _dispatch_rows(self, rows: Tensor, lanes: DispatchPlan) -> Tensor | PendingAllToAll:
        """Starts sending rows to the ranks of their experts."""
        if self.expert.size == 1:
            return rows
        # Choices beyond the capacity are sorted last and are not sent.
        rows = rows[: sum(lanes.input_splits)]
        return self._start_all_to_all(
            rows, lanes.input_splits, lanes.output_splits, self.site.dispatch
        )

    def _receive_rows(self, there: Tensor | PendingAllToAll, lanes: DispatchPlan) -> Tensor:
        """Returns the rows of this rank's experts, sorted by expert, `[T, d/col]`."""
        rows = self._finish_all_to_all(there)
        if lanes.permutation is None:
            return rows
        rows = all_gather(rows, self.row, 0, counts=lanes.row_counts)
        return permute(rows, lanes.permutation)

    def _return_rows(self, rows: Tensor, lanes: DispatchPlan) -> Tensor | PendingAllToAll:
        """Starts sending results back to the ranks of their tokens."""
        if lanes.permutation is None:
            return rows
        rows = unpermute(rows, lanes.permutation)
        rows = reduce_scatter(rows, self.row, 0, counts=lanes.row_counts)
        if self.expert.size == 1:
            return rows
        return self._start_all_to_all(rows, lanes.output_splits, lanes.input_splits, "model")

    def _start_all_to_all(
        self, rows: Tensor, send: list[int], receive: list[int], dispatch: Dispatch
    ) -> Tensor | PendingAllToAll:
        """Starts the all-to-all; in a compiled graph and in the reference it also waits."""
        if self.duplicate_tokens:
            rows = rows.repeat(1, self.row.size * self.col.size)
        at_once = torch.compiler.is_compiling() or not self.site.step_context.overlapped_autograd
        # A lossy dispatch dtype must round in the same way in the reference, and only the
        # dispatcher rounds.
        if at_once and dispatch == "model":
            return all_to_all(rows, self.expert, send, receive)
        hidden = "moe_dispatch" in self.site.bucket_scheduler.overlap
        return start_all_to_all(rows, self.expert, send, receive, hidden=hidden, dispatch=dispatch)

    def _finish_all_to_all(self, rows: Tensor | PendingAllToAll) -> Tensor:
        """Waits for the rows, `[n, d/col]`."""
        if isinstance(rows, PendingAllToAll):
            found = rows.wait_for_rows()
        else:
            found = rows
        if self.duplicate_tokens and self.expert.size > 1:
            found = found[:, : found.shape[1] // (self.row.size * self.col.size)]
        return found

    # ---- experts ------------------------------------------------------------------------

    def _run_local_moe(self, x: Tensor, weights: Tensor, order: TokenPermutation) -> Tensor:
        """Runs the whole layer in one operation if nothing is split over ranks; y: `[t, d]`."""
        if torch.compiler.is_compiling():
            if self.gate is None:
                gate = None
            else:
                gate = self._gather_weight("gate", self.gate)
            up = self._gather_weight("up", self.up)
            down = self._gather_weight("down", self.down)
            return local_moe(x, weights, order, gate, up, down, self.activation)
        handles = [self.handles.get(name) for name in ("gate", "up", "down")]
        params = [self.gate, self.up, self.down]
        moment = self.site.step_context
        return sharded_local_moe(x, weights, order, handles, params, self.activation, moment)

    def _apply_experts(self, rows: Tensor, lanes: DispatchPlan) -> Tensor:
        """Returns the outputs of this rank's experts, partial sums over row, `[T, d/col]`."""
        if self.has_gate:
            into = [("gate", self.gate), ("up", self.up)]
        else:
            into = [("up", self.up)]
        parts = [self._grouped_product(rows, name, param, lanes.ends) for name, param in into]
        if self.col.size > 1:
            # One collective for gate and up instead of two.
            stacked = reduce_scatter(torch.stack(parts, 1), self.col, 2)  # (T, 2, f/(row·col))
            parts = list(stacked.unbind(1))
        h = self.function(parts[0])
        h = h * parts[1] if self.has_gate else h
        return self._grouped_product(all_gather(h, self.col, 1), "down", self.down, lanes.ends)

    def _grouped_product(self, x: Tensor, name: str, param: Any, ends: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.site.step_context.overlapped_autograd:
            return grouped_linear(x, self._gather_weight(name, param), ends)
        y: Tensor = apply_autograd(
            _GroupedGemm, x, param, self.handles[name], self.site.step_context, ends
        )
        return y

    # ---- load balancing -----------------------------------------------------------------

    def _record_stats(
        self, y: Tensor, logits: Tensor, routes: Any, table: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Returns y, whose backward records loads and adds the gradient of the auxiliary losses."""
        if not (self.training and torch.is_grad_enabled() and y.requires_grad):
            return y
        # Tokens of a whole sequence: each rank of context and row has t / b of them.
        seq = logits.shape[0] // table.shape[2] * self.seq_axis.size
        extra = logits.new_zeros(())
        if self.rule.has_aux_loss:
            counts = table[self.expert.index].sum(0, dtype=table.dtype)  # (b, E)
            counts = collectives.all_reduce(counts, self.context).wait()
            extra = self.rule.compute_aux_loss(logits, routes, counts, seq)
        with torch.no_grad():
            notes = self._compute_stats(logits, routes, table, kept, extra)
        if torch.compiler.is_compiling():
            # In a graph backward cannot change the state of the layer. Statistics are added in
            # forward, and the loss factor is the current one of the step context.
            self.routing_stats.add_(notes)
            slope = self.site.step_context.loss_grad_scale
            return y if slope is None else apply_autograd(_AuxLossScaler, y, extra, slope)
        out: Tensor = apply_autograd(_RecordStats, y, extra, notes, self)
        return out

    def _compute_stats(
        self, logits: Tensor, routes: Any, table: Tensor, kept: Tensor | None, extra: Tensor
    ) -> Tensor:
        """Returns the loads and ROUTING_STATS of this rank's tokens."""
        mine = table[self.expert.index, self.row.index].sum(0)  # (E,)
        p = routes.scores / routes.scores.sum(1, keepdim=True).clamp(min=1e-30)
        entropy = -torch.special.xlogy(p, p).sum()
        if kept is None:
            drops = torch.zeros_like(entropy)
        else:
            drops = (~kept).sum()
        tokens = torch.full_like(entropy, logits.shape[0])
        notes = torch.stack([x.double() for x in (drops, entropy, extra, tokens)])
        return torch.cat([mine.double(), notes])

    @property
    def cost_model(self) -> MoECost:
        """Cost with balanced routing, i.e. the same number of rows for every expert."""
        rule = self.rule
        sizes = (rule.num_experts, rule.top_k, self.width, 3 if self.has_gate else 2)
        has_capacity = rule.capacity_factor > 0.0
        options = (has_capacity, rule.has_aux_loss)
        return MoECost(self.site.name, self.site.layout_context, *sizes, *options)


def split_evenly(number: int, parts: int) -> list[int]:
    """Splits a number into parts that differ by at most 1."""
    return [number // parts + (i < number % parts) for i in range(parts)]


def _copy_to_host_async(table: Tensor) -> Callable[[], list[Any]]:
    """Starts copying a tensor to the host; calling the result waits and returns nested lists."""
    if table.device.type != "cuda":
        return table.tolist
    # Pinned memory makes the copy asynchronous. The event does not wait for later work.
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    host.copy_(table, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[Any]:
        event.synchronize()
        return host.tolist()

    return wait


class _GatheredWeight(torch.autograd.Function):
    """A weight gathered over depth; its gradient is added to its bucket, not to autograd."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, weight: ShardedParameter, moment: StepContext) -> Tensor:
        ctx.weight = weight
        ctx.moment = moment
        return weight.unsharded_data().view_as(weight.unsharded_data())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.moment.run_or_defer(partial(ctx.weight.accumulate_grad, grad))
        return None, None, None


class _GroupedGemm(torch.autograd.Function):
    """y = x_e W_eᵀ of gathered weights; their gradient is added to the bucket, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        param: Tensor,
        weight: ShardedParameter,
        moment: StepContext,
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight = weight
        ctx.moment = moment
        y: Tensor = grouped_mm(x, weight.unsharded_data(), ends, False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dx = grouped_mm(dy, ctx.weight.unsharded_data(), ends, True)
        else:
            dx = None
        if ctx.weight.trainable:
            # Detached: a deferred dW must not keep the autograd graph alive.
            ctx.moment.run_or_defer(
                partial(_accumulate_weight_grad, ctx.weight, dy, x.detach(), ends)
            )
        return dx, None, None, None, None


def _accumulate_weight_grad(weight: ShardedParameter, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """Computes dW of a grouped GEMM. Communicates: reduce-scatter over depth, by bucket, later."""
    weight.accumulate_grad(grouped_mm_weight_grad(dy, x, ends))


class _RecordStats(torch.autograd.Function):
    """Identity on y; backward records loads and scales the auxiliary losses like the main loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor, notes: Tensor, leaf: MoELayer) -> Tensor:
        ctx.notes = notes
        ctx.leaf = leaf
        ctx.dtype = extra.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        leaf = ctx.leaf
        # In backward, as forward may run twice (recomputation).
        leaf.routing_stats.add_(ctx.notes)
        if not ctx.needs_input_grad[1]:
            return dy, None, None, None
        slope = leaf.site.step_context.loss_grad_scale
        if slope is None:
            raise DataError(
                f"{leaf.site.name} has auxiliary losses (aux_loss_coeff="
                f"{leaf.rule.aux_loss_coeff}, z_loss_coeff={leaf.rule.z_loss_coeff}), but the "
                "model did not compute the loss, so its scale is unknown. Pass targets to the "
                "model, or set both coefficients to 0."
            )
        return dy, slope.to(ctx.dtype), None, None


class _AuxLossScaler(torch.autograd.Function):
    """Identity on y; backward scales the auxiliary losses by a factor known in forward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope.to(extra.dtype))
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return dy, slope, None
