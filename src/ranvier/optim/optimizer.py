"""Optimizer: AdamW on the flat range of each bucket that lies on this data rank (ZeRO-1).

Gradients come summed over all ranks that hold the same part and scattered over data; each rank
updates its range in fp32 at least (master weights where the working weights are 16-bit) and the new
values are gathered over data. The gradient norm counts each part once and costs one all-reduce of
one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, Weight
from ranvier.buckets.scheduler import Deferred
from ranvier.buckets.sparsity import Sparse, packed
from ranvier.buckets.spec import Group
from ranvier.comm import collectives
from ranvier.comm.accumulator import Pieces
from ranvier.comm.streams import await_mark
from ranvier.grid import Grid
from ranvier.optim import fused_adamw, pruning
from ranvier.optim.adamw import Scalars
from ranvier.optim.cpu_adamw import Known
from ranvier.optim.grad_norm import Early
from ranvier.optim.grad_scaler import Scale
from ranvier.optim.low_precision_states import Key, Kind, Moments, dtype, pack
from ranvier.optim.pruning import Choice
from ranvier.optim.state_store import Held, Rule, Rules, Store
from ranvier.optim.state_tiles import Home, Tile
from ranvier.sharding import State

MASK = "mask"
"""What is saved of pruned weights besides states: which elements stay."""


def gradient_norm(
    grads: Sequence[tuple[Bucket, Pieces]],
    grid: Grid,
    early: Early,
    none: Tensor,
    votes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Euclidean norm of the gradient of the whole model, and for what some rank has voted.

    Ranges over data are disjoint; of the ranks that hold the same part only the first counts it.
    none: an empty tensor of the type the others sum in, for a rank without any.
    Communicates: all-reduce of one number, and one a vote, over all axes.
    """
    mine = [part for bucket, pieces in grads for part in bucket.first(pieces)]
    square = early.total([bucket for bucket, _ in grads], mine or [none])
    with grid.trace.at("norm"):
        numbers = [square[None], *([] if votes is None else [votes.to(square.dtype)])]
        total = collectives.all_reduce(torch.cat(numbers), grid.axis(*grid.degrees)).wait()
    return total[0].sqrt(), total[1:] > 0.0


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `limit`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Optimizer:
    """AdamW with sharded state for the weights of a queue.

    An update with numbers that are not finite is not made: it is masked on the device, without
    waiting for it.
    """

    def __init__(
        self,
        queue: Deferred,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
        clip: float = 1.0,
        factors: Mapping[Group, float] | None = None,
        scale: Scale | None = None,
        moments: Kind = "master",
        home: Home | None = None,
    ) -> None:
        """factors: of the learning rate of each group of weights. scale: what the loss bears.

        moments: their type; narrow ones are rounded at random. home: where states rest.
        """
        self.queue, self.grid = queue, queue.grid
        self.lr, self.betas, self.eps, self.clip = lr, betas, eps, clip
        self.factors, self.scale = dict(factors or {}), scale
        self.decays: dict[Group, float] = {"matrix": decay}
        """Weight decay of each group of weights; of others none."""
        self.buckets = [bucket for bucket in queue.buckets if bucket.trainable]
        self._early = queue.complete = Early()
        device = queue.device
        self.moments, self.home = moments, home or Home()
        self.store = self._stored()
        """Master weights and moments."""
        self._given: dict[Bucket, Held] = {}
        """Numbers of 8-bit moments or of pruned buckets that were handed out, to be filled."""
        self._keys: dict[Weight, Key] = {}
        self.reread()
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        """Updates made; masked ones do not count."""
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether the last gradient norm was a number."""
        self.changing: Callable[[], None] | None = None
        """Called before weights and moments change: who still reads them waits."""
        self.voted = torch.zeros(0, dtype=torch.bool, device=device)
        """For what some rank has voted in the last step."""

    def _stored(self) -> Store:
        kinds = {bucket: _kinds(bucket, self.moments, self.home) for bucket in self.buckets}
        return Store(kinds, self.home, self.queue.device)

    @property
    def master(self) -> dict[Bucket, Tensor]:
        """The weights that are updated: my range itself, or a wider copy of 16-bit weights."""
        held = self.store.held
        return {b: x["master"] if "master" in x else b.mine(b.data) for b, x in held.items()}

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor | None = None,
        *,
        votes: Tensor | None = None,
        vetoes: int = 0,
    ) -> Tensor:
        """Update the weights with the gradients of this step; the norm before clipping.

        votes: bools on the device that travel with the norm, so that all ranks know of them and
        decide alike. vetoes: any rank's vote for one of the first so many forbids the update.
        Communicates: the end of the gradient reductions, the norm, all-gather of weights over data.
        """
        if self._loads != self.queue.loads:
            self.reread()
        grads = self.queue.finish()
        norm, factor = self._norm(grads, votes)
        self.finite = norm.isfinite()
        good = self.finite & ~self.voted[:vetoes].any() if vetoes else self.finite
        lr = self.lr if lr is None else lr
        now = Scalars.of(self.updates + 1.0, good, factor, self.betas, lr)
        if self.changing is not None:
            self.changing()
        if self.queue.homes is not None:
            await_mark(self.queue.homes.stowed(), self.queue.device)
        self._update(grads, now)
        self._given = {}
        self.updates += good
        if self.queue.stepped is not None:
            self.queue.stepped(good)
        if self.scale is not None:
            self.scale.update(self.finite)
        self._publish()
        self.queue.begin("")
        return norm

    @torch.no_grad()
    def reread(self) -> None:
        """Take note that weights were changed from outside: master weights follow them."""
        self._loads = self.queue.loads
        self.store.forget()
        for bucket, held in self.store.held.items():
            if bucket.kept is not None:  # what is pruned stays so
                bucket.kept.clear(bucket.rest)
            if "master" in held:
                self._copy(held["master"], bucket.mine(bucket.rest))

    def _copy(self, to: Tensor, x: Tensor) -> None:
        """Copy numbers to another type and place, tile by tile."""
        size = self.store.home.tile
        for into, part in zip(to.split(size), x.split(size), strict=True):
            into.copy_(part)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Norm of the gradients so far. Communicates: the end of their reductions, one number."""
        return self._norm(self.queue.finish(), None)[0]

    def _norm(
        self, grads: Sequence[tuple[Bucket, Pieces]], votes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Norm of the gradient without its scale, and what gradients are to be multiplied by."""
        none = torch.zeros(0, dtype=self.queue.dtype, device=self.queue.device)
        norm, self.voted = gradient_norm(grads, self.grid, self._early, none, votes)
        if self.scale is not None:
            norm = norm / self.scale.value
        factor = clip_factor(norm, self.clip) if self.clip > 0.0 else None
        if self.scale is not None:
            factor = (1.0 if factor is None else factor) / self.scale.value
        return norm, factor

    def _update(self, grads: Sequence[tuple[Bucket, Pieces]], now: Scalars) -> None:
        """Update all buckets: first those whose states are here, then those that come."""
        rule, known = partial(self._apply, now), Known.of(now) if self._hosted else None
        together: dict[Group, list[fused_adamw.CpuUpdate]] = {}
        collect = partial(self._collect, together, rule)
        for bucket, pieces in grads:
            for tile in () if self.store.streamed(bucket) else self.store.tiles[bucket]:
                self.store.apply(tile, pieces, collect)
        self._apply_together(together, now)
        host = partial(self._on_host, known)
        streamed = [one for one in grads if self.store.streamed(one[0])]
        self.store.update(streamed, Rules(rule, host))

    def _on_host(self, known: Known | None) -> Rule:
        """How the host updates, once it knows the norm."""
        assert known is not None
        return partial(self._apply, known.wait())

    def _collect(
        self,
        together: dict[Group, list[fused_adamw.CpuUpdate]],
        rule: Rule,
        tile: Tile,
        held: Held,
        grad: Tensor,
        out: Tensor | None,
    ) -> None:
        """Note an update that a CPU makes together with others; make any other one."""
        bucket = tile.bucket
        if out is None and bucket.kept is None and "master" not in held:
            master = bucket.mine(bucket.data)[tile.range]
            moments = Moments(held["mean"], held["square"], held.get("scales"))
            if fused_adamw.available_on_cpu(master, moments) and grad.dtype == master.dtype:
                update = fused_adamw.CpuUpdate(master, grad, moments)
                together.setdefault(bucket.weights[0].group, []).append(update)
                return
        rule(tile, held, grad, out)

    def _apply_together(
        self, together: Mapping[Group, Sequence[fused_adamw.CpuUpdate]], now: Scalars
    ) -> None:
        """Make the updates that were noted."""
        if not together or not now.good:
            return
        for group, updates in together.items():
            if now.factor is not None and now.factor != 1.0:
                # never in place: a gradient that came once is not ours
                grads = torch._foreach_mul([update.grad for update in updates], now.factor)
                updates = [replace(one, grad=x) for one, x in zip(updates, grads, strict=True)]
            fused_adamw.cpu_adamw(
                updates,
                now=now,
                share=self.factors.get(group, 1.0),
                eps=self.eps,
                decay=self.decays.get(group, 0.0),
            )

    def _apply(
        self, now: Scalars, tile: Tile, held: Held, grad: Tensor, out: Tensor | None
    ) -> None:
        """Update the states of a tile, and its working weights."""
        bucket, group = tile.bucket, tile.bucket.weights[0].group
        working = out
        if out is None and bucket.kept is None:
            working = bucket.mine(bucket.data)[tile.range]
        master = held.get("master", working)
        assert master is not None, bucket.name
        moments = Moments(held["mean"], held["square"], held.get("scales"))
        rule: Callable[..., None] = partial(fused_adamw.adamw, key=self._key(tile))
        if out is None and working is not master:
            rule = partial(rule, out=working)
        rule(
            master,
            grad,
            moments,
            now=now,
            share=self.factors.get(group, 1.0),
            eps=self.eps,
            decay=self.decays.get(group, 0.0),
        )
        if out is not None:  # also if no update was made: what is there is of another tile
            out.copy_(master)
        elif bucket.kept is not None:
            bucket.renew(tile.start, master)

    @property
    def _hosted(self) -> bool:
        return self.store.home.update == "cpu" and self.store.home.states != "device"

    def _key(self, tile: Tile) -> Key | None:
        """What the bits come from with which moments are rounded."""
        if tile.weight is None:
            return None
        bucket, weight = tile.bucket, tile.weight
        if weight not in self._keys:
            self._keys[weight] = Key.of(weight.name, bucket.place(weight))
        return self._keys[weight].at(tile.start - bucket.span(weight)[0])

    def _publish(self) -> None:
        """Give all data ranks the working weights of my range.

        Communicates: all-gather over data, by bucket.
        """
        if self.queue.data_axis.size == 1:
            return
        pending = []
        for bucket in self.buckets:
            with self.grid.trace.at(bucket.name):
                bucket.settle()
                part = bucket.mine(bucket.rest).to(self.queue.device)
                pending.append((bucket, collectives.all_gather(part, self.queue.data_axis)))
        for bucket, values in pending:
            bucket.write(0, values.wait())

    # ---- to and from checkpoints ----------------------------------------------------------

    def state(self) -> State:
        """My part of master weights and moments, by parameter name.

        8-bit moments are the numbers they stand for. Pruned weights have their zeros and a mask.
        """
        return self._state(self.buckets)

    def written(self) -> tuple[State, dict[str, Sparse]]:
        """`state` without copies of pruned weights: of these what stays, and where."""
        state, sparse = self._state([b for b in self.buckets if b.kept is None]), {}
        for bucket in self.buckets:
            if bucket.kept is None:
                continue
            mask = bucket.kept.mask(*bucket.bounds).cpu()
            none = torch.zeros(0, dtype=torch.uint8)
            numbers = {**self._numbers(bucket), MASK: none}
            for weight in bucket.weights:
                here = mask[slice(*bucket.range(weight))]
                bits, span = packed(here), slice(*bucket.span(weight))
                for kind, flat in numbers.items():
                    values = none if kind == MASK else flat[span]
                    name, size = f"{weight.name}.{kind}", len(here)
                    dense = torch.empty(size, dtype=values.dtype, device="meta")
                    state[name] = dense, bucket.place(weight)
                    sparse[name] = Sparse(values, bits, size)
        return state, sparse

    def parts(self) -> Iterator[State]:
        """What is to be filled with an earlier state, a part at a time: those that are copies.

        A part is taken over when the next one is asked for, the last by `restored`.
        """
        copied = [bucket for bucket in self.buckets if self._copied(bucket)]
        for some in ([b for b in self.buckets if b not in copied], *([b] for b in copied)):
            self._take()
            state = self._state(some)
            yield {name: x for name, x in state.items() if not name.endswith(f".{MASK}")}

    def _copied(self, bucket: Bucket) -> bool:
        """Whether states are handed out as copies."""
        return bucket.kept is not None or self.store.kinds[bucket]["mean"] == torch.uint8

    def _state(self, buckets: Sequence[Bucket]) -> State:
        self.queue.settle()
        self.store.settle()
        found: State = {}
        for bucket in buckets:
            for kind, flat in self._saved(bucket).items():
                for weight in bucket.weights:
                    part = flat[slice(*bucket.range(weight))]
                    found[f"{weight.name}.{kind}"] = part, bucket.place(weight)
        return found

    def held(self, weight: Weight) -> Held:
        """My part of the states of a weight as they lie: 8-bit moments as codes, what stays."""
        bucket = weight.bucket
        held = {"master": self.master[bucket], **self.store.held[bucket]}
        return {kind: flat[slice(*bucket.span(weight))] for kind, flat in held.items()}

    def _saved(self, bucket: Bucket) -> Held:
        """The states of a bucket as they are saved; copies are on the host."""
        numbers = self._numbers(bucket)
        if not self._copied(bucket):
            return numbers
        if bucket.kept is None:
            self._given[bucket] = {kind: numbers[kind] for kind in ("mean", "square")}
            return numbers
        given = self._given[bucket] = {k: bucket.spread(x).cpu() for k, x in numbers.items()}
        return {**given, MASK: bucket.kept.mask(*bucket.bounds).to(torch.uint8).cpu()}

    def _numbers(self, bucket: Bucket) -> Held:
        """The states of my range `[held]` as numbers."""
        held = {"master": self.master[bucket], **self.store.held[bucket]}
        if held["mean"].dtype != torch.uint8:
            return held
        wide = {kind: torch.zeros(bucket.held) for kind in ("mean", "square")}
        for tile in self.store.tiles[bucket]:
            moments = self._moments(tile).values(torch.float32)
            wide["mean"][tile.range], wide["square"][tile.range] = moments
        return {**held, **wide}

    def _moments(self, tile: Tile) -> Moments:
        held = self.store.resting(tile)
        return Moments(held["mean"], held["square"], held.get("scales"))

    def _keep(self, bucket: Bucket, numbers: Held) -> None:
        """Take numbers for the states of my range `[held]`."""
        held = {"master": self.master[bucket], **self.store.held[bucket]}
        for kind, values in numbers.items():
            if held[kind].dtype != torch.uint8:
                held[kind].copy_(values)
                continue
            for tile in self.store.tiles[bucket]:
                moments = self._moments(tile)
                assert moments.scales is not None, tile
                codes, scales = pack(values[tile.range], "mean" if kind == "mean" else "square")
                held[kind][tile.range].copy_(codes)
                moments.scales[0 if kind == "mean" else 1].copy_(scales)

    @torch.no_grad()
    def _take(self) -> None:
        """Take the numbers that were handed out and filled."""
        for bucket, given in self._given.items():
            self._keep(bucket, {kind: bucket.compress(x) for kind, x in given.items()})
        self._given = {}

    def load(self, whole: Mapping[str, Tensor], *, steps: int) -> None:
        """Take my part of a whole state, after `steps` updates. Communicates: as `restored`."""
        for state in self.parts():
            for name, (part, place) in state.items():
                part.copy_(place.take(whole[name]))
        self.updates.fill_(steps)
        self.restored()

    @torch.no_grad()
    def restored(self) -> None:
        """Take note that `updates` and the tensors of `state` were filled with earlier ones.

        Working weights follow the master weights. Communicates: all-gather over data.
        """
        self._loads = self.queue.loads
        self.store.forget()
        self._take()
        for bucket in self.buckets:
            size = self.home.tile
            for number, part in enumerate(self.master[bucket].split(size)):
                bucket.renew(number * size, part)
        self.queue.settle()
        self._publish()

    # ---- pruning --------------------------------------------------------------------------

    @torch.no_grad()
    def prune(self, choice: Choice, *, keep: bool = True) -> None:
        """Have only what is chosen of the weights stay; states follow, or (not keep) begin anew.

        Communicates: as `prune.masks_of`; bits over depth; states that are kept over data.
        """
        if self.changing is not None:
            self.changing()
        self.queue.settle()
        self.store.settle()
        self._given, self._keys = {}, {}
        if not keep:
            del self.store
        for bucket, mask in pruning.masks_of(self.queue, choice):
            if keep and (mask is not None or bucket.kept is not None):
                self._follow(bucket, mask)
            elif not keep:
                bucket.prune(mask)
        if not keep:
            self.store = self._stored()
            self.reread()
        self.queue.begin("")

    def _follow(self, bucket: Bucket, mask: Tensor | None) -> None:
        """Prune a bucket and its states."""
        wholes, device = Held(), self.queue.device
        for kind, part in self._numbers(bucket).items():
            with self.grid.trace.at(bucket.name):
                whole = collectives.all_gather(part.to(device), self.queue.data_axis).wait()
            wholes[kind] = whole
            if bucket.kept is not None:
                wholes[kind] = whole.new_zeros(bucket.size)
                bucket.kept.put(wholes[kind], 0, 0, whole)
        bucket.prune(mask)
        self.store.resize(bucket, _kinds(bucket, self.moments, self.home))
        self._keep(bucket, {kind: bucket.mine(wholes.pop(kind)) for kind in list(wholes)})


def _kinds(bucket: Bucket, moments: Kind, home: Home) -> dict[str, torch.dtype]:
    """Types of the states of a bucket; of weights that are wide themselves there is no copy."""
    working = bucket.data.dtype
    master = torch.float32 if working in (torch.bfloat16, torch.float16) else working
    kind = moments if bucket.weights[0].group != "vector" else "master"
    away = bucket.home is not None or (home.update == "cpu" and home.states != "device")
    away = away or bucket.kept is not None
    own = {"master": master} if master != working or away else {}
    return {**own, "mean": dtype(kind, master), "square": dtype(kind, master)}
