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

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.sparsity import CompressedTensor, pack_bits
from ranvier.buckets.spec import ParamGroup
from ranvier.comm import collectives
from ranvier.comm.accumulator import Pieces
from ranvier.comm.streams import wait_for_event
from ranvier.grid import Grid
from ranvier.optim import fused_adamw, pruning
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.cpu_adamw import HostScalars
from ranvier.optim.grad_norm import GradNormAccumulator
from ranvier.optim.grad_scaler import GradScaler
from ranvier.optim.low_precision_states import (
    MomentKind,
    Moments,
    RoundingKey,
    moment_dtype,
    quantize_moment,
)
from ranvier.optim.pruning import MaskFunction
from ranvier.optim.state_store import StateStore, StateTensors, UpdateRule, UpdateRules
from ranvier.optim.state_tiles import StatePlacement, Tile
from ranvier.sharding import ShardedStateDict

MASK = "mask"
"""What is saved of pruned weights besides states: which elements stay."""


def gradient_norm(
    grads: Sequence[tuple[Bucket, Pieces]],
    grid: Grid,
    early: GradNormAccumulator,
    none: Tensor,
    votes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Euclidean norm of the gradient of the whole model, and for what some rank has voted.

    Ranges over data are disjoint; of the ranks that hold the same part only the first counts it.
    none: an empty tensor of the type the others sum in, for a rank without any.
    Communicates: all-reduce of one number, and one a vote, over all axes.
    """
    mine = [part for bucket, pieces in grads for part in bucket.owned_pieces(pieces)]
    square = early.sum_of_squares([bucket for bucket, _ in grads], mine or [none])
    with grid.trace.named_scope("norm"):
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
        queue: BucketScheduler,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
        clip: float = 1.0,
        factors: Mapping[ParamGroup, float] | None = None,
        scale: GradScaler | None = None,
        moments: MomentKind = "master",
        home: StatePlacement | None = None,
    ) -> None:
        """factors: of the learning rate of each group of weights. scale: what the loss bears.

        moments: their type; narrow ones are rounded at random. home: where states rest.
        """
        self.bucket_scheduler = queue
        self.grid = queue.grid
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.clip = clip
        self.lr_factors = dict(factors or {})
        self.grad_scaler = scale
        self.weight_decays: dict[ParamGroup, float] = {"matrix": decay}
        """Weight decay of each group of weights; of others none."""
        self.buckets = [bucket for bucket in queue.buckets if bucket.trainable]
        self._norm_accumulator = queue.on_bucket_complete = GradNormAccumulator()
        device = queue.device
        self.moment_kind, self.state_placement = moments, home or StatePlacement()
        self.state_store = self._build_store()
        """Master weights and moments."""
        self._exported_states: dict[Bucket, StateTensors] = {}
        """Numbers of 8-bit moments or of pruned buckets that were handed out, to be filled."""
        self._rounding_keys: dict[ShardedParameter, RoundingKey] = {}
        self.reload_master_weights()
        self.num_updates = torch.zeros((), dtype=torch.float64, device=device)
        """Updates made; masked ones do not count."""
        self.is_norm_finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether the last gradient norm was a number."""
        self.before_update: Callable[[], None] | None = None
        """Called before weights and moments change: who still reads them waits."""
        self.vote_results = torch.zeros(0, dtype=torch.bool, device=device)
        """For what some rank has voted in the last step."""

    def _build_store(self) -> StateStore:
        kinds = {
            bucket: _state_dtypes(bucket, self.moment_kind, self.state_placement)
            for bucket in self.buckets
        }
        return StateStore(kinds, self.state_placement, self.bucket_scheduler.device)

    @property
    def master_weights(self) -> dict[Bucket, Tensor]:
        """The weights that are updated: my range itself, or a wider copy of 16-bit weights."""
        held = self.state_store.states
        return {
            b: x["master"] if "master" in x else b.take_data_shard(b.data) for b, x in held.items()
        }

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
        if self._loads != self.bucket_scheduler.load_count:
            self.reload_master_weights()
        grads = self.bucket_scheduler.finish_gradients()
        norm, factor = self._norm_and_factor(grads, votes)
        self.is_norm_finite = norm.isfinite()
        if vetoes:
            good = self.is_norm_finite & ~self.vote_results[:vetoes].any()
        else:
            good = self.is_norm_finite
        lr = self.lr if lr is None else lr
        now = UpdateScalars.for_update(self.num_updates + 1.0, good, factor, self.betas, lr)
        if self.before_update is not None:
            self.before_update()
        if self.bucket_scheduler.host_offload is not None:
            wait_for_event(
                self.bucket_scheduler.host_offload.finish_transfers(), self.bucket_scheduler.device
            )
        self._update_buckets(grads, now)
        self._exported_states = {}
        self.num_updates += good
        if self.bucket_scheduler.on_optimizer_step is not None:
            self.bucket_scheduler.on_optimizer_step(good)
        if self.grad_scaler is not None:
            self.grad_scaler.update(self.is_norm_finite)
        self._all_gather_weights()
        self.bucket_scheduler.begin_step("")
        return norm

    @torch.no_grad()
    def reload_master_weights(self) -> None:
        """Take note that weights were changed from outside: master weights follow them."""
        self._loads = self.bucket_scheduler.load_count
        self.state_store.invalidate_slots()
        for bucket, held in self.state_store.states.items():
            if bucket.sparsity_mask is not None:  # what is pruned stays so
                bucket.sparsity_mask.zero_pruned(bucket.storage)
            if "master" in held:
                self._copy_by_tiles(held["master"], bucket.take_data_shard(bucket.storage))

    def _copy_by_tiles(self, to: Tensor, x: Tensor) -> None:
        """Copy numbers to another type and place, tile by tile."""
        size = self.state_store.placement.tile_elements
        for into, part in zip(to.split(size), x.split(size), strict=True):
            into.copy_(part)

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Norm of the gradients so far. Communicates: the end of their reductions, one number."""
        return self._norm_and_factor(self.bucket_scheduler.finish_gradients(), None)[0]

    def _norm_and_factor(
        self, grads: Sequence[tuple[Bucket, Pieces]], votes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Norm of the gradient without its scale, and what gradients are to be multiplied by."""
        none = torch.zeros(
            0, dtype=self.bucket_scheduler.reduce_dtype, device=self.bucket_scheduler.device
        )
        norm, self.vote_results = gradient_norm(
            grads, self.grid, self._norm_accumulator, none, votes
        )
        if self.grad_scaler is not None:
            norm = norm / self.grad_scaler.scale
        if self.clip > 0.0:
            factor = clip_factor(norm, self.clip)
        else:
            factor = None
        if self.grad_scaler is not None:
            factor = (1.0 if factor is None else factor) / self.grad_scaler.scale
        return norm, factor

    def _update_buckets(self, grads: Sequence[tuple[Bucket, Pieces]], now: UpdateScalars) -> None:
        """Update all buckets: first those whose states are here, then those that come."""
        rule = partial(self._update_tile, now)
        if self._updates_on_cpu:
            known = HostScalars.copy_from(now)
        else:
            known = None
        together: dict[ParamGroup, list[fused_adamw.CpuUpdate]] = {}
        collect = partial(self._batch_cpu_update, together, rule)
        for bucket, pieces in grads:
            for tile in (
                () if self.state_store.is_offloaded(bucket) else self.state_store.tiles[bucket]
            ):
                self.state_store.update_resident_tile(tile, pieces, collect)
        self._apply_cpu_batches(together, now)
        host = partial(self._host_rule, known)
        streamed = [one for one in grads if self.state_store.is_offloaded(one[0])]
        self.state_store.update_offloaded(streamed, UpdateRules(rule, host))

    def _host_rule(self, known: HostScalars | None) -> UpdateRule:
        """How the host updates, once it knows the norm."""
        assert known is not None
        return partial(self._update_tile, known.wait())

    def _batch_cpu_update(
        self,
        together: dict[ParamGroup, list[fused_adamw.CpuUpdate]],
        rule: UpdateRule,
        tile: Tile,
        held: StateTensors,
        grad: Tensor,
        out: Tensor | None,
    ) -> None:
        """Note an update that a CPU makes together with others; make any other one."""
        bucket = tile.bucket
        if out is None and bucket.sparsity_mask is None and "master" not in held:
            master = bucket.take_data_shard(bucket.data)[tile.as_slice]
            moments = Moments(held["mean"], held["square"], held.get("scales"))
            if fused_adamw.can_use_cpu_kernel(master, moments) and grad.dtype == master.dtype:
                update = fused_adamw.CpuUpdate(master, grad, moments)
                together.setdefault(bucket.weights[0].param_group, []).append(update)
                return
        rule(tile, held, grad, out)

    def _apply_cpu_batches(
        self, together: Mapping[ParamGroup, Sequence[fused_adamw.CpuUpdate]], now: UpdateScalars
    ) -> None:
        """Make the updates that were noted."""
        if not together or not now.should_update:
            return
        for group, updates in together.items():
            if now.grad_factor is not None and now.grad_factor != 1.0:
                # never in place: a gradient that came once is not ours
                grads = torch._foreach_mul([update.grad for update in updates], now.grad_factor)
                updates = [replace(one, grad=x) for one, x in zip(updates, grads, strict=True)]
            fused_adamw.cpu_adamw(
                updates,
                now=now,
                share=self.lr_factors.get(group, 1.0),
                eps=self.eps,
                decay=self.weight_decays.get(group, 0.0),
            )

    def _update_tile(
        self, now: UpdateScalars, tile: Tile, held: StateTensors, grad: Tensor, out: Tensor | None
    ) -> None:
        """Update the states of a tile, and its working weights."""
        bucket = tile.bucket
        group = tile.bucket.weights[0].param_group
        working = out
        if out is None and bucket.sparsity_mask is None:
            working = bucket.take_data_shard(bucket.data)[tile.as_slice]
        master = held.get("master", working)
        assert master is not None, bucket.name
        moments = Moments(held["mean"], held["square"], held.get("scales"))
        rule: Callable[..., None] = partial(fused_adamw.fused_adamw, key=self._rounding_key(tile))
        if out is None and working is not master:
            rule = partial(rule, out=working)
        rule(
            master,
            grad,
            moments,
            now=now,
            share=self.lr_factors.get(group, 1.0),
            eps=self.eps,
            decay=self.weight_decays.get(group, 0.0),
        )
        if out is not None:  # also if no update was made: what is there is of another tile
            out.copy_(master)
        elif bucket.sparsity_mask is not None:
            bucket.write_data_shard(tile.start, master)

    @property
    def _updates_on_cpu(self) -> bool:
        return (
            self.state_store.placement.update_device == "cpu"
            and self.state_store.placement.states != "device"
        )

    def _rounding_key(self, tile: Tile) -> RoundingKey | None:
        """What the bits come from with which moments are rounded."""
        if tile.weight is None:
            return None
        bucket = tile.bucket
        weight = tile.weight
        if weight not in self._rounding_keys:
            self._rounding_keys[weight] = RoundingKey.for_weight(
                weight.name, bucket.state_shard(weight)
            )
        return self._rounding_keys[weight].at_offset(tile.start - bucket.state_range(weight)[0])

    def _all_gather_weights(self) -> None:
        """Give all data ranks the working weights of my range.

        Communicates: all-gather over data, by bucket.
        """
        if self.bucket_scheduler.data_axis.size == 1:
            return
        pending = []
        for bucket in self.buckets:
            with self.grid.trace.named_scope(bucket.name):
                bucket.wait_for_update()
                part = bucket.take_data_shard(bucket.storage).to(self.bucket_scheduler.device)
                pending.append(
                    (bucket, collectives.all_gather(part, self.bucket_scheduler.data_axis))
                )
        for bucket, values in pending:
            bucket.write_updated_values(0, values.wait())

    # ---- to and from checkpoints ----------------------------------------------------------

    def sharded_state(self) -> ShardedStateDict:
        """My part of master weights and moments, by parameter name.

        8-bit moments are the numbers they stand for. Pruned weights have their zeros and a mask.
        """
        return self._export_states(self.buckets)

    def sparse_state(self) -> tuple[ShardedStateDict, dict[str, CompressedTensor]]:
        """`state` without copies of pruned weights: of these what stays, and where."""
        state = self._export_states([b for b in self.buckets if b.sparsity_mask is None])
        sparse = {}
        for bucket in self.buckets:
            if bucket.sparsity_mask is None:
                continue
            mask = bucket.sparsity_mask.dense_mask(*bucket.data_shard_bounds).cpu()
            none = torch.zeros(0, dtype=torch.uint8)
            numbers = {**self._decoded_states(bucket), MASK: none}
            for weight in bucket.weights:
                here = mask[slice(*bucket.dense_state_range(weight))]
                bits = pack_bits(here)
                span = slice(*bucket.state_range(weight))
                for kind, flat in numbers.items():
                    if kind == MASK:
                        values = none
                    else:
                        values = flat[span]
                    name = f"{weight.name}.{kind}"
                    size = len(here)
                    dense = torch.empty(size, dtype=values.dtype, device="meta")
                    state[name] = dense, bucket.state_shard(weight)
                    sparse[name] = CompressedTensor(values, bits, size)
        return state, sparse

    def iter_restore_parts(self) -> Iterator[ShardedStateDict]:
        """What is to be filled with an earlier state, a part at a time: those that are copies.

        A part is taken over when the next one is asked for, the last by `restored`.
        """
        copied = [bucket for bucket in self.buckets if self._exports_copies(bucket)]
        for some in ([b for b in self.buckets if b not in copied], *([b] for b in copied)):
            self._import_states()
            state = self._export_states(some)
            yield {name: x for name, x in state.items() if not name.endswith(f".{MASK}")}

    def _exports_copies(self, bucket: Bucket) -> bool:
        """Whether states are handed out as copies."""
        return (
            bucket.sparsity_mask is not None
            or self.state_store.state_dtypes[bucket]["mean"] == torch.uint8
        )

    def _export_states(self, buckets: Sequence[Bucket]) -> ShardedStateDict:
        self.bucket_scheduler.wait_for_updates()
        self.state_store.synchronize()
        found: ShardedStateDict = {}
        for bucket in buckets:
            for kind, flat in self._export_bucket(bucket).items():
                for weight in bucket.weights:
                    part = flat[slice(*bucket.dense_state_range(weight))]
                    found[f"{weight.name}.{kind}"] = part, bucket.state_shard(weight)
        return found

    def weight_states(self, weight: ShardedParameter) -> StateTensors:
        """My part of the states of a weight as they lie: 8-bit moments as codes, what stays."""
        bucket = weight.bucket
        held = {"master": self.master_weights[bucket], **self.state_store.states[bucket]}
        return {kind: flat[slice(*bucket.state_range(weight))] for kind, flat in held.items()}

    def _export_bucket(self, bucket: Bucket) -> StateTensors:
        """The states of a bucket as they are saved; copies are on the host."""
        numbers = self._decoded_states(bucket)
        if not self._exports_copies(bucket):
            return numbers
        if bucket.sparsity_mask is None:
            self._exported_states[bucket] = {kind: numbers[kind] for kind in ("mean", "square")}
            return numbers
        given = self._exported_states[bucket] = {
            k: bucket.to_dense(x).cpu() for k, x in numbers.items()
        }
        return {
            **given,
            MASK: bucket.sparsity_mask.dense_mask(*bucket.data_shard_bounds).to(torch.uint8).cpu(),
        }

    def _decoded_states(self, bucket: Bucket) -> StateTensors:
        """The states of my range `[held]` as numbers."""
        held = {"master": self.master_weights[bucket], **self.state_store.states[bucket]}
        if held["mean"].dtype != torch.uint8:
            return held
        wide = {kind: torch.zeros(bucket.data_shard_size) for kind in ("mean", "square")}
        for tile in self.state_store.tiles[bucket]:
            moments = self._tile_moments(tile).dequantize(torch.float32)
            wide["mean"][tile.as_slice], wide["square"][tile.as_slice] = moments
        return {**held, **wide}

    def _tile_moments(self, tile: Tile) -> Moments:
        held = self.state_store.tile_states(tile)
        return Moments(held["mean"], held["square"], held.get("scales"))

    def _store_states(self, bucket: Bucket, numbers: StateTensors) -> None:
        """Take numbers for the states of my range `[held]`."""
        held = {"master": self.master_weights[bucket], **self.state_store.states[bucket]}
        for kind, values in numbers.items():
            if held[kind].dtype != torch.uint8:
                held[kind].copy_(values)
                continue
            for tile in self.state_store.tiles[bucket]:
                moments = self._tile_moments(tile)
                assert moments.scales is not None, tile
                codes, scales = quantize_moment(
                    values[tile.as_slice], "mean" if kind == "mean" else "square"
                )
                held[kind][tile.as_slice].copy_(codes)
                moments.scales[0 if kind == "mean" else 1].copy_(scales)

    @torch.no_grad()
    def _import_states(self) -> None:
        """Take the numbers that were handed out and filled."""
        for bucket, given in self._exported_states.items():
            self._store_states(bucket, {kind: bucket.to_compressed(x) for kind, x in given.items()})
        self._exported_states = {}

    def load_full_state(self, whole: Mapping[str, Tensor], *, steps: int) -> None:
        """Take my part of a whole state, after `steps` updates. Communicates: as `restored`."""
        for state in self.iter_restore_parts():
            for name, (part, place) in state.items():
                part.copy_(place.slice_from(whole[name]))
        self.num_updates.fill_(steps)
        self.finish_restore()

    @torch.no_grad()
    def finish_restore(self) -> None:
        """Take note that `updates` and the tensors of `state` were filled with earlier ones.

        Working weights follow the master weights. Communicates: all-gather over data.
        """
        self._loads = self.bucket_scheduler.load_count
        self.state_store.invalidate_slots()
        self._import_states()
        for bucket in self.buckets:
            size = self.state_placement.tile_elements
            for number, part in enumerate(self.master_weights[bucket].split(size)):
                bucket.write_data_shard(number * size, part)
        self.bucket_scheduler.wait_for_updates()
        self._all_gather_weights()

    # ---- pruning --------------------------------------------------------------------------

    @torch.no_grad()
    def prune_weights(self, choice: MaskFunction, *, keep: bool = True) -> None:
        """Have only what is chosen of the weights stay; states follow, or (not keep) begin anew.

        Communicates: as `prune.masks_of`; bits over depth; states that are kept over data.
        """
        if self.before_update is not None:
            self.before_update()
        self.bucket_scheduler.wait_for_updates()
        self.state_store.synchronize()
        self._exported_states = {}
        self._rounding_keys = {}
        if not keep:
            del self.state_store
        for bucket, mask in pruning.bucket_masks(self.bucket_scheduler, choice):
            if keep and (mask is not None or bucket.sparsity_mask is not None):
                self._prune_with_states(bucket, mask)
            elif not keep:
                bucket.set_sparsity_mask(mask)
        if not keep:
            self.state_store = self._build_store()
            self.reload_master_weights()
        self.bucket_scheduler.begin_step("")

    def _prune_with_states(self, bucket: Bucket, mask: Tensor | None) -> None:
        """Prune a bucket and its states."""
        wholes = StateTensors()
        device = self.bucket_scheduler.device
        for kind, part in self._decoded_states(bucket).items():
            with self.grid.trace.named_scope(bucket.name):
                whole = collectives.all_gather(
                    part.to(device), self.bucket_scheduler.data_axis
                ).wait()
            wholes[kind] = whole
            if bucket.sparsity_mask is not None:
                wholes[kind] = whole.new_zeros(bucket.size)
                bucket.sparsity_mask.write_dense(wholes[kind], 0, 0, whole)
        bucket.set_sparsity_mask(mask)
        self.state_store.resize_bucket(
            bucket, _state_dtypes(bucket, self.moment_kind, self.state_placement)
        )
        self._store_states(
            bucket, {kind: bucket.take_data_shard(wholes.pop(kind)) for kind in list(wholes)}
        )


def _state_dtypes(
    bucket: Bucket, moments: MomentKind, home: StatePlacement
) -> dict[str, torch.dtype]:
    """Types of the states of a bucket; of weights that are wide themselves there is no copy."""
    working = bucket.data.dtype
    if working in (torch.bfloat16, torch.float16):
        master = torch.float32
    else:
        master = working
    if bucket.weights[0].param_group != "vector":
        kind = moments
    else:
        kind = "master"
    away = bucket.host_data is not None or (home.update_device == "cpu" and home.states != "device")
    away = away or bucket.sparsity_mask is not None
    if master != working or away:
        own = {"master": master}
    else:
        own = {}
    return {**own, "mean": moment_dtype(kind, master), "square": moment_dtype(kind, master)}
