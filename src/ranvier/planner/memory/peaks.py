"""Memory peaks: the points of a step with most memory in addition to weights and states.

A stage runs jobs (`pipeline.memory_replay`): each is a pass over a chunk of its blocks, while other
micro-batches in flight keep their saved activations. Within a job the peak is one of

    in the loss       while logits are computed and all activations are saved
    after the loss    while the gradient of the head is accumulated
    in a block        while the last, or the first, runs backward
                      (`activations.BlockActivations.moments_of_mode`)
    at the end        while the embedding's gradient is computed
    deferred          while deferred weight gradients are computed

and once, at the end of a step, the optimizer step; if it updates offloaded states, it continues in
the next forward pass. A single stage is plain gradient accumulation.

Gradients are computed in the dtype of the weights and are widened to 32 bits as soon as they are
accumulated or reduced. Over depth a block's gradients wait unsharded, in 32 bits, for their
reduce-scatter; both the input and the output of the previous bucket's reduce-scatter stay allocated
until it is waited for. The weights of the current and the next block are gathered.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Literal, NamedTuple

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.pipeline.memory_replay import (
    ALL_PASSES,
    SEVERAL_PASSES,
    JobSnapshot,
    SnapshotGroups,
    one_f_one_b_snapshots,
    peak_snapshots,
)
from ranvier.pipeline.policy import FixedSchedule, MessageDrivenPolicy, PipelineShape
from ranvier.planner.comm_volume import ShardingKey, StageBlocks, pipeline_policy
from ranvier.planner.memory.activations import LossMemory, loss_memory, stream_bytes
from ranvier.planner.memory.chunks import (
    BlockBackwardMemory,
    ChunkMemory,
    MemoryOptions,
    build_chunks,
    find_head,
)
from ranvier.planner.memory.model_states import StageModelStates
from ranvier.planner.model_spec import ModelSpec

ReducedGrads = Literal["head", "table", "places", "block", ""]
"""Whose gradients are in a reduction over depth."""


class PeakUsage(NamedTuple):
    """Bytes in use at one point of a step, in addition to weights and states."""

    where: str
    gradients: int
    activations: int
    gathered_weights: int = 0
    logits: int = 0
    communication: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all categories."""
        return sum(self[1:])


