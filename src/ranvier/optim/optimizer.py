"""Optimizer: AdamW on the flat range of each bucket that lies on this data rank (ZeRO-1).

Gradients come summed over all ranks that hold the same part and scattered over data; each rank
updates its range in fp32 at least (master weights where the working weights are 16-bit) and the new
values are gathered over data. The gradient norm counts each part once and costs one all-reduce of
one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ranvier import init
from ranvier.comm import verbs
from ranvier.comm.bucket import Bucket, Group, Weight
from ranvier.comm.deferred import Deferred
from ranvier.comm.sums import Pieces
from ranvier.grid import Grid
from ranvier.optim import fused, prune
from ranvier.optim.early import Early
from ranvier.optim.prune import Choice
from ranvier.optim.scale import Scale
from ranvier.sharding import State


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
        total = verbs.all_reduce(torch.cat(numbers), grid.axis(*grid.degrees)).wait()
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
        moments: torch.dtype | None = None,
    ) -> None:
        """factors: of the learning rate of each group of weights. scale: what the loss bears.

        moments: bf16, rounded at random; or None, the type of the master weights.
        """
        self.queue, self.grid = queue, queue.grid
        self.lr, self.betas, self.eps, self.clip = lr, betas, eps, clip
        self.factors, self.scale = dict(factors or {}), scale
        self.decays: dict[Group, float] = {"matrix": decay}
        """Weight decay of each group of weights; of others none."""
        self.buckets = [bucket for bucket in queue.buckets if bucket.trainable]
        self.master = {bucket: self._master(bucket) for bucket in self.buckets}
        self._loads = queue.loads
        self._early = queue.complete = Early()
        self.mean = {b: torch.zeros_like(x, dtype=moments) for b, x in self.master.items()}
        self.square = {b: torch.zeros_like(x, dtype=moments) for b, x in self.master.items()}
        self._seeds = {b: init.key(0, "moments", b.weights[0].name) for b in self.buckets}
        device = queue.device
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        """Updates made; masked ones do not count."""
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether the last gradient norm was a number."""
        self.changing: Callable[[], None] | None = None
        """Called before weights and moments change: who still reads them waits."""
        self.voted = torch.zeros(0, dtype=torch.bool, device=device)
        """For what some rank has voted in the last step."""

    def _master(self, bucket: Bucket) -> Tensor:
        """The weights that are updated: my range itself, or a wider copy of 16-bit weights."""
        narrow = bucket.data.dtype in (torch.bfloat16, torch.float16)
        return bucket.mine().to(torch.float32 if narrow else bucket.data.dtype)

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
        now = fused.Scalars.of(self.updates + 1.0, good, factor, self.betas, lr)
        if self.changing is not None:
            self.changing()
        for bucket, pieces in grads:
            for start, grad in pieces:
                self._update(bucket, start, grad, now)
        self.updates += good
        if self.scale is not None:
            self.scale.update(self.finite)
        self._publish()
        self.queue.begin("")
        return norm

    def reread(self) -> None:
        """Take note that weights were changed from outside: master weights follow them."""
        self._loads = self.queue.loads
        for bucket in self.buckets:
            if bucket.kept is not None:  # what is pruned stays so
                bucket.kept.clear(bucket.data)
        self.master = {bucket: self._master(bucket) for bucket in self.buckets}

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

    def _update(self, bucket: Bucket, start: int, grad: Tensor, now: fused.Scalars) -> None:
        """Update a piece of my range of a bucket, master and working weights in one pass."""
        group, piece = bucket.weights[0].group, slice(start, start + grad.numel())
        master, out = self.master[bucket][piece], None
        if bucket.kept is None and bucket.data.dtype != master.dtype:
            out = bucket.mine()[piece]
        fused.adamw(
            master,
            grad,
            self.mean[bucket][piece],
            self.square[bucket][piece],
            now=now,
            share=self.factors.get(group, 1.0),
            eps=self.eps,
            decay=self.decays.get(group, 0.0),
            out=out,
            seed=self._seeds[bucket],
            first=self.queue.data_axis.index * self.master[bucket].numel() + start,
        )

    def _publish(self) -> None:
        """Give all data ranks the working weights of my range.

        Communicates: all-gather over data, by bucket.
        """
        pending = []
        for bucket in self.buckets:
            if bucket.kept is None and self.queue.data_axis.size == 1:
                continue  # they are there already
            part = bucket.mine() if bucket.kept is None else self.master[bucket]
            with self.grid.trace.at(bucket.name):
                values = verbs.all_gather(part.to(bucket.data.dtype), self.queue.data_axis)
            pending.append((bucket, values))
        for bucket, values in pending:
            bucket.working(0, values.wait())

    @property
    def _kinds(self) -> dict[str, dict[Bucket, Tensor]]:
        return {"master": self.master, "mean": self.mean, "square": self.square}

    def state(self) -> State:
        """My part of master weights and moments, by parameter name.

        Of pruned weights copies with zeros, and masks; what is written there counts for `parts`.
        """
        return {name: x for bucket in self.buckets for name, x in self._state(bucket).items()}

    def _state(self, bucket: Bucket) -> State:
        """The states of a bucket."""
        found: State = {}
        dense = {kind: bucket.spread(tensors[bucket]) for kind, tensors in self._kinds.items()}
        if bucket.kept is not None:
            dense["mask"] = bucket.kept.mask(*bucket.bounds).to(torch.uint8)
        for kind, whole in dense.items():
            for weight in bucket.weights:
                part = whole[slice(*bucket.range(weight))]
                found[f"{weight.name}.{kind}"] = part, bucket.place(weight)
        return found

    def parts(self) -> Iterator[State]:
        """The tensors of `state`, pruned ones bucket by bucket, to be written to.

        What was written to one is taken over when the next is asked for.
        """
        dense = [bucket for bucket in self.buckets if bucket.kept is None]
        yield {name: x for bucket in dense for name, x in self._state(bucket).items()}
        for bucket in self.buckets:
            if bucket.kept is None:
                continue
            state = {n: x for n, x in self._state(bucket).items() if not n.endswith(".mask")}
            yield state
            for kind, tensors in self._kinds.items():
                whole = torch.zeros_like(bucket.spread(tensors[bucket]))
                for weight in bucket.weights:
                    part, _ = state[f"{weight.name}.{kind}"]
                    whole[slice(*bucket.range(weight))] = part
                tensors[bucket].copy_(bucket.compress(whole))

    def held(self, weight: Weight, kind: str) -> Tensor:
        """My part of a state of a weight as it lies: compressed if it is pruned."""
        bucket = weight.bucket
        tensor = self._kinds[kind][bucket]
        if bucket.kept is None:
            return tensor[slice(*bucket.range(weight))]
        low, high = bucket.kept.at(weight.offset), bucket.kept.at(weight.offset + weight.elements)
        first = self.queue.data_axis.index * len(tensor)
        return tensor[max(low - first, 0) : max(high - first, 0)]

    def load(self, whole: Mapping[str, Tensor], *, steps: int) -> None:
        """Take my part of a whole state, after `steps` updates. Communicates: as `restored`."""
        for state in self.parts():
            for name, (part, place) in state.items():
                part.copy_(place.take(whole[name]))
        self.updates.fill_(steps)
        self.restored()

    @torch.no_grad()
    def restored(self) -> None:
        """Take note that `updates` and the tensors of `parts` were filled with earlier ones.

        Working weights follow the master weights. Communicates: all-gather over data.
        """
        self._loads = self.queue.loads
        for bucket in self.buckets:
            if bucket.kept is None:
                bucket.mine().copy_(self.master[bucket])
        self._publish()

    @torch.no_grad()
    def prune(self, choice: Choice) -> None:
        """Have only what is chosen stay; states follow.

        Communicates: as `prune.masks_of`; the states of pruned buckets over data.
        """
        if self.changing is not None:
            self.changing()
        for bucket, mask in prune.masks_of(self.queue, choice):
            whole = {kind: self._whole(bucket, tensors) for kind, tensors in self._kinds.items()}
            bucket.prune(mask)
            for kind, tensors in self._kinds.items():
                low, high = bucket.bounds
                tensors[bucket] = bucket.compress(whole.pop(kind)[low:high])
        self.queue.begin("")

    def _whole(self, bucket: Bucket, tensors: Mapping[Bucket, Tensor]) -> Tensor:
        """A state of a whole bucket `[size]`. Communicates: all-gather over data."""
        with self.grid.trace.at(bucket.name):
            values = verbs.all_gather(tensors[bucket], self.queue.data_axis).wait()
        if bucket.kept is None:
            return values
        dense = values.new_zeros(bucket.size)
        bucket.kept.put(dense, 0, 0, values)
        return dense
