"""Experts on the grid: tokens travel to their experts over `expert`, features stay on col.

The residual stream is `[b, s/row, d/col]`, weights `[E/expert, f/row, d/col]`. Each choice of a
token (it makes k of them) is one row of d/col features, and lies on one rank of every group:

    logits          x · Wᵀ of my features, summed over col, in fp32: all ranks of col route alike
    counts          choices of each sequence and expert, from all ranks of (expert, row)
    dispatch        rows by expert -all-to-all over expert-> -gather over row->  [T, d/col]
    up, gate        grouped products, -scatter features over col->               [T, f/(row·col)]
    down            -gather features over col-> grouped product (partial over row)
    combine         -scatter over row-> -all-to-all over expert-> weighted sum

So the all-to-all carries no token twice: its bytes fall with row·col (DeepSpeed-TED, Singh et al.
2023, drops such duplicates; here there are none). Rows of a group are padded to its largest number.
With expert = 1 all sizes are known beforehand and the host waits for nothing; else it waits once,
for the counts, which travel while rows are laid out for their journey. Tokens travel there while
the hidden layer of the shared expert is computed, and back while its last product is; backward the
same in reverse (`journey`).

What balances experts is not part of the loss that the head gives: its gradient joins in backward,
with the factor that the loss has there. Loads are noted in backward, too: once, however often
forward runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier import counter_rng
from ranvier.buckets.bucket import Weight
from ranvier.comm import collectives
from ranvier.comm.autograd import gather, share, sum_scatter, swap, total
from ranvier.config.plan import Dispatch
from ranvier.cost.layers import Mixture
from ranvier.errors import DataError
from ranvier.nn.layer import Leaf, Moment, Site, applied, place
from ranvier.nn.moe.grouped_gemm import grouped, product, product_weight
from ranvier.nn.moe.local import delivered, mixture
from ranvier.nn.moe.permutation import Order, arrange, permute, unpermute
from ranvier.nn.moe.token_dispatcher import Journey, depart
from ranvier.sharding import Dim

NOTES = ("drops", "entropy", "extra", "tokens")
"""What is noted of a layer besides the load of each expert."""


@dataclass(frozen=True)
class Lanes:
    """How rows travel between the ranks of expert and row."""

    send: list[int]
    """Rows to each rank of expert; empty: nothing is sent."""
    receive: list[int]
    rows: int
    """Of each rank of row, padded."""
    order: Order | None
    """Of the gathered rows by my experts; None: as they lie."""
    ends: Tensor
    """Where the rows of each of my experts end."""


class Experts(Leaf):
    """y = Σ_k w_k · expert_k(x) + shared(x). x, y: `[b, s/row, d/col]`.

    Communicates: all-reduce of logits over col, all-gather of counts over (expert, row), then
    all-to-all over expert, all-gather over row, reduce-scatter and all-gather over col,
    reduce-scatter over row, all-to-all over expert; backward: the duals in reverse.
    """

    gate: torch.nn.Parameter | None
    up: torch.nn.Parameter
    down: torch.nn.Parameter
    bias: Tensor | None

    def __init__(self, site: Site, serial: Any, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        self.rule, self.function, self.gated = serial.rule, serial.function, serial.gated
        expert, mlp, embed = dims
        self.router, beside = torch.nn.Module(), site.at(f"{site.name}.router")
        self.handles["router"] = place(
            self.router, "weight", serial.router.weight, ("choice", embed), beside, std=0.02
        )
        self.place("gate", serial.gate, (expert, mlp, embed), std=0.02)
        self.place("up", serial.up, (expert, mlp, embed), std=0.02)
        self.place("down", serial.down, (expert, embed, mlp), std=0.02)
        self.width = serial.up.shape[1]
        self.shared = serial.shared
        self.expert, self.row, self.col = (site.axis(name) for name in ("expert", "row", "col"))
        self.peers = site.axis("expert", "row")
        self.activation = serial.activation
        self.alone = self.peers.size == self.col.size == 1 and site.fast
        """Whether nothing is split over ranks: then all is one operation."""
        self.mine = self.rule.experts // self.expert.size
        """Experts on this rank."""
        self.duplicated = False
        """Send each token from every rank of row and col, as ranks that hold the same tokens
        would: for comparison."""
        self.load = 1.0
        """Rows of my experts, in means, where counts have no values (in a dry run)."""
        bias = None if serial.bias is None else torch.zeros(self.rule.experts)
        if bias is not None and not serial.bias.is_meta:
            bias = serial.bias.detach().clone()
        self.register_buffer("bias", None if bias is None else bias.to(site.queue.dtype))
        self.tally = torch.zeros(self.rule.experts + len(NOTES), dtype=torch.float64)
        """Loads and NOTES of my tokens since the last step."""
        self.stream = torch.tensor(counter_rng.key(site.moment.seed, "jitter", site.name))

    @property
    def travels(self) -> bool:
        """Whether tokens go to other ranks, and the host has to know how many."""
        return self.expert.size > 1

    def settle(self, device: torch.device | str) -> None:
        """Have what is no weight where the weights are."""
        self.stream, self.tally = self.stream.to(device), self.tally.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Route, send, compute, return."""
        with self.here():
            logits, routes = self._routed(x)
            counts = self.rule.counts(routes, len(x))
            pending = collectives.all_gather(counts.int().unsqueeze(0), self.peers)
            table = pending.wait().unflatten(0, (self.expert.size, -1))  # (expert, row, b, E)
            host = self._fetched(table)
            kept = self._kept(routes, table, x)
            order = arrange(routes.experts, self.rule.experts, kept)
        if self.alone:
            beside = None if self.shared is None else self.shared(x)
            with self.here():
                y = self._mixed(x.flatten(0, 1), routes.weights, order).view(x.shape)
        else:
            y, beside = self._travelled(x, routes, order, table, host)
        with self.here():
            y = self._noted(y, logits, routes, table, kept)
        return y if beside is None else y + beside

    def _travelled(
        self,
        x: Tensor,
        routes: Any,
        order: Order,
        table: Tensor,
        host: Callable[[], Any] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the experts of other ranks give, and the shared one meanwhile: like x each."""
        with self.here():
            rows = permute(x.flatten(0, 1), order)  # while the counts are on their way to the host
            lanes = self._lanes(order, table, None if host is None else self._once(host), x)
            there = self._sent(rows, lanes)
            del rows  # they are gone
        hidden = None if self.shared is None else self.shared.hidden(x)
        with self.here():
            rows = self._received(there, lanes)
            del there
            back = self._returned(self._multiplied(rows, lanes), lanes)
            del rows
        beside = None if hidden is None else self.shared.leave(hidden)
        with self.here():
            y = self._arrived(back, order.choices.numel())
            weights = share(routes.weights, self.col)  # they meet my features only
            return unpermute(y, order, weights).view(x.shape), beside

    # ---- routes -------------------------------------------------------------------------

    def _routed(self, x: Tensor) -> tuple[Tensor, Any]:
        """Logits `[t, E]` and where tokens go, the same on all ranks of col."""
        router: Any = self.router
        weight = self._matrix("router", router.weight)
        logits = total(self.rule.logits(x.flatten(0, 1), weight), self.col)  # (t, E)
        if self.training and self.rule.jitter > 0.0:
            logits = logits * (1.0 + self.rule.jitter * self._noise(x).to(logits.dtype))
        return logits, self.rule.route(logits, self.bias)

    def _matrix(self, name: str, param: Tensor) -> Tensor:
        """A weight gathered over depth, in autograd."""
        handle = self.handles[name]
        if torch.compiler.is_compiling() and not handle.split:
            return param
        if not self.site.fast or torch.compiler.is_compiling():
            return handle.gathered()
        whole: Tensor = applied(_Whole, param, handle, self.site.moment)
        return whole

    def _noise(self, x: Tensor) -> Tensor:
        """Numbers in [-1, 1) of (seed, layer, sample, token, expert) only: `[t, E]`, float64.

        The number of a sample counts all samples of the run and so implies the step.
        """
        samples = self.site.moment.samples
        if samples is None:
            raise DataError(
                f"{self.site.name} shakes its logits (router_jitter={self.rule.jitter}) but does "
                "not know which samples it works on. Set `moment.samples` before each forward."
            )
        tokens = torch.arange(x.shape[1], device=x.device) + self.row.index * x.shape[1]
        experts = torch.arange(self.rule.experts, device=x.device)
        bits = self.stream.to(x.device)
        for counter in (samples.to(x.device).view(-1, 1, 1), tokens.view(-1, 1), experts):
            bits = counter_rng.scramble(bits ^ counter)
        return (counter_rng.uniform(bits).double() / 2**31 - 1.0).flatten(0, 1)

    def _kept(self, routes: Any, table: Tensor, x: Tensor) -> Tensor | None:
        """Which choices find a slot, `[t, k]`; None: all."""
        if self.rule.capacity == 0.0:
            return None
        before = table[self.expert.index, : self.row.index].sum(0)  # (b, E)
        kept: Tensor = self.rule.kept(routes, len(x), x.shape[1] * self.row.size, before)
        return kept

    def _taken(self, table: Tensor, seq: int) -> Tensor:
        """Choices of each rank that found a slot: `[expert, row, E]`."""
        if self.rule.capacity > 0.0:
            through = table.cumsum(1).clamp(max=self.rule.slots(seq))
            zero = torch.zeros_like(through[:, :1])
            table = through.diff(dim=1, prepend=zero)
        return table.sum(2)

    # ---- dispatch and combine -----------------------------------------------------------

    def _fetched(self, table: Tensor) -> Callable[[], Any] | None:
        """The table for the host, under way; None: it needs none, or there are no values."""
        return None if self.expert.size == 1 or table.is_meta else _fetched(table)

    def _once(self, host: Callable[[], Any]) -> Any:
        """What the host knows; a block that runs again keeps it with its collectives."""
        results = self.site.grid.trace.results
        return host() if results is None else results.once(host)

    def _traffic(self, known: Any, choices: int, seq: int) -> tuple[list[int], list[int], int]:
        """Rows to each rank of expert and from each, and those of the fullest rank of row.

        known: the table; None: it has no values, and the rows of my experts are `load` means.
        """
        ranks, mine = self.expert.size, self.expert.index
        if known is None:
            receive = evenly(math.ceil(choices * self.load), ranks)
            send = evenly(choices - receive[mine], ranks - 1)
            return [*send[:mine], receive[mine], *send[mine:]], receive, sum(receive)
        all_ = self._taken(torch.tensor(known), seq).unflatten(2, (-1, self.mine)).sum(3)
        send, receive = all_[mine, self.row.index].tolist(), all_[:, self.row.index, mine].tolist()
        return send, receive, max(int(all_[:, :, mine].sum(0).max()), 1)

    def _lanes(self, order: Order, table: Tensor, known: Any, x: Tensor) -> Lanes:
        """Who sends how much to whom, and how it lies there."""
        rows, mine = order.choices.numel(), self.mine
        if self.peers.size == 1:
            return Lanes([], [], rows, None, order.ends)
        seq, send, receive = x.shape[1] * self.row.size, list[int](), list[int]()
        if self.expert.size > 1:
            send, receive, rows = self._traffic(known, rows, seq)
        first = self.expert.index * mine
        taken = self._taken(table, seq)[:, :, first : first + mine]  # (expert, row, E/expert)
        here = taken.transpose(0, 1).flatten(1)  # (row, expert · E/expert)
        filled = torch.cat([here, rows - here.sum(1, keepdim=True)], 1)
        ids = torch.arange(mine, device=x.device).repeat(self.expert.size)
        ids = F.pad(ids, (0, 1), value=mine).repeat(self.row.size)
        each = ids.repeat_interleave(filled.flatten(), output_size=rows * self.row.size)
        kept = (each < mine).unsqueeze(1)
        order = arrange(each.clamp(max=mine - 1).unsqueeze(1), mine, kept)
        return Lanes(send, receive, rows, order, order.ends)

    def _sent(self, rows: Tensor, lanes: Lanes) -> Tensor | Journey:
        """Rows on their way to the ranks of their experts."""
        if self.expert.size == 1:
            return rows
        rows = rows[: sum(lanes.send)]
        return self._departed(rows, lanes.send, lanes.receive, self.site.dispatch)

    def _received(self, there: Tensor | Journey, lanes: Lanes) -> Tensor:
        """Rows of my experts, expert by expert: `[T, d/col]`."""
        rows = self._arrived(there, lanes.rows)
        return rows if lanes.order is None else permute(gather(rows, self.row, 0), lanes.order)

    def _returned(self, rows: Tensor, lanes: Lanes) -> Tensor | Journey:
        """Results on their way back to the ranks of their tokens."""
        if lanes.order is None:
            return rows
        rows = sum_scatter(unpermute(rows, lanes.order), self.row, 0)
        if self.expert.size == 1:
            return rows
        return self._departed(rows[: sum(lanes.receive)], lanes.receive, lanes.send, "same")

    def _departed(
        self, rows: Tensor, send: list[int], receive: list[int], dispatch: Dispatch
    ) -> Tensor | Journey:
        """Rows under way; a graph, and the reference, have them at once."""
        if self.duplicated:
            rows = rows.repeat(1, self.row.size * self.col.size)
        at_once = torch.compiler.is_compiling() or not self.site.fast
        if at_once and dispatch == "same":
            return swap(rows, self.expert, send, receive)
        hidden = "tokens" in self.site.queue.overlap
        return depart(rows, self.expert, send, receive, hidden=hidden, dispatch=dispatch)

    def _arrived(self, rows: Tensor | Journey, count: int) -> Tensor:
        """So many rows, the last of them empty: `[count, d/col]`."""
        found = rows.arrive() if isinstance(rows, Journey) else rows
        if self.duplicated and self.expert.size > 1:
            found = found[:, : found.shape[1] // (self.row.size * self.col.size)]
        return found if len(found) == count else F.pad(found, (0, 0, 0, count - len(found)))

    # ---- products -----------------------------------------------------------------------

    def _mixed(self, x: Tensor, weights: Tensor, order: Order) -> Tensor:
        """All of it in one operation, where no rank has a part of it: `[t, d]`."""
        if torch.compiler.is_compiling():
            gate = None if self.gate is None else self._matrix("gate", self.gate)
            up, down = self._matrix("up", self.up), self._matrix("down", self.down)
            return mixture(x, weights, order, gate, up, down, self.activation)
        handles = [self.handles.get(name) for name in ("gate", "up", "down")]
        params, moment = [self.gate, self.up, self.down], self.site.moment
        return delivered(x, weights, order, handles, params, self.activation, moment)

    def _multiplied(self, rows: Tensor, lanes: Lanes) -> Tensor:
        """What my experts make of their rows, a partial sum over row: `[T, d/col]`."""
        into = [("gate", self.gate), ("up", self.up)] if self.gated else [("up", self.up)]
        parts = [self._product(rows, name, param, lanes.ends) for name, param in into]
        if self.col.size > 1:
            stacked = sum_scatter(torch.stack(parts, 1), self.col, 2)  # (T, 2, f/(row·col))
            parts = list(stacked.unbind(1))
        h = self.function(parts[0])
        h = h * parts[1] if self.gated else h
        return self._product(gather(h, self.col, 1), "down", self.down, lanes.ends)

    def _product(self, x: Tensor, name: str, param: Any, ends: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.site.fast:
            return grouped(x, self._matrix(name, param), ends)
        y: Tensor = applied(_Grouped, x, param, self.handles[name], self.site.moment, ends)
        return y

    # ---- balance ------------------------------------------------------------------------

    def _noted(
        self, y: Tensor, logits: Tensor, routes: Any, table: Tensor, kept: Tensor | None
    ) -> Tensor:
        """y, behind which backward notes loads and adds the gradient of the extra losses."""
        if not (self.training and torch.is_grad_enabled() and y.requires_grad):
            return y
        seq = logits.shape[0] // table.shape[2] * self.row.size
        extra = logits.new_zeros(())
        if self.rule.losses:
            counts = table[self.expert.index].sum(0)  # (b, E)
            extra = self.rule.extra(logits, routes, counts, seq)
        with torch.no_grad():
            notes = self._notes(logits, routes, table, kept, extra)
        if torch.compiler.is_compiling():
            self.tally.add_(notes)
            slope = self.site.moment.slope
            return y if slope is None else applied(_Beside, y, extra, slope)
        out: Tensor = applied(_Noted, y, extra, notes, self)
        return out

    def _notes(
        self, logits: Tensor, routes: Any, table: Tensor, kept: Tensor | None, extra: Tensor
    ) -> Tensor:
        """Loads of my tokens and NOTES of them."""
        mine = table[self.expert.index, self.row.index].sum(0)  # (E,)
        p = routes.scores / routes.scores.sum(1, keepdim=True).clamp(min=1e-30)
        entropy = -torch.special.xlogy(p, p).sum()
        drops = torch.zeros_like(entropy) if kept is None else (~kept).sum()
        tokens = torch.full_like(entropy, logits.shape[0])
        notes = torch.stack([x.double() for x in (drops, entropy, extra, tokens)])
        return torch.cat([mine.double(), notes])

    @property
    def layer(self) -> Mixture:
        """Balanced: each expert gets as many rows as the others."""
        rule = self.rule
        sizes = (rule.experts, rule.top, self.width, 3 if self.gated else 2)
        return Mixture(self.site.name, self.site.ground, *sizes)


def evenly(number: int, parts: int) -> list[int]:
    """A number in so many parts that differ by 1 at most."""
    return [number // parts + (i < number % parts) for i in range(parts)]


def _fetched(table: Tensor) -> Callable[[], list[Any]]:
    """The table for the host, under way; called when it is needed."""
    if table.device.type != "cuda":
        return table.tolist
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    host.copy_(table, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[Any]:
        event.synchronize()
        return host.tolist()

    return wait


class _Whole(torch.autograd.Function):
    """A weight gathered over depth with its bucket; its gradient is delivered, not returned."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, weight: Weight, moment: Moment) -> Tensor:
        ctx.weight, ctx.moment = weight, moment
        return weight.whole().view_as(weight.whole())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.moment.do(partial(ctx.weight.deliver, grad))
        return None, None, None


class _Grouped(torch.autograd.Function):
    """y = x_e W_eᵀ of gathered weights; their gradient is delivered, not returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, param: Tensor, weight: Weight, moment: Moment, ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.moment = weight, moment
        y: Tensor = product(x, weight.whole(), ends, False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        dx = product(dy, ctx.weight.whole(), ends, True) if ctx.needs_input_grad[0] else None
        if ctx.weight.trainable:
            # what waits shall not hold the graph
            ctx.moment.do(partial(_deliver, ctx.weight, dy, x.detach(), ends))
        return dx, None, None, None, None


def _deliver(weight: Weight, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """The gradient of a weight. Communicates: reduce-scatter over depth, by bucket, later."""
    weight.deliver(product_weight(dy, x, ends))


class _Noted(torch.autograd.Function):
    """y; backward notes loads and gives the extra losses the factor that the loss has."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor, notes: Tensor, leaf: Experts) -> Tensor:
        ctx.notes, ctx.leaf, ctx.dtype = notes, leaf, extra.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        leaf = ctx.leaf
        leaf.tally.add_(ctx.notes)
        if not ctx.needs_input_grad[1]:
            return dy, None, None, None
        slope = leaf.site.moment.slope
        if slope is None:
            raise DataError(
                f"{leaf.site.name} adds balance={leaf.rule.balance} and router_z={leaf.rule.z} to "
                "a loss that the model did not compute, so it does not know its factor. Give the "
                "model targets, or set both to 0."
            )
        return dy, slope.to(ctx.dtype), None, None


class _Beside(torch.autograd.Function):
    """y; backward gives the extra losses a factor that is known."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope.to(extra.dtype))
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return dy, slope, None
