"""Matrix update: the step of a layer-wise distributed optimizer, for Muon and Jorge.

1. Each rank updates the states of its optimizer shards with their gradients.
2. Updates (Muon) or gradients (Jorge) travel to the owners of whole matrices, which orthogonalize
   or precondition them, and the results travel back.
3. Each rank updates the weights of its optimizer shards, as for AdamW.

A step with a non-finite gradient norm changes nothing: it is masked on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket
from ranvier.buckets.matrix_owners import MATRICES, Matrix, MatrixOwners, Piece
from ranvier.comm import collectives
from ranvier.comm.accumulator import Pieces
from ranvier.cost.matrix_optimizers import MuonCost
from ranvier.grid import Grid
from ranvier.optim import jorge, muon
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.low_precision_states import RoundingKey, stochastic_round_bf16
from ranvier.optim.matrix_exchange import MatrixExchange, MatrixStack
from ranvier.optim.rules import Jorge, MatrixRule, Muon
from ranvier.optim.state_store import StateTensors
from ranvier.optim.state_tiles import Tile
from ranvier.sharding import Shard, ShardedStateDict

Work = Sequence[tuple[Bucket, Pieces]]
"""Buckets with values of their optimizer shards."""
PassRule = Callable[[UpdateScalars, Tile, StateTensors, Tensor, Tensor | None], None]
"""An update rule of the scalars of a step, on the device or on the host."""
RunPass = Callable[[Work, PassRule, bool], None]
"""Applies a rule to all tiles of some buckets and waits for it unless it writes new weights, which
the last argument tells."""
MasterUpdate = Callable[[Tensor, Tensor | None], None]
"""Updates master weights in place, and writes them to working weights if these are given."""
UpdateTile = Callable[[MasterUpdate, Tile, StateTensors, Tensor | None], None]
"""Updates the master weights of a tile, and writes its working weights."""
Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")
"""Preconditioners of a tile."""


class MatrixUpdate:
    """Updates hidden matrices by a rule that needs them whole."""

    def __init__(
        self,
        rule: MatrixRule,
        buckets: Sequence[Bucket],
        grid: Grid,
        device: torch.device,
        rounding_key: Callable[[Tile], RoundingKey | None],
    ) -> None:
        """Assigns matrices to their owners, and allocates the states of owners.

        Communicates: creation of a process group.

        Args:
            rule: Muon or Jorge.
            buckets: The buckets with hidden matrices, in the order of the model.
            grid: The grid.
            device: Device of gradients and weights.
            rounding_key: Returns the source of random bits for a tile.
        """
        self.rule, self.buckets, self.grid, self.device = rule, list(buckets), grid, device
        self._rounding_key = rounding_key
        # Weights of 16 bits are updated, and their gradients reduced, in fp32.
        self.dtype = buckets[0].bucket_scheduler.reduce_dtype
        self.message_dtype = rule.message_dtype(self.dtype, device)
        specs = [bucket.spec for bucket in buckets]
        self.owners = MatrixOwners.assign(specs, grid.degrees, rule.cost(self.message_dtype))
        self.exchange = MatrixExchange(self.owners, buckets, grid)
        # Norms are those of whole matrices, of which tiles are parts.
        self.wholes = MatrixOwners.assign(specs, grid.degrees, MuonCost(self.dtype.itemsize))
        if isinstance(rule, Jorge):
            self._whole_pieces = self.wholes.pieces_of_rank(self.exchange.axis.index)
        self._sides: dict[Side, dict[int, Tensor]] = {}
        """Preconditioners of the tiles of this rank by side and weight: `[Σ size²]`, one tile after
        the other."""
        self._side_views: dict[Side, dict[int, Tensor]] = {}
        """Preconditioners by side and number of the tile, as views `[size, size]`."""
        self.has_new_sides = False
        """Whether preconditioners were reset after some updates, so that their update is due."""
        for side in self._side_names:
            self._allocate_sides(side)

    @property
    def _side_names(self) -> tuple[Side, ...]:
        return SIDES if isinstance(self.rule, Jorge) else ()

    def _allocate_sides(self, side: Side) -> None:
        """Creates the first preconditioners of all tiles of this rank."""
        assert isinstance(self.rule, Jorge)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        tiles: dict[int, dict[int, int]] = {}
        for number in self.owners.owned_by(self.exchange.axis.index):
            tile = self.owners.matrices[number]
            tiles.setdefault(tile.weight, {})[number] = _side_size(tile, side)
        self._sides[side], self._side_views[side] = {}, {}
        for weight, sizes in tiles.items():
            flat = like.new_empty(sum(size**2 for size in sizes.values()))
            parts = flat.split([size**2 for size in sizes.values()])
            for (number, size), part in zip(sizes.items(), parts, strict=True):
                view = self._side_views[side][number] = part.view(size, size)
                view.copy_(jorge.initial_side(1, size, eps=self.rule.eps, like=like)[0])
            self._sides[side][weight] = flat

    def owner_states(self) -> ShardedStateDict:
        """Returns the states that only the owner of a matrix has, by parameter name and side.

        `name.left` and `name.right` have the preconditioners of all tiles of a weight, one after
        the other. A rank owns consecutive tiles of a weight.
        """
        found: ShardedStateDict = {}
        me = self.exchange.axis.index
        for side in self._side_names:
            for weight, flat in self._sides[side].items():
                tiles = [
                    (owner, _side_size(tile, side) ** 2)
                    for owner, tile in zip(self.owners.owners, self.owners.matrices, strict=True)
                    if tile.weight == weight
                ]
                start = sum(size for owner, size in tiles if owner < me)
                total = sum(size for _, size in tiles)
                name = self.owners.weights[weight].spec.name
                place = Shard((total,), (start,), (len(flat),), (len(flat),))
                found[f"{name}.{side}"] = flat, place
        return found

    # ---- one step -----------------------------------------------------------------------

    def update(
        self,
        work: Work,
        now: UpdateScalars,
        run_pass: RunPass,
        update_tile: UpdateTile,
        *,
        share: float,
        decay: float,
        states: Mapping[Bucket, StateTensors],
        updates: Callable[[], int],
    ) -> None:
        """Updates all matrices.

        Communicates: two all-to-alls over the ranks of the stage; with Jorge, an all-reduce of
        norms.

        Args:
            work: Gradients of all buckets with matrices.
            now: Scalars of the step.
            run_pass: Applies a rule to all tiles.
            update_tile: Updates the weights of a tile.
            share: Factor of the learning rate.
            decay: Weight decay.
            states: States of all buckets where they are stored.
            updates: Returns the number of updates so far.
        """
        flats = {
            bucket: torch.zeros(
                bucket.optimizer_shard_size, dtype=self.message_dtype, device=self.device
            )
            for bucket, _ in work
        }
        if isinstance(self.rule, Muon):
            run_pass(work, self._muon_momentum_rule(self.rule, flats), False)
            stacks = self.exchange.gather_matrices(flats)
            for stack in stacks:
                stack.values = self.rule.orthogonalize(stack.values)
            self.exchange.scatter_matrices(stacks, flats)
        else:
            run_pass(work, self._jorge_gradient_rule(self.rule, flats), False)
            stacks = self.exchange.gather_matrices(flats)
            # The host waits for the number of updates, so it is read only if it decides.
            interval = self.rule.precondition_interval
            due = interval == 1 or self.has_new_sides or updates() % interval == 0
            for stack in stacks:
                self._precondition(self.rule, stack, now, due=due)
            if self.has_new_sides:
                self.has_new_sides = not bool(now.should_update)
            self.exchange.scatter_matrices(stacks, flats)
            run_pass(_as_work(flats), self._jorge_momentum_rule(self.rule), False)
            self._graft(self.rule, flats, states)
            # Decay as strong as that of SGD, whose decay is a part of the gradient.
            decay = decay / (1.0 - self.rule.momentum)
        del stacks

        def weight_rule(
            now: UpdateScalars,
            tile: Tile,
            held: StateTensors,
            direction: Tensor,
            out: Tensor | None,
        ) -> None:
            def update(master: Tensor, working: Tensor | None) -> None:
                for part, ratio in self._lr_ratios(tile):
                    muon.apply_update(
                        master[part],
                        direction[part],
                        now=now,
                        share=share,
                        ratio=ratio,
                        decay=decay,
                        out=None if working is None else working[part],
                    )

            update_tile(update, tile, held, out)

        run_pass(_as_work(flats), weight_rule, True)

    def _lr_ratios(self, tile: Tile) -> Iterator[tuple[slice, float]]:
        """Yields the parts of a tile with the factors of their learning rates."""
        bucket = tile.bucket
        last = 0
        for weight, param in zip(bucket.weights, bucket.spec.params, strict=True):
            start, stop = (
                min(max(edge, tile.start), tile.stop) - tile.start
                for edge in bucket.dense_state_range(weight)
            )
            ratio = 1.0
            if isinstance(self.rule, Muon):
                assert param.matrix_dims is not None, weight.name
                rows, cols = (param.sharding.shape[dim] for dim in param.matrix_dims)
                ratio = muon.lr_ratio(rows, cols, self.rule.adjust_lr)
            if start < stop:
                yield slice(start, stop), ratio
                last = stop
        # The flat buffer is padded at its end.
        if last < tile.stop - tile.start:
            yield slice(last, tile.stop - tile.start), 1.0

    def _scaled_grad(self, now: UpdateScalars, grad: Tensor) -> Tensor:
        grad = grad.to(self.dtype)
        return grad if now.grad_factor is None else grad * now.grad_factor.to(self.dtype)

    def _store_state(self, now: UpdateScalars, tile: Tile, state: Tensor, new: Tensor) -> None:
        """Stores a new state, stochastically rounded if its dtype is narrower."""
        if state.dtype != new.dtype:
            key = self._rounding_key(tile)
            assert key is not None, f"stochastic rounding of {state.dtype} needs a key"
            new = stochastic_round_bf16(new, key.random_bits(now.step, new.numel()) >> 16)
        # A select instead of a branch, which would synchronize with the host.
        state.copy_(torch.where(now.should_update, new, state))

    # ---- Muon ---------------------------------------------------------------------------

    def _muon_momentum_rule(self, rule: Muon, flats: Mapping[Bucket, Tensor]) -> PassRule:
        """Returns the rule that updates momentum, and writes what is to be orthogonalized."""

        def apply(
            now: UpdateScalars, tile: Tile, held: StateTensors, grad: Tensor, _: Tensor | None
        ) -> None:
            mean = held["mean"]
            out = flats[tile.bucket][tile.as_slice]
            if mean.dtype == self.dtype and mean.device == out.device:
                muon.apply_momentum(
                    mean, grad, out, now=now, beta=rule.momentum, nesterov=rule.nesterov
                )
                return
            new, update = muon.momentum_update(
                mean.to(self.dtype),
                self._scaled_grad(now, grad),
                beta=rule.momentum,
                nesterov=rule.nesterov,
            )
            out.copy_(update)
            self._store_state(now, tile, mean, new)

        return apply

    # ---- Jorge --------------------------------------------------------------------------

    def _jorge_gradient_rule(self, rule: Jorge, flats: Mapping[Bucket, Tensor]) -> PassRule:
        """Returns the rule that updates the momentum of SGD, and writes gradients."""

        def apply(
            now: UpdateScalars, tile: Tile, held: StateTensors, grad: Tensor, _: Tensor | None
        ) -> None:
            grad = self._scaled_grad(now, grad)
            flats[tile.bucket][tile.as_slice].copy_(grad)
            momentum = held["momentum"]
            self._store_state(
                now, tile, momentum, momentum.to(self.dtype).mul(rule.momentum).add_(grad)
            )

        return apply

    def _jorge_momentum_rule(self, rule: Jorge) -> PassRule:
        """Returns the rule that updates the momentum of preconditioned gradients."""

        def apply(
            now: UpdateScalars, tile: Tile, held: StateTensors, grad: Tensor, _: Tensor | None
        ) -> None:
            momentum = held["preconditioned"]
            new = momentum.to(self.dtype).mul(rule.momentum)
            new.add_(grad, alpha=1.0 - rule.momentum)
            self._store_state(now, tile, momentum, new)

        return apply

    def _precondition(
        self, rule: Jorge, stack: MatrixStack, now: UpdateScalars, *, due: bool
    ) -> None:
        """Updates the sides of the tiles of a stack, if that is due, and applies them."""
        grad = stack.values
        stacked = []
        for side in SIDES:
            views = [self._side_views[side][number] for number in stack.numbers]
            matrices = torch.stack(views)
            if due:
                new = jorge.precondition_update(
                    matrices, jorge.statistics(grad, side), symmetric=rule.symmetric
                )
                matrices = torch.where(now.should_update, new, matrices)
                torch._foreach_copy_(views, list(matrices.unbind()))
            stacked.append(matrices)
        stack.values = jorge.precondition(stacked[0], grad, stacked[1])

    def _graft(
        self, rule: Jorge, flats: Mapping[Bucket, Tensor], states: Mapping[Bucket, StateTensors]
    ) -> None:
        """Writes the momentum of preconditioned gradients, with the norms of that of SGD.

        Communicates: all-reduce of two numbers per matrix over the ranks of the stage.
        """
        if not rule.grafting:
            for bucket, flat in flats.items():
                flat.copy_(states[bucket]["preconditioned"])
            return
        me = self.exchange.axis.index
        squares = torch.zeros(2, len(self.wholes.matrices), dtype=self.dtype, device=self.device)
        for piece in self._whole_pieces:
            if self.wholes.is_sent_by(piece, me):
                for i, kind in enumerate(("preconditioned", "momentum")):
                    part = self._state_view(states, kind, piece).to(self.dtype)
                    squares[i, piece.matrix] += part.square().sum().to(self.device)
        with self.grid.trace.named_scope(MATRICES):
            squares = collectives.all_reduce(squares, self.exchange.axis).wait()
        norm, sgd_norm = squares.sqrt()
        factors = sgd_norm / (norm + jorge.GRAFT_EPS)
        for piece in self._whole_pieces:
            part = self._state_view(states, "preconditioned", piece).to(self.device, self.dtype)
            self.exchange.shard_view(flats, piece).copy_(part * factors[piece.matrix])

    def _state_view(self, states: Mapping[Bucket, StateTensors], kind: str, piece: Piece) -> Tensor:
        """Returns a piece of a state of this rank."""
        bucket, _ = self.exchange.weights[piece.weight]
        return self.exchange.shard_view({bucket: states[bucket][kind]}, piece)


def _side_size(tile: Matrix, side: Side) -> int:
    return tile.rows if side == "left" else tile.cols


def _as_work(flats: Mapping[Bucket, Tensor]) -> Work:
    """Returns values of whole optimizer shards as the work of a pass."""
    return [(bucket, [(0, flat)]) for bucket, flat in flats.items()]