@dataclass(frozen=True)
class StageMemory:
    """Data that all jobs of a stage share."""

    model_states: StageModelStates
    chunk_groups: tuple[int, ...]
    """The group of each chunk; equal chunks share one."""
    chunks: tuple[ChunkMemory, ...]
    """One chunk of each group."""
    plan: Plan
    stream_bytes: int
    vocab_row_bytes: int
    """Embedding rows of the tokens of all micro-batches, if the vocabulary is split over pipe."""
    vocab_over_pipe: bool
    """Whether all stages share the vocabulary: each computes its part of the loss early."""
    splits_weight_grads: bool
    """Whether weight gradients are computed in separate jobs (W passes)."""
    head: LossMemory | None
    """The LM head, if it is on this stage."""
    in_chunks: bool
    """Whether blocks run in chunks of tokens; otherwise their MLP needs more than any norm."""

    @cached_property
    def grad_bytes_by_pass(self) -> tuple[tuple[int, int, int], ...]:
        """Gradient bytes of a chunk of each group after 1, SEVERAL and ALL passes."""
        sizes = (one.grad_elements for one in self.chunks)
        return tuple(
            (
                self.grad_bytes(n, 1),
                self.grad_bytes(n, SEVERAL_PASSES),
                self.grad_bytes(n, ALL_PASSES),
            )
            for n in sizes
        )

    @property
    def depth(self) -> int:
        """Ranks over which gradients of depth-sharded weights are scattered."""
        return self.plan.gather_ranks

    @cached_property
    def has_several_passes(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.plan.num_micro_batches > 1

    @cached_property
    def worst_moments(self) -> dict[BlockBackwardMemory, tuple[int, int, int]]:
        """Bytes at a block's peak in addition to saved activations, of gradients, and of
        unsharded ones.
        """
        own = self.model_states
        found = dict[BlockBackwardMemory, tuple[int, int, int]]()
        # Gradients count per matrix only if they are computed here and stay in the weights' dtype.
        # Depth-sharded ones are in an unsharded 32-bit buffer; deferred ones are computed in W
        # passes.
        if own.is_split or self.splits_weight_grads:
            each = 0
        else:
            each = own.itemsize
        for place in (place for one in self.chunks for place in one.block_memories):
            # The unsharded buffer is allocated with the first weight gradient of the block.
            if own.is_split and not self.splits_weight_grads:
                full = place.gathered_grad_bytes
            else:
                full = 0
            if self.splits_weight_grads:
                moments = (*place.worst_moments, place.deferred_moment)
            else:
                moments = place.worst_moments
            sizes = [(size, each * n, full * (n > 0)) for size, n in moments]
            found[place] = max(sizes, key=sum)
        return found

    @cached_property
    def edge_chunks(self) -> tuple[tuple[int, ChunkMemory], ...]:
        """Groups whose chunk contains the embedding or the head."""
        return tuple(
            (i, one) for i, one in enumerate(self.chunks) if one.has_embedding or one.has_head
        )

    @cached_property
    def reduces_early(self) -> bool:
        """Whether reductions over replicas start in the last pass."""
        return self.model_states.grad_replicas > 1.0 and not (
            self.splits_weight_grads and len(self.chunk_groups) > 1
        )

    def waiting_bytes(self, turn: JobSnapshot) -> int:
        """Returns the bytes saved by other micro-batches in flight while a job runs."""
        found = self.vocab_row_bytes
        for one, held, late in zip(
            self.chunks, turn.held_by_group, turn.pending_weight_grads, strict=True
        ):
            found += held * one.saved_bytes + late * one.deferred_bytes
        return found

    def grad_bytes(self, elements: int, made: int) -> int:
        """Returns the gradient bytes of `elements` elements of blocks after `made` passes."""
        own = self.model_states
        narrow = elements * own.itemsize
        wide = elements * own.wide_itemsize
        if made == 0:
            return 0
        if made == ALL_PASSES and self.reduces_early:
            # Both the input and the output shard stay allocated until the reduction is waited for.
            return wide + round(wide / own.grad_replicas)
        several = made == SEVERAL_PASSES or (made == ALL_PASSES and self.has_several_passes)
        # A first pass leaves gradients in the weights' dtype; accumulation and depth widen them.
        if own.is_split or several:
            return wide
        return narrow

    def final_grad_bytes(self, elements: int) -> int:
        """Returns the bytes of the gradients of `elements` elements in the optimizer step."""
        own = self.model_states
        # Without any reduction or accumulation gradients are still in the dtype of the weights.
        if own.grad_replicas > 1.0 or own.is_split or self.has_several_passes:
            return round(elements * own.wide_itemsize / own.grad_replicas)
        return elements * own.itemsize

    def grad_growth(self, turn: JobSnapshot, elements: int) -> int:
        """Returns how much the gradients of the job's own chunk grow in it."""
        after = self.grad_bytes(
            elements, ALL_PASSES if turn.is_last else min(turn.passes_before + 1, SEVERAL_PASSES)
        )
        return after - self.grad_bytes(elements, turn.passes_before)

    def outside_grad_bytes(self, turn: JobSnapshot) -> int:
        """Returns the gradient bytes outside of blocks from earlier passes."""
        if not (self.edge_chunks or self.vocab_over_pipe):
            return 0
        own = self.model_states
        found = 0
        moving = self.reducing_grads(turn)
        # A gradient that is being reduced is counted as communication unless an earlier pass has
        # left an accumulated one. A single pass has no such gradient.
        if self.has_several_passes:
            several = 2
        else:
            several = ALL_PASSES + 1
        # Tied embeddings split over pipe have a single gradient, counted with the head below.
        both = self.vocab_over_pipe and own.has_tied_embeddings
        for group, one in self.edge_chunks:
            made = turn.backward_passes[group]
            if made == ALL_PASSES and self.reduces_early:
                reduced = 1.0 / own.grad_replicas
            else:
                reduced = 0.0
            if (
                made
                and one.has_head
                and not self.vocab_over_pipe
                and (moving != "head" or made >= several)
            ):
                found += round(own.local_head_elements * own.wide_itemsize * (1.0 + reduced))
            if made and one.has_embedding and not both and (moving != "table" or made >= several):
                # Widened by a reduction, by accumulation, or by adding the head's gradient.
                wide = own.is_split or made > 1 or (own.has_tied_embeddings and one.has_head)
                each = own.wide_itemsize * (1.0 + reduced) if wide else own.itemsize
                found += round(own.local_embedding_elements * each)
        rest = own.outside_elements - own.local_head_elements - own.local_embedding_elements
        if self.vocab_over_pipe and turn.num_scored > (moving == "head" and turn.kind == "F"):
            found += self.head_grad_elements * own.wide_itemsize
        return found + rest * own.wide_itemsize * self.has_outside_grads(turn)

    @property
    def head_grad_elements(self) -> int:
        """Elements of the head's gradient on this rank; if tied, of the embedding's."""
        if self.model_states.has_tied_embeddings:
            return self.model_states.local_embedding_elements
        return self.model_states.local_head_elements

    def accumulated_grad_bytes(self, turn: JobSnapshot) -> int:
        """Returns the gradient bytes from earlier passes."""
        found = self.outside_grad_bytes(turn)
        for sizes, counts in zip(self.grad_bytes_by_pass, turn.grad_levels, strict=True):
            found += sum(map(mul, sizes, counts))
        if (
            turn.last_grad_job is not None
            and turn.last_grad_job[2]
            and self.reducing_grads(turn) == "block"
        ):
            # It is in a reduction and counted as communication.
            found -= self.chunks[turn.last_grad_job[1]].first_grad_bytes // self.depth
        return found

    def reduction_bytes(self, full: int) -> int:
        """Returns the bytes of a reduce-scatter over depth: `full` input bytes and its output
        shard.
        """
        return full + full // self.depth

    def reducing_grads(self, turn: JobSnapshot) -> ReducedGrads:
        """Returns whose gradients, the last ones computed before a job, are in a reduction over
        depth.
        """
        own = self.model_states
        # With the vocabulary split over pipe, every stage computes head gradients in forward jobs.
        if self.vocab_over_pipe and own.is_split and not own.late_grad_bytes:
            first = turn.kind == "F" and turn.last_grad_job is None
            if turn.kind == "B" or (first and turn.num_scored):
                return "head"
        if not own.is_split or turn.last_grad_job is None:
            return ""
        kind, at, _ = turn.last_grad_job
        before = self.chunks[at]
        # A B job produces weight gradients of blocks only if they are not deferred to W jobs.
        whole = kind == "W" or not self.splits_weight_grads
        if before.has_embedding and own.embedding_elements and kind == "B":
            # Late (tied) gradients are reduced at the end of the step: positions remain.
            if own.late_grad_bytes:
                return "places"
            return "table"
        if before.num_blocks and whole:
            return "block"
        if own.late_grad_bytes or not before.has_head:
            return ""
        return "head"

    def last_reduction_bytes(self, turn: JobSnapshot) -> int:
        """Returns the bytes of the last reduce-scatter of the previous job."""
        own = self.model_states
        if turn.last_grad_job:
            block = self.chunks[turn.last_grad_job[1]].first_grad_bytes
        else:
            block = 0
        elements = {
            "head": own.head_elements,
            "table": own.embedding_elements,
            "places": own.position_elements,
        }
        moving = self.reducing_grads(turn)
        return self.reduction_bytes(
            block if moving == "block" else elements.get(moving, 0) * own.wide_itemsize
        )

    def embedding_gather_bytes(self, turn: JobSnapshot) -> int:
        """Returns the bytes of the embedding, prefetched for a forward pass that follows."""
        if self.model_states.is_split and turn.embedding_follows:
            return self.model_states.embedding_elements * self.model_states.itemsize
        return 0

    def is_last_backward(self, turn: JobSnapshot) -> bool:
        """Returns whether no block follows this job, so that nothing needs to be prefetched."""
        return turn.is_last and not (
            turn.previous_chunk_group is not None
            and self.chunks[turn.previous_chunk_group].block_memories
        )

    def late_grad_bytes(self, turn: JobSnapshot) -> int:
        """Returns the bytes of unsharded gradients that are kept until the end of the step."""
        made = turn.vocab_backward_begun or (self.vocab_over_pipe and turn.num_scored > 0)
        if made:
            return self.model_states.late_grad_bytes
        return 0

    def has_outside_grads(self, turn: JobSnapshot) -> bool:
        """Returns whether gradients outside of blocks have been produced."""
        return any(turn.backward_passes[group] for group, _ in self.edge_chunks)


class TurnMemory(NamedTuple):
    """A job of a stage, and the other memory in use during it."""

    turn: JobSnapshot
    waiting_bytes: int
    """Saved bytes of other micro-batches in flight."""
    grad_bytes: int
    """Gradient bytes from earlier passes."""
    chunk: ChunkMemory


def find_peaks(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    spot: ShardingKey,
    firsts: tuple[int, ...],
    stage: StageBlocks,
    own: StageModelStates,
    how: MemoryOptions,
) -> list[PeakUsage]:
    """Returns the candidate memory peaks of a stage. firsts: as returned by `find_stage_starts`."""
    load = _build_stage_memory(model, plan, flow, spot.activation_key, firsts, stage, own, how)
    found = [*_update_peaks(load)]
    if load.vocab_over_pipe and not any(one.has_embedding for one in load.chunks):
        found += _spread_embedding_peaks(load)
    turns = _stage_turns(model, flow.seq, stage, load, how.simulates_schedule)
    if not how.counts_in_flight:
        turns = tuple(tuple(map(_without_others, alike)) for alike in turns)
    for now in _fullest_turns(load, turns):
        kind = now.turn.kind
        if load.vocab_over_pipe:
            scores = now.turn.group == load.chunk_groups[-1]
        else:
            scores = now.chunk.has_head
        if kind == "F" and load.head is not None and scores:
            found.append(_peak_in_loss(load, now, load.head, flow))
            found += (
                [_peak_after_spread_loss(load, now)]
                if load.vocab_over_pipe and own.head_elements
                else []
            )
        elif kind == "B":
            found += _backward_peaks(load, now)
        elif kind == "W":
            found += _deferred_grad_peaks(load, now)
    if how.update_continues:
        found += _next_forward_peaks(load)
    # Weights that stay gathered are in memory until the optimizer step.
    if plan.reshard_after == "step":
        found = [
            one._replace(gathered_weights=max(one.gathered_weights, own.gathered_bytes))
            if one.where != IN_UPDATE
            else one
            for one in found
        ]
    return found


def _without_others(turn: JobSnapshot) -> JobSnapshot:
    """Returns a job of a stage that holds no other micro-batch."""
    none = (0,) * len(turn.held_by_group)
    return turn._replace(held_by_group=none, pending_weight_grads=none)


def _fullest_turns(load: StageMemory, kinds: SnapshotGroups) -> Iterator[TurnMemory]:
    """Yields, of jobs that differ only in the other memory in use, the one with most."""
    for alike in kinds:
        first = alike[0]
        # A forward job has its peak in the loss.
        if first.kind == "F" and load.head is None:
            continue
        much = [(load.waiting_bytes(turn), load.accumulated_grad_bytes(turn)) for turn in alike]
        if len(alike) > 1:
            at = max(range(len(alike)), key=lambda i: sum(much[i]))
        else:
            at = 0
        yield TurnMemory(alike[at], *much[at], load.chunks[first.group])


def with_weights_on_host(
    own: StageModelStates, peaks: Iterable[PeakUsage], *, depth: int, num_blocks: int
) -> tuple[PeakUsage, ...]:
    """Returns the peaks of a stage of `num_blocks` blocks with weights and gradients on the host.

    The device has the weights of the current and the next block, the gradients that are being
    accumulated, and those in transfer to the host: at most of two blocks and one outer layer.
    """
    block = max((one.shard_bytes for _, one in own.by_block), default=0)
    grads = max((one.grad_elements for _, one in own.by_block), default=0)
    pair = min(2, num_blocks) * block
    in_loss = max(pair, block + own.head_elements * own.itemsize // depth)
    outside = own.local_head_elements + own.local_embedding_elements
    resident = own.outside_elements - outside
    # Tied weights stay on the device, and so do their gradients.
    if not own.has_tied_embeddings:
        outside = max(own.local_head_elements, own.local_embedding_elements)
    most = (2 * grads + outside + resident) * own.wide_itemsize
    return tuple(
        one._replace(
            gradients=min(one.gradients, most),
            gathered_weights=one.gathered_weights + (in_loss if one.where == IN_LOSS else pair),
        )
        for one in peaks
    )


IN_UPDATE = "in the optimizer step"
IN_LOSS = "in the loss"
IN_NEXT_FORWARD = "in the next forward pass, while gradients wait for their update"


def _stage_turns(
    model: ModelSpec, seq: int, stage: StageBlocks, load: StageMemory, simulated: bool
) -> SnapshotGroups:
    """Returns snapshots of the jobs of a stage: simulated, or of 1F1B in closed form."""
    plan = load.plan
    index = stage.stage_spec.index
    groups = load.chunk_groups
    moves = load.model_states.is_split
    if plan.pipe == 1 or not simulated:
        return one_f_one_b_snapshots(
            plan.pipe, plan.num_micro_batches, plan.virtual_stages, index, groups, moves
        )
    policy = pipeline_policy(model, plan, seq)
    assert isinstance(policy, MessageDrivenPolicy | FixedSchedule), policy
    shape = PipelineShape(
        plan.pipe, plan.num_micro_batches, plan.virtual_stages, policy.split_backward
    )
    return peak_snapshots(policy, shape, index, groups, moves)


def _build_stage_memory(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    inside: ShardingKey,
    firsts: tuple[int, ...],
    stage: StageBlocks,
    own: StageModelStates,
    how: MemoryOptions,
) -> StageMemory:
    stream = stream_bytes(model, inside, flow)
    # Without a pipeline there is nothing to split the vocabulary over.
    spread = plan.vocab_over_pipe and plan.pipe > 1
    groups, chunks = build_chunks(model, stage, firsts, inside, flow, plan, own, how)
    scores = find_head(model, stage.blocks, inside)
    return StageMemory(
        own,
        groups,
        chunks,
        plan,
        stream,
        vocab_row_bytes=plan.num_micro_batches * stream if spread else 0,
        vocab_over_pipe=spread,
        splits_weight_grads=plan.pipe > 1
        and how.simulates_schedule
        and pipeline_policy(model, plan, flow.seq).split_backward,
        head=None
        if scores is None
        else loss_memory(scores, flow, own.head_elements * own.wide_itemsize),
        in_chunks=plan.chunk_of_samples(flow.samples * model.streams, flow.seq) > 0,
    )


def _peak_in_loss(
    load: StageMemory, now: TurnMemory, head: LossMemory, flow: ActivationShape
) -> PeakUsage:
    """Returns the peak while logits are computed.

    In addition to the head's weights, the next weights are gathered: of a block, or the head's
    again.
    """
    own = load.model_states
    one = now.chunk
    turn = now.turn
    mine = own.head_elements * own.itemsize
    once = turn.is_last or load.plan.reshard_after == "step"
    if own.is_split:
        near = mine + (own.gathered_block_bytes or mine * (not once))
    else:
        near = 0
    acts = now.waiting_bytes + head.hidden_bytes + head.peak_bytes
    if load.vocab_over_pipe:
        acts += one.saved_bytes + load.stream_bytes
    else:
        # The two wide tensors are the input and the normalized output that the last norm saves.
        acts += (
            one.block_bytes
            + one.input_bytes
            + load.stream_bytes * (2 + 2 * own.wide_itemsize // flow.itemsize)
        )
    moving = load.last_reduction_bytes(turn) + load.late_grad_bytes(turn)
    return PeakUsage(IN_LOSS, now.grad_bytes, acts, near, head.logit_bytes, moving)


def _backward_peaks(load: StageMemory, now: TurnMemory) -> Iterator[PeakUsage]:
    """Yields the peaks while a chunk runs backward."""
    one = now.chunk
    if one.has_head and load.model_states.head_elements and not load.vocab_over_pipe:
        yield _peak_after_loss(load, now)
        if load.in_chunks:
            yield _peak_in_last_norm(load, now)
    yield from (_peak_in_block(load, now, place) for place in one.block_memories)
    if load.splits_weight_grads and one.block_memories:
        yield _peak_after_blocks(load, now)
    if one.has_embedding:
        yield _peak_in_embedding(load, now)


def _peak_after_loss(load: StageMemory, now: TurnMemory) -> PeakUsage:
    """Returns the peak while the head's gradient is added to earlier ones."""
    own = load.model_states
    one = now.chunk
    turn = now.turn
    made = own.head_elements * own.wide_itemsize
    grads = now.grad_bytes
    acts = now.waiting_bytes + one.saved_bytes + load.stream_bytes
    if not own.is_split:
        grads += made if turn.own_backward_passes else 0
        return PeakUsage("after the loss", grads, acts)
    # Without a pipeline the gathered head is still in memory when backward starts.
    if load.plan.pipe == 1:
        mine = own.head_elements * own.itemsize
    else:
        mine = 0
    full = (
        max(made, own.late_grad_bytes)
        + made * own.pads_vocab_grads
        + load.last_reduction_bytes(turn)
    )
    return PeakUsage("after the loss", grads, acts, own.gathered_block_bytes + mine, 0, full)


def _peak_in_last_norm(load: StageMemory, now: TurnMemory) -> PeakUsage:
    """Returns the peak in the backward pass of the norm before the head, which is not in chunks.

    In addition to its saved input and result, the gradient and both products with it are in
    fp32.
    """
    after = _peak_after_loss(load, now)
    wide = load.model_states.wide_itemsize // load.model_states.itemsize
    more = (3 * wide - 2) * load.stream_bytes
    return after._replace(
        where="in the backward pass of the last norm", activations=after.activations + more
    )


def _peak_after_spread_loss(load: StageMemory, now: TurnMemory) -> PeakUsage:
    """Returns the peak while the gradient of a head split over pipe is accumulated, after its
    loss.
    """
    own = load.model_states
    one = now.chunk
    turn = now.turn
    made = own.head_elements * own.wide_itemsize
    grads = now.grad_bytes
    acts = now.waiting_bytes + one.saved_bytes + load.stream_bytes + made
    if not own.is_split:
        return PeakUsage("after the loss", grads + made * (turn.num_scored > 0), acts)
    full = (
        max(made, own.late_grad_bytes)
        + made * own.pads_vocab_grads
        + load.last_reduction_bytes(turn)
    )
    near = own.head_elements * own.itemsize + own.gathered_block_bytes
    return PeakUsage("after the loss", grads, acts, near, 0, full)


def _peak_in_block(load: StageMemory, now: TurnMemory, place: BlockBackwardMemory) -> PeakUsage:
    """Returns the peak while a block of a chunk runs backward."""
    own = load.model_states
    one = now.chunk
    turn = now.turn
    # The head's gradient is computed in forward: it is in memory, or still in a reduction.
    leaves = one.has_head and not load.vocab_over_pipe
    new = leaves and not turn.own_backward_passes
    if leaves:
        head = own.head_elements * own.wide_itemsize
    else:
        head = 0
    needed, made, full = load.worst_moments[place]
    acts = (
        now.waiting_bytes
        + place.saved_bytes
        + place.recomputed_bytes
        + needed
        + 2 * load.stream_bytes
        + one.input_bytes
    )
    grads = now.grad_bytes + made
    near = place.gathered_bytes
    # Inputs of deferred weight gradients replace the saved activations of finished blocks.
    if load.splits_weight_grads:
        acts += place.deferred_bytes
    else:
        grads += load.grad_growth(turn, place.finished_grad_elements)
    if not own.is_split:
        return PeakUsage(place.where, grads + head * new, acts)
    moving = max(load.late_grad_bytes(turn), own.late_grad_bytes * new)
    # The previous reduce-scatter belongs to the following block; for the last block of a chunk, to
    # the head or to the previous job.
    if load.splits_weight_grads or place.previous_grad_bytes is None:
        moving += (
            load.reduction_bytes(head)
            if head and not own.late_grad_bytes
            else load.last_reduction_bytes(turn)
        )
    else:
        moving += load.reduction_bytes(place.previous_grad_bytes)
        grads += own.local_head_elements * own.wide_itemsize * new
    moving += full
    # Prefetch: the block before, or for the first block the embedding of the next forward pass.
    if place.is_first and one.has_embedding:
        near += max(place.next_gathered_bytes, load.embedding_gather_bytes(turn))
    elif not (place.is_first and load.is_last_backward(turn)):
        near += place.next_gathered_bytes
    return PeakUsage(place.where, grads, acts, near, 0, moving)


def _peak_after_blocks(load: StageMemory, now: TurnMemory) -> PeakUsage:
    """Returns the peak at the end of a chunk whose weight gradients are deferred."""
    one = now.chunk
    first = now.chunk.block_memories[-1]
    acts = (
        now.waiting_bytes
        + one.deferred_bytes
        + first.entry_bytes
        + 2 * load.stream_bytes
        + one.input_bytes
    )
    # Gradients and communication are the same as for the first block; only activations differ.
    there = _peak_in_block(load, now, first)
    return there._replace(where="after the first block", activations=acts)


def _embedding_grad_bytes(load: StageMemory, back: int, tied: bool) -> int:
    """Returns the bytes of the embedding's gradient while it is added to `back` earlier ones.

    tied: the head's gradient is already in memory.
    """
    own = load.model_states
    if own.is_split:
        # The computed gradient, perhaps a padded copy, and the 32-bit reduction input. Late
        # gradients already have their buffer.
        table = own.embedding_elements * (
            own.itemsize * (2 if own.pads_vocab_grads else 1) + own.wide_itemsize
        )
        return max(table - own.late_grad_bytes * (own.embedding_elements > 0), 0)
    # The new gradient; the sum; and the earlier gradient, which the second pass widens.
    if back or tied:
        more = own.wide_itemsize
    else:
        more = 0
    widened = back > 0 and not tied and own.itemsize < own.wide_itemsize
    more += (own.wide_itemsize if back == 1 else own.itemsize) * widened
    return own.embedding_elements * (own.itemsize + more)


def _peak_in_embedding(load: StageMemory, now: TurnMemory) -> PeakUsage:
    """Returns the peak while the embedding's gradient is computed."""
    own = load.model_states
    one = now.chunk
    turn = now.turn
    grads = now.grad_bytes
    if not load.splits_weight_grads:
        grads += load.grad_growth(turn, one.grad_elements)
    grads += _embedding_grad_bytes(
        load,
        turn.own_backward_passes,
        own.has_tied_embeddings and (one.has_head or load.vocab_over_pipe),
    )
    # dy of all tokens is gathered over row.
    rows = load.plan.row * load.stream_bytes * (load.plan.row > 1)
    acts = (
        now.waiting_bytes
        + 2 * load.stream_bytes
        + rows
        + (one.deferred_bytes if load.splits_weight_grads else 0)
    )
    if load.splits_weight_grads:
        before = load.last_reduction_bytes(turn)
    else:
        before = load.reduction_bytes(one.first_grad_bytes)
    if own.is_split:
        moving = before + own.late_grad_bytes + own.position_elements * own.wide_itemsize
    else:
        moving = 0
    near = own.gathered_block_bytes + load.embedding_gather_bytes(turn)
    return PeakUsage("at the end of backward", grads, acts, near, 0, moving)


def _spread_embedding_peaks(load: StageMemory) -> Iterator[PeakUsage]:
    """Yields the peaks at the end of a step of stages other than the first, if the embedding is
    split over pipe: its gradients are computed there after all backward passes.
    """
    own = load.model_states
    count = load.plan.num_micro_batches
    grads = (
        sum(load.grad_bytes_by_pass[group][-1] for group in load.chunk_groups)
        + load.head_grad_elements * own.wide_itemsize
    )
    # After SEVERAL passes the memory no longer changes, so later ones are not checked.
    for back in range(min(count, SEVERAL_PASSES + 1)):
        table = _embedding_grad_bytes(load, back, own.has_tied_embeddings)
        if not own.has_tied_embeddings and back > own.is_split:
            wide = own.is_split or back > 1
            table += own.local_embedding_elements * (own.wide_itemsize if wide else own.itemsize)
        acts = (count - back + 3) * load.stream_bytes
        if back:
            behind = own.embedding_elements * own.wide_itemsize
        else:
            behind = load.chunks[load.chunk_groups[0]].first_grad_bytes
        moving = own.late_grad_bytes + (
            0 if own.has_tied_embeddings else load.reduction_bytes(behind) * own.is_split
        )
        yield PeakUsage("at the end of backward", grads + table, acts, 0, 0, moving)


def _deferred_grad_peaks(load: StageMemory, now: TurnMemory) -> Iterator[PeakUsage]:
    """Yields the peaks while deferred weight gradients are computed, whose inputs stay until the
    job ends.
    """
    own = load.model_states
    one = now.chunk
    turn = now.turn
    grads = now.grad_bytes + load.grad_growth(turn, one.grad_elements)
    acts = now.waiting_bytes + one.deferred_bytes
    late = load.late_grad_bytes(turn)
    if own.is_split and one.block_memories:
        begun = one.block_memories[0].gathered_grad_bytes + load.last_reduction_bytes(turn) + late
    else:
        begun = 0
    yield PeakUsage("in the deferred weight gradients", now.grad_bytes, acts, 0, 0, begun)
    if own.is_split:
        ended = one.reducing_bytes + late
    else:
        ended = 0
    yield PeakUsage("in the deferred weight gradients", grads, acts, 0, 0, ended)


def _next_forward_peaks(load: StageMemory) -> Iterator[PeakUsage]:
    """Yields the peaks of the next forward pass while offloaded states are updated.

    A block waits only for its own update, which frees its gradients.
    """
    own = load.model_states
    every = sum(load.chunks[group].grad_elements for group in load.chunk_groups)
    for group in dict.fromkeys(load.chunk_groups):
        one = load.chunks[group]
        for place in one.block_memories:
            # The updates of the blocks before this one, in this chunk, are done.
            left = every - one.grad_elements + place.later_grad_elements
            yield PeakUsage(
                IN_NEXT_FORWARD,
                load.final_grad_bytes(left + own.outside_elements),
                one.input_bytes + place.saved_bytes + place.forward_bytes,
                place.gathered_bytes + place.next_gathered_bytes,
            )


def _update_peaks(load: StageMemory) -> Iterator[PeakUsage]:
    """Yields the peaks in the optimizer step."""
    own = load.model_states
    every = sum(load.chunks[group].grad_elements for group in load.chunk_groups)
    trained = every + own.outside_elements
    ends = load.final_grad_bytes(trained)
    # All reductions are launched before the first one is waited for.
    yield PeakUsage(
        IN_UPDATE, ends, 0, 0, 0, trained * own.wide_itemsize if own.grad_replicas > 1.0 else 0
    )
    # All gradients are there until whole matrices are updated.
    if own.matrix_update_bytes:
        yield PeakUsage(IN_UPDATE, ends, 0, 0, 0, own.matrix_update_bytes)
    # A gradient shared with another stage is copied, and the all-reduce of both is a new tensor.
    if own.shared_grad_bytes:
        left = (
            load.grad_bytes(every, ALL_PASSES)
            + own.outside_elements * own.wide_itemsize
            - (0 if own.late_grad_bytes else own.shared_grad_bytes)
        )
        yield PeakUsage(
            IN_UPDATE,
            left,
            0,
            0,
            0,
            max(2 * own.shared_grad_bytes, load.reduction_bytes(own.late_grad_bytes)),
        )
