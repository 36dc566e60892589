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

from ranvier.comm import verbs
from ranvier.comm.bucket import Bucket, Group, Weight
from ranvier.comm.deferred import Deferred
from ranvier.comm.sums import Pieces
from ranvier.grid import Grid
from ranvier.optim import fused
from ranvier.optim.early import Early
from ranvier.optim.moments import BLOCK, Key, Kind, Moments, dtype
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
        moments: Kind = "master",
    ) -> None:
        """factors: of the learning rate of each group of weights. scale: what the loss bears.

        moments: of matrices; those of vectors have the type of the master weights.
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
        self._moments: Kind = moments
        types = {b: dtype(self._kind(b), x.dtype) for b, x in self.master.items()}
        self.mean = {b: torch.zeros_like(x, dtype=types[b]) for b, x in self.master.items()}
        self.square = {b: torch.zeros_like(x, dtype=types[b]) for b, x in self.master.items()}
        self.scales = {w: x for b in self.buckets for w, x in self._scales(b).items()}
        """Of 8-bit moments: of the blocks of my part of a weight, `[2, blocks]`."""
        device = queue.device
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        """Updates made; masked ones do not count."""
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether the last gradient norm was a number."""
        self.changing: Callable[[], None] | None = None
        """Called before weights and moments change: who still reads them waits."""
        self.voted = torch.zeros(0, dtype=torch.bool, device=device)
        """For what some rank has voted in the last step."""

    def _range(self, bucket: Bucket) -> Tensor:
        """My range over data of the working weights."""
        axis = self.queue.data_axis
        return bucket.data.view(axis.size, -1)[axis.index]

    def _master(self, bucket: Bucket) -> Tensor:
        """The weights that are updated: my range itself, or a wider copy of 16-bit weights."""
        narrow = bucket.data.dtype in (torch.bfloat16, torch.float16)
        return self._range(bucket).to(torch.float32 if narrow else bucket.data.dtype)

    def _kind(self, bucket: Bucket) -> Kind:
        """Of the moments of a bucket: vectors have too few bytes to matter."""
        return "master" if bucket.weights[0].group == "vector" else self._moments

    def _scales(self, bucket: Bucket) -> dict[Weight, Tensor]:
        """Room for the scales of 8-bit moments."""
        if self._kind(bucket) != "int8":
            return {}
        ranges = ((w, *bucket.range(w)) for w in bucket.weights)
        blocks = {w: -((first - last) // BLOCK) for w, first, last in ranges}
        return {w: torch.zeros(2, n, device=bucket.data.device) for w, n in blocks.items()}

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
        group = bucket.weights[0].group
        master, working = self.master[bucket], self._range(bucket)
        for piece, held, key in self._pieces(bucket, start, start + grad.numel()):
            fused.adamw(
                master[piece],
                grad[piece.start - start : piece.stop - start],
                held,
                now=now,
                share=self.factors.get(group, 1.0),
                eps=self.eps,
                decay=self.decays.get(group, 0.0),
                out=working[piece] if working.dtype != master.dtype else None,
                key=key,
            )

    def _pieces(
        self, bucket: Bucket, start: int, stop: int
    ) -> Iterator[tuple[slice, Moments, Key | None]]:
        """Ranges of a range that are updated at once, with moments and what random bits are of.

        Narrow moments are updated by weight: random bits and blocks are those of a weight.
        """
        mean, square = self.mean[bucket], self.square[bucket]
        if self._kind(bucket) == "master":
            yield slice(start, stop), Moments(mean, square).part(start, stop), None
            return
        for weight in bucket.weights:
            first, last = bucket.range(weight)
            low, high = max(first, start), min(last, stop)
            if low < high:
                held = Moments(mean[first:last], square[first:last], self.scales.get(weight))
                key = Key.of(weight.name, bucket.place(weight)).at(low - first)
                yield slice(low, high), held.part(low - first, high - first), key

    def _publish(self) -> None:
        """Give all data ranks the working weights of my range.

        Communicates: all-gather over data, by bucket.
        """
        if self.queue.data_axis.size == 1:
            return
        pending = []
        for bucket in self.buckets:
            with self.grid.trace.at(bucket.name):
                part = self._range(bucket)
                pending.append((bucket, verbs.all_gather(part, self.queue.data_axis)))
        for bucket, values in pending:
            bucket.data.copy_(values.wait())

    def state(self) -> State:
        """My part of master weights and moments, by parameter name."""
        kinds = {"master": self.master, "mean": self.mean, "square": self.square}
        return {
            f"{weight.name}.{kind}": (
                tensors[bucket][slice(*bucket.range(weight))],
                bucket.place(weight),
            )
            for kind, tensors in kinds.items()
            for bucket in self.buckets
            for weight in bucket.weights
        }

    def load(self, whole: Mapping[str, Tensor], *, steps: int) -> None:
        """Take my part of a whole state, after `steps` updates. Communicates: as `restored`."""
        for name, (part, place) in self.state().items():
            part.copy_(place.take(whole[name]))
        self.updates.fill_(steps)
        self.restored()

    @torch.no_grad()
    def restored(self) -> None:
        """Take note that `updates` and the tensors of `state` were filled with earlier ones.

        Working weights follow the master weights. Communicates: all-gather over data.
        """
        self._loads = self.queue.loads
        for bucket in self.buckets:
            self._range(bucket).copy_(self.master[bucket])
        self._publish()
