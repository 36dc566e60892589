"""Optimizer: AdamW, SGD, Muon or Jorge on the optimizer shard of each bucket (ZeRO-1).

Gradients are reduce-scattered over the replica axis of a bucket: all ranks with the same shards
(data, context, and expert for dense weights). Each rank updates its optimizer shard at least in
fp32 (with master weights if the working weights are 16-bit), and the new values are all-gathered
over the same ranks. The gradient norm counts each shard once and needs one all-reduce of one
number. Muon and Jorge update hidden matrices, which travel to one rank for the moment of their
update (`matrix_update`); AdamW updates all other weights.
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
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.optim import fused_adamw, pruning, sgd
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
from ranvier.optim.matrix_update import MasterUpdate, MatrixUpdate, PassRule
from ranvier.optim.pruning import MaskFunction
from ranvier.optim.rules import Jorge, Muon, Rule, Sgd
from ranvier.optim.state_store import StateStore, StateTensors, UpdateRule, UpdateRules
from ranvier.optim.state_tiles import StatePlacement, Tile
from ranvier.sharding import MATRIX_DIMS, ShardedStateDict

STATE_KINDS = ("mean", "square", "momentum", "preconditioned")
"""States of a weight under any rule, in addition to its master weight."""
MASK = "mask"
"""Key suffix in a saved state for the mask of a pruned weight, which is 1 for kept elements."""


def gradient_norm(
    grads: Sequence[tuple[Bucket, Pieces]],
    grid: Grid,
    early: GradNormAccumulator,
    none: Tensor,
    votes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of the gradient of the whole model, and which votes any rank has cast.

    Optimizer shards are disjoint; if several ranks have the same shard, only the first counts it.
    none: an empty tensor in the reduction dtype, for a rank that counts no gradient.
    Communicates: all-reduce of one number, and one per vote, over all axes.
    """
    mine = [part for bucket, pieces in grads for part in bucket.owned_pieces(pieces)]
    square = early.sum_of_squares([bucket for bucket, _ in grads], mine or [none])
    with grid.trace.named_scope("norm"):
        # Votes share the all-reduce of the norm: a vote is 0 or 1, so a sum above 0 means that at
        # least one rank has cast it.
        numbers = [square[None], *([] if votes is None else [votes.to(square.dtype)])]
        total = collectives.all_reduce(torch.cat(numbers), grid.axis(*grid.degrees)).wait()
    return total[0].sqrt(), total[1:] > 0.0


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Returns the factor that scales gradients to a norm of at most `limit`."""
    # The same epsilon as in torch.nn.utils.clip_grad_norm_.
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Optimizer:
    """AdamW (or another rule) with sharded states (ZeRO-1), gradient clipping and mixed precision.

    Master weights are stored in fp32 if the working weights are 16-bit. An update with a non-finite
    gradient norm is skipped; it is masked on the device, so the host does not wait for the norm.
    Weight decay applies to matrices, i.e. parameters with at least two named dims, excluding
    embeddings.

    Args:
        queue: The bucket scheduler of the model, `model.parallel.bucket_scheduler`.
        lr: Learning rate, if `step` is called without one.
        betas: Decay rates of the two moments.
        eps: Term that is added to the root of the second moment.
        decay: Weight decay of matrices.
        clip: Maximum gradient norm; 0 disables clipping.
        factors: Factor of the learning rate of each parameter group ("matrix", "embedding",
            "vector"); 1 by default.
        scale: Scaler of the loss, for fp16.
        moments: Dtype of the moments of matrices and embeddings: "master" (the dtype of the master
            weights), "bf16" or "int8". The last two use stochastic rounding.
        home: Where states are stored and updated; on the device by default.
        rule: Update rule: `rules.Sgd` for all weights, `rules.Muon` or `rules.Jorge` for hidden
            matrices; AdamW for all others, and by default.
        adamw_factor: Factor of the learning rate of the weights that the rule leaves to AdamW, in
            addition to `factors`.
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
        rule: Rule | None = None,
        adamw_factor: float = 1.0,
    ) -> None:
        """Allocates the states of all trainable buckets."""
        self.bucket_scheduler = queue
        self.grid = queue.grid
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.clip = clip
        self.lr_factors = dict(factors or {})
        self.grad_scaler = scale
        self.weight_decays: dict[ParamGroup, float] = {"matrix": decay}
        """Weight decay of each parameter group; 0 for groups that are not listed."""
        self.buckets = [bucket for bucket in queue.buckets if bucket.trainable]
        # The scheduler calls the accumulator during backward, as soon as a gradient is complete.
        self._norm_accumulator = queue.on_bucket_complete = GradNormAccumulator()
        device = queue.device
        self.moment_kind, self.state_placement = moments, home or StatePlacement()
        self.rule, self.adamw_factor = rule, adamw_factor
        self._check_rule()
        self.state_store = self._build_store()
        """Master weights and moments."""
        self._exported_states: dict[Bucket, StateTensors] = {}
        """Decoded copies of 8-bit or pruned states that were exported and that a loader may
        fill."""
        self._rounding_keys: dict[ShardedParameter, RoundingKey] = {}
        matrices = [bucket for bucket in self.buckets if self._is_matrix_bucket(bucket)]
        self.matrix_update: MatrixUpdate | None = None
        """The update of whole matrices; None if there are none or if the rule needs none."""
        if isinstance(rule, Muon | Jorge) and matrices:
            self.matrix_update = MatrixUpdate(rule, matrices, self.grid, device, self._rounding_key)
        self.reload_master_weights()
        # On the device, as only the device knows whether an update is skipped and must not be
        # counted.
        self.num_updates = torch.zeros((), dtype=torch.float64, device=device)
        """Number of applied updates, without skipped ones."""
        self.is_norm_finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether the last gradient norm was finite."""
        self.before_update: Callable[[], None] | None = None
        """Called before weights and moments change, so that pending readers (e.g. an async save)
        can finish."""
        self.vote_results = torch.zeros(0, dtype=torch.bool, device=device)
        """Which votes at least one rank has cast in the last step."""

    def _check_rule(self) -> None:
        """Raises if the rule does not support the moments or the weights."""
        name = type(self.rule).__name__
        if self.rule is not None and self.moment_kind == "int8":
            raise PlanError(
                f"moments='int8' with the rule {name}. Only the moments of AdamW can have 8 bits. "
                "Use moments='bf16' or 'master'."
            )
        if not isinstance(self.rule, Muon | Jorge):
            return
        if any(bucket.sparsity_mask is not None for bucket in self.buckets):
            self._refuse_pruning()
        # A stage may have none, but a model must have some.
        has_matrices = any(bucket.spec.has_matrices for bucket in self.buckets)
        if not has_matrices and self.grid.degrees["pipe"] == 1:
            raise PlanError(
                f"The rule {name} for a model without trainable hidden matrices. It updates "
                f"matrices between features ({', '.join(sorted(MATRIX_DIMS))}), and AdamW all "
                "other weights. Use rule=None."
            )

    def _refuse_pruning(self) -> None:
        raise PlanError(
            f"Pruned weights with the rule {type(self.rule).__name__}. The update of a whole "
            "matrix is not zero where the matrix is pruned. Use rule=None, or prune nothing."
        )

    def _build_store(self) -> StateStore:
        kinds = {
            bucket: _state_dtypes(
                bucket, self._moment_names(bucket), self.moment_kind, self.state_placement
            )
            for bucket in self.buckets
        }
        return StateStore(kinds, self.state_placement, self.bucket_scheduler.device)

    def _is_matrix_bucket(self, bucket: Bucket) -> bool:
        """Whether the rule updates the weights of a bucket as whole matrices."""
        return isinstance(self.rule, Muon | Jorge) and bucket.spec.has_matrices

    def _moment_names(self, bucket: Bucket) -> tuple[str, ...]:
        """Returns the states of a bucket, in addition to its master weights."""
        if isinstance(self.rule, Sgd):
            return self.rule.state_kinds
        if self.rule is not None and self._is_matrix_bucket(bucket):
            return self.rule.state_kinds
        return ("mean", "square")

    @property
    def master_weights(self) -> dict[Bucket, Tensor]:
        """Optimizer shards of the weights that are updated: an fp32 copy for 16-bit weights."""
        held = self.state_store.states
        return {
            b: x["master"] if "master" in x else b.take_optimizer_shard(b.data)
            for b, x in held.items()
        }

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor | None = None,
        *,
        votes: Tensor | None = None,
        vetoes: int = 0,
    ) -> Tensor:
        """Updates the weights with the accumulated gradients, and clears the gradients.

        Communicates: the remaining gradient reductions, the norm, all-gather of weights over
        replicas.

        Args:
            lr: Learning rate of this step; the optimizer's `lr` by default.
            votes: Bools on the device that are reduced together with the norm. `vote_results`
                contains, on all ranks, whether any rank has cast each vote.
            vetoes: The update is skipped if any rank has cast one of the first `vetoes` votes.

        Returns:
            The gradient norm before clipping, as a tensor on the device.
        """
        # If values were loaded into the working weights since the last step, reload the masters.
        if self._loads != self.bucket_scheduler.load_count:
            self.reload_master_weights()
        grads = self.bucket_scheduler.finish_gradients()
        norm, factor = self._norm_and_factor(grads, votes)
        self.is_norm_finite = norm.isfinite()
        if vetoes:
            # `good` remains a device tensor: the kernels mask the update with it, without a
            # synchronization.
            good = self.is_norm_finite & ~self.vote_results[:vetoes].any()
        else:
            good = self.is_norm_finite
        lr = self.lr if lr is None else lr
        # The bias correction of AdamW counts updates from one.
        now = UpdateScalars.for_update(self.num_updates + 1.0, good, factor, self.betas, lr)
        if self.before_update is not None:
            self.before_update()
        # Copies to and from the host still read the weights and gradients that will change.
        if self.bucket_scheduler.host_offload is not None:
            wait_for_event(
                self.bucket_scheduler.host_offload.finish_transfers(), self.bucket_scheduler.device
            )
        self._update_buckets(grads, now)
        # Exported copies contain the states of an earlier step.
        self._exported_states = {}
        self.num_updates += good
        if self.bucket_scheduler.on_optimizer_step is not None:
            self.bucket_scheduler.on_optimizer_step(good)
        if self.grad_scaler is not None:
            # Only an overflow reduces the loss scale, not a veto.
            self.grad_scaler.update(self.is_norm_finite)
        self._all_gather_weights()
        self.bucket_scheduler.begin_step("")
        return norm

    @torch.no_grad()
    def reload_master_weights(self) -> None:
        """Updates the master weights after the working weights were changed from outside."""
        self._loads = self.bucket_scheduler.load_count
        self.state_store.invalidate_slots()
        for bucket, held in self.state_store.states.items():
            # Loaded values may be dense; pruned elements must remain zero.
            if bucket.sparsity_mask is not None:
                bucket.sparsity_mask.zero_pruned(bucket.storage)
            if "master" in held:
                self._copy_by_tiles(held["master"], bucket.take_optimizer_shard(bucket.storage))

    def _copy_by_tiles(self, to: Tensor, x: Tensor) -> None:
        """Copies to another dtype and device in tiles, to limit the size of temporary buffers."""
        size = self.state_store.placement.tile_elements
        for into, part in zip(to.split(size), x.split(size), strict=True):
            into.copy_(part)

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Returns the norm of the gradients accumulated so far.

        Communicates: the remaining gradient reductions, all-reduce of one number.
        """
        return self._norm_and_factor(self.bucket_scheduler.finish_gradients(), None)[0]

    def _norm_and_factor(
        self, grads: Sequence[tuple[Bucket, Pieces]], votes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the norm of the unscaled gradient, and the factor of gradients (None for 1)."""
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
            # Unscaling is part of the clip factor, which saves a pass over the gradients.
            factor = (1.0 if factor is None else factor) / self.grad_scaler.scale
        return norm, factor

    def _update_buckets(self, grads: Sequence[tuple[Bucket, Pieces]], now: UpdateScalars) -> None:
        """Updates all buckets: whole matrices, and all others elementwise."""
        matrices = [one for one in grads if self._is_matrix_bucket(one[0])]
        others = [one for one in grads if not self._is_matrix_bucket(one[0])]
        if self.matrix_update is not None:
            self.matrix_update.update(
                matrices,
                now,
                partial(self._run_pass, now),
                self._update_matrix_tile,
                share=self.lr_factors.get("matrix", 1.0),
                decay=self.weight_decays.get("matrix", 0.0),
                states=self.state_store.states,
                updates=self._count_updates,
            )
        # CPU updates of small tiles are batched: one kernel call per parameter group.
        together: dict[ParamGroup, list[fused_adamw.CpuUpdate]] = {}
        self._run_pass(now, others, self._update_tile, together=together)
        self._apply_cpu_batches(together, now)

    def _count_updates(self) -> int:
        """Returns the number of applied updates; waits for the device."""
        # A dry run has no numbers; its steps count as the first.
        return 0 if self.num_updates.is_meta else int(self.num_updates.item())

    def _run_pass(
        self,
        now: UpdateScalars,
        work: Sequence[tuple[Bucket, Pieces]],
        rule: PassRule,
        writes_weights: bool = True,
        together: dict[ParamGroup, list[fused_adamw.CpuUpdate]] | None = None,
    ) -> None:
        """Applies a rule to all tiles of buckets, first those with states on the device.

        A pass that writes no weights is complete on return, except for the device's own work.
        together: collects updates that a CPU kernel can batch.
        """
        here = partial(rule, now)
        resident = here if together is None else partial(self._batch_cpu_update, together, here)
        for bucket, pieces in work:
            for tile in (
                () if self.state_store.is_offloaded(bucket) else self.state_store.tiles[bucket]
            ):
                self.state_store.update_resident_tile(
                    tile, pieces, resident, writes_weights=writes_weights
                )
        streamed = [one for one in work if self.state_store.is_offloaded(one[0])]
        if not streamed:
            return
        if self._updates_on_cpu:
            # Start copying the scalars now; the host waits for them only before its first tile.
            known = HostScalars.copy_from(now)
        else:
            known = None
        host = partial(self._host_rule, rule, known)
        self.state_store.update_offloaded(streamed, UpdateRules(here, host, writes_weights))
        if not writes_weights:
            for bucket, _ in streamed:
                bucket.wait_for_update()
            self.state_store.synchronize()

    def _host_rule(self, rule: PassRule, known: HostScalars | None) -> UpdateRule:
        """Returns the update rule for the CPU; waits until the norm is on the host."""
        assert known is not None
        return partial(rule, known.wait())

    def _batch_cpu_update(
        self,
        together: dict[ParamGroup, list[fused_adamw.CpuUpdate]],
        rule: UpdateRule,
        tile: Tile,
        held: StateTensors,
        grad: Tensor,
        out: Tensor | None,
    ) -> None:
        """Queues an update if the CPU kernel can batch it with others, or else applies it."""
        bucket = tile.bucket
        if (
            out is None
            and bucket.sparsity_mask is None
            and "master" not in held
            and "square" in held
        ):
            master = bucket.take_optimizer_shard(bucket.data)[tile.as_slice]
            moments = Moments(held["mean"], held["square"], held.get("scales"))
            if fused_adamw.can_use_cpu_kernel(master, moments) and grad.dtype == master.dtype:
                update = fused_adamw.CpuUpdate(master, grad, moments)
                together.setdefault(bucket.weights[0].param_group, []).append(update)
                return
        rule(tile, held, grad, out)

    def _apply_cpu_batches(
        self, together: Mapping[ParamGroup, Sequence[fused_adamw.CpuUpdate]], now: UpdateScalars
    ) -> None:
        """Applies the queued CPU updates."""
        if not together or not now.should_update:
            return
        for group, updates in together.items():
            if now.grad_factor is not None and now.grad_factor != 1.0:
                # Not in place, as the first gradient of a step is stored without a copy.
                grads = torch._foreach_mul([update.grad for update in updates], now.grad_factor)
                updates = [replace(one, grad=x) for one, x in zip(updates, grads, strict=True)]
            fused_adamw.cpu_adamw(
                updates,
                now=now,
                share=self._lr_factor(group),
                eps=self.eps,
                decay=self.weight_decays.get(group, 0.0),
            )

    def _update_tile(
        self, now: UpdateScalars, tile: Tile, held: StateTensors, grad: Tensor, out: Tensor | None
    ) -> None:
        """Updates the states of a tile and its working weights elementwise."""
        bucket = tile.bucket
        group = bucket.weights[0].param_group
        share = self._lr_factor(group)
        decay = self.weight_decays.get(group, 0.0)
        working = self._working_weights(tile, out)
        master = held.get("master", working)
        assert master is not None, bucket.name
        if isinstance(self.rule, Sgd):
            sgd.sgd_update(
                master,
                held["momentum"],
                grad,
                now=now,
                beta=self.rule.momentum,
                share=share,
                decay=decay,
            )
            self._publish_weights(tile, master, working)
            return
        moments = Moments(held["mean"], held["square"], held.get("scales"))
        adamw: Callable[..., None] = partial(fused_adamw.fused_adamw, key=self._rounding_key(tile))
        if out is None and working is not master:
            adamw = partial(adamw, out=working)
        adamw(master, grad, moments, now=now, share=share, eps=self.eps, decay=decay)
        # Copy even if the update is skipped: the buffer may contain the weights of another tile.
        if out is not None or bucket.sparsity_mask is not None:
            self._publish_weights(tile, master, working)

    def _lr_factor(self, group: ParamGroup) -> float:
        """Returns the factor of the learning rate of a group that is updated elementwise."""
        return self.lr_factors.get(group, 1.0) * self.adamw_factor

    def _working_weights(self, tile: Tile, out: Tensor | None) -> Tensor | None:
        """Returns where the new working weights of a tile are written.

        To `out` (which the caller copies), to the bucket, or, for a pruned bucket (None), to a
        compressed master copy that is then written to the bucket.
        """
        if out is None and tile.bucket.sparsity_mask is None:
            return tile.bucket.take_optimizer_shard(tile.bucket.data)[tile.as_slice]
        return out

    def _publish_weights(self, tile: Tile, master: Tensor, working: Tensor | None) -> None:
        """Writes the master weights of a tile to its working weights; see `_working_weights`."""
        if working is None:
            tile.bucket.write_optimizer_shard(tile.start, master)
        elif working is not master:
            working.copy_(master)

    def _update_matrix_tile(
        self, update: MasterUpdate, tile: Tile, held: StateTensors, out: Tensor | None
    ) -> None:
        """Updates the master weights of a tile of matrices, and writes its working weights."""
        working = self._working_weights(tile, out)
        master = held.get("master", working)
        assert master is not None, tile.bucket.name
        # A kernel writes both. The buffer `out` must be written even if the update is skipped.
        if out is None and working is not None and working is not master:
            update(master, working)
        else:
            update(master, None)
            self._publish_weights(tile, master, working)

    @property
    def _updates_on_cpu(self) -> bool:
        return (
            self.state_store.placement.update_device == "cpu"
            and self.state_store.placement.states != "device"
        )

    def _rounding_key(self, tile: Tile) -> RoundingKey | None:
        """Returns the source of random bits for the stochastic rounding of a tile."""
        if tile.weight is None:
            return None
        bucket = tile.bucket
        weight = tile.weight
        if weight not in self._rounding_keys:
            self._rounding_keys[weight] = RoundingKey.for_weight(
                weight.name, bucket.state_shard(weight)
            )
        # The key counts elements of the whole weight, so the bits depend on neither tiles nor grid.
        return self._rounding_keys[weight].at_offset(tile.start - bucket.state_range(weight)[0])

    def _all_gather_weights(self) -> None:
        """Sends the updated working weights of each optimizer shard to all replicas.

        Communicates: all-gather over the replica axis, by bucket.
        """
        pending = []
        for bucket in self.buckets:
            if bucket.replica_axis.size == 1:
                continue
            with self.grid.trace.named_scope(bucket.name):
                bucket.wait_for_update()
                part = bucket.take_optimizer_shard(bucket.storage).to(self.bucket_scheduler.device)
                pending.append((bucket, collectives.all_gather(part, bucket.replica_axis)))
        # Wait only after all gathers are issued, so that they overlap.
        for bucket, values in pending:
            bucket.write_updated_values(0, values.wait())

    # ---- to and from checkpoints ----------------------------------------------------------

    def sharded_state(self) -> ShardedStateDict:
        """Returns this rank's part of master weights and moments, by parameter name.

        8-bit moments are dequantized. States of pruned weights are dense with zeros, plus a mask.
        """
        return {**self._export_states(self.buckets), **self.owner_states()}

    def owner_states(self) -> ShardedStateDict:
        """Returns the states of whole matrices that this rank owns, by parameter name and kind."""
        return {} if self.matrix_update is None else self.matrix_update.owner_states()

    def sparse_state(self) -> tuple[ShardedStateDict, dict[str, CompressedTensor]]:
        """Returns `sharded_state` with pruned weights as kept values and bit masks."""
        state = self._export_states([b for b in self.buckets if b.sparsity_mask is None])
        sparse = {}
        for bucket in self.buckets:
            if bucket.sparsity_mask is None:
                continue
            mask = bucket.sparsity_mask.dense_mask(*bucket.optimizer_shard_bounds).cpu()
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
                    # A meta tensor has the shape and dtype of the dense state, but no memory.
                    dense = torch.empty(size, dtype=values.dtype, device="meta")
                    state[name] = dense, bucket.state_shard(weight)
                    sparse[name] = CompressedTensor(values, bits, size)
        return state, sparse

    def iter_restore_parts(self) -> Iterator[ShardedStateDict]:
        """Yields state tensors to be filled from a checkpoint, one part at a time.

        The first part contains all states that are views. States that are copies (8-bit, pruned)
        follow one bucket at a time, which limits the memory of the copies. A part is read back when
        the next one is requested, the last part by `finish_restore`.
        """
        copied = [bucket for bucket in self.buckets if self._exports_copies(bucket)]
        views = [bucket for bucket in self.buckets if bucket not in copied]
        for some in (views, *([bucket] for bucket in copied)):
            self._import_states()
            state = self._export_states(some)
            if some is views:
                state |= self.owner_states()
            # Masks are not restored here: `prune_weights` sets them before states are loaded.
            yield {name: x for name, x in state.items() if not name.endswith(f".{MASK}")}

    def _exports_copies(self, bucket: Bucket) -> bool:
        """Whether states are exported as copies instead of views."""
        return (
            bucket.sparsity_mask is not None
            or torch.uint8 in self.state_store.state_dtypes[bucket].values()
        )

    def _export_states(self, buckets: Sequence[Bucket]) -> ShardedStateDict:
        # Wait for offloaded states of the last update.
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
        """Returns this rank's states of a weight as stored: 8-bit codes, compressed if pruned."""
        bucket = weight.bucket
        held = {"master": self.master_weights[bucket], **self.state_store.states[bucket]}
        return {kind: flat[slice(*bucket.state_range(weight))] for kind, flat in held.items()}

    def _export_bucket(self, bucket: Bucket) -> StateTensors:
        """Returns the states of a bucket in the saved format; copies are on the host."""
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
            MASK: bucket.sparsity_mask.dense_mask(*bucket.optimizer_shard_bounds)
            .to(torch.uint8)
            .cpu(),
        }

    def _decoded_states(self, bucket: Bucket) -> StateTensors:
        """Returns the states of the optimizer shard `[optimizer_shard_size]`, dequantized."""
        held = {"master": self.master_weights[bucket], **self.state_store.states[bucket]}
        if all(x.dtype != torch.uint8 for x in held.values()):
            return held
        wide = {kind: torch.zeros(bucket.optimizer_shard_size) for kind in ("mean", "square")}
        for tile in self.state_store.tiles[bucket]:
            moments = self._tile_moments(tile).dequantize(torch.float32)
            wide["mean"][tile.as_slice], wide["square"][tile.as_slice] = moments
        return {**held, **wide}

    def _tile_moments(self, tile: Tile) -> Moments:
        held = self.state_store.tile_states(tile)
        return Moments(held["mean"], held["square"], held.get("scales"))

    def _store_states(self, bucket: Bucket, numbers: StateTensors) -> None:
        """Writes values to the states of the optimizer shard, quantized where needed."""
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
        """Writes the exported copies, which a loader has filled, to the states."""
        for bucket, given in self._exported_states.items():
            self._store_states(bucket, {kind: bucket.to_compressed(x) for kind, x in given.items()})
        self._exported_states = {}

    def load_full_state(self, whole: Mapping[str, Tensor], *, steps: int) -> None:
        """Loads this rank's part of a full state, which was saved after `steps` updates.

        Communicates: all-gather of weights over replicas.
        """
        for state in self.iter_restore_parts():
            for name, (part, place) in state.items():
                part.copy_(place.slice_from(whole[name]))
        self.num_updates.fill_(steps)
        self.finish_restore()

    @torch.no_grad()
    def finish_restore(self) -> None:
        """Finishes a restore, after `num_updates` and the tensors of `sharded_state` were filled.

        Working weights are recomputed from the master weights.
        Communicates: all-gather of weights over replicas.
        """
        # The restored master weights count: do not overwrite them with the working weights.
        self._loads = self.bucket_scheduler.load_count
        self.state_store.invalidate_slots()
        self._import_states()
        for bucket in self.buckets:
            size = self.state_placement.tile_elements
            for number, part in enumerate(self.master_weights[bucket].split(size)):
                bucket.write_optimizer_shard(number * size, part)
        self.bucket_scheduler.wait_for_updates()
        self._all_gather_weights()

    # ---- pruning --------------------------------------------------------------------------

    @torch.no_grad()
    def prune_weights(self, choice: MaskFunction, *, keep: bool = True) -> None:
        """Prunes weights and their optimizer states.

        Communicates: the collectives of `pruning.bucket_masks`; mask bits over depth; with `keep`,
        states over replicas.

        Args:
            choice: Returns the mask of each weight.
            keep: Whether to keep the states of the remaining elements; otherwise they are reset.
        """
        if isinstance(self.rule, Muon | Jorge):
            self._refuse_pruning()
        if self.before_update is not None:
            self.before_update()
        self.bucket_scheduler.wait_for_updates()
        self.state_store.synchronize()
        self._exported_states = {}
        self._rounding_keys = {}
        # Free the old states before new ones are allocated, to limit peak memory.
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
        # Drop gradients and gathered weights, which have the old compressed size.
        self.bucket_scheduler.begin_step("")

    def _prune_with_states(self, bucket: Bucket, mask: Tensor | None) -> None:
        """Prunes a bucket and its states."""
        wholes = StateTensors()
        device = self.bucket_scheduler.device
        # A new mask changes the bounds of the optimizer shards, so each state is gathered, made
        # dense and compressed again.
        for kind, part in self._decoded_states(bucket).items():
            with self.grid.trace.named_scope(bucket.name):
                whole = collectives.all_gather(part.to(device), bucket.replica_axis).wait()
            wholes[kind] = whole
            if bucket.sparsity_mask is not None:
                wholes[kind] = whole.new_zeros(bucket.size)
                bucket.sparsity_mask.write_dense(wholes[kind], 0, 0, whole)
        bucket.set_sparsity_mask(mask)
        self.state_store.resize_bucket(
            bucket,
            _state_dtypes(
                bucket, self._moment_names(bucket), self.moment_kind, self.state_placement
            ),
        )
        self._store_states(
            bucket, {kind: bucket.take_optimizer_shard(wholes.pop(kind)) for kind in list(wholes)}
        )


def _state_dtypes(
    bucket: Bucket, names: Sequence[str], moments: MomentKind, home: StatePlacement
) -> dict[str, torch.dtype]:
    """Returns the dtypes of the states of a bucket; fp32 weights on the device need no master."""
    working = bucket.data.dtype
    if working in (torch.bfloat16, torch.float16):
        master = torch.float32
    else:
        master = working
    # Vectors are too small for narrow moments to save much memory.
    if bucket.weights[0].param_group != "vector":
        kind = moments
    else:
        kind = "master"
    # Weights that are offloaded or compressed cannot be updated in place and need a copy.
    away = bucket.host_data is not None or (home.update_device == "cpu" and home.states != "device")
    away = away or bucket.sparsity_mask is not None
    if master != working or away:
        own = {"master": master}
    else:
        own = {}
    return own | dict.fromkeys(names, moment_dtype(kind, master))
