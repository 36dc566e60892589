"""The scheduler of the engine: owns sequences, their blocks and the queue, and applies a policy.

A step is scheduled by `schedule`, runs on the devices, and is finished by `finish_step` with the
tokens it sampled. Several steps may be in flight: those of other sequences (pipeline), or, with
`lookahead`, the next step of the same sequences, whose input tokens are still on the device. Until
a step has finished, the blocks it uses are neither freed nor named.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Mapping
from typing import cast

from ranvier.errors import PlanError
from ranvier.infer.block_pool import BlockPool
from ranvier.infer.policy import (
    POLICIES,
    PrefixHit,
    ScheduledStep,
    SchedulerView,
    SequenceView,
    count_blocks,
)
from ranvier.infer.sequence import Sequence, max_total_tokens
from ranvier.infer.step_times import StepTimes, choose_token_budget

_by_age = operator.attrgetter("age")


def explain_refusal(
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> str:
    """Returns why a request can never run; empty if it can.

    num_blocks: number of blocks of a home that sequences can use.
    """
    if num_prompt_tokens == 0:
        return "The prompt has 0 tokens. It must have at least 1. Add a token to the prompt."
    if num_prompt_tokens >= max_model_len:
        return (
            f"The prompt has {num_prompt_tokens:,} tokens, but a sequence may have "
            f"{max_model_len:,} (max_model_len). Prompt and output must fit. Shorten the prompt to "
            f"at most {max_model_len - 1:,} tokens."
        )
    # The last token is sampled, but its keys and values are never needed.
    stored = max_total_tokens(num_prompt_tokens, max_tokens, max_model_len) - 1
    capacity = num_blocks * block_size
    if stored > capacity:
        return (
            f"The request may store {stored:,} tokens, but the KV cache has {capacity:,} "
            f"({num_blocks:,} blocks of {block_size}). Prompt and output must fit. Shorten the "
            "prompt, set a lower max_tokens, or start the engine with a larger cache."
        )
    return ""


def explain_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> str:
    """Returns why prompt and output together do not fit; empty if they do.

    max_tokens: tokens that the caller asks for; None means as many as fit.
    """
    room = max_model_len - num_prompt_tokens
    if max_tokens is None or max_tokens <= room:
        return ""
    remedy = f"Use at most {room:,} new tokens, or as many as fit."
    if room < 1:
        remedy = f"Use a prompt of at most {max_model_len - 1:,} tokens."
    return (
        f"The prompt has {num_prompt_tokens:,} tokens and {max_tokens:,} are to be generated, "
        f"together {num_prompt_tokens + max_tokens:,}. A sequence may have {max_model_len:,} (the "
        f"positions of the model, or engine.max_model_len). {remedy}"
    )


class Scheduler:
    """Decides which tokens each step computes, and where their keys and values are stored."""

    def __init__(
        self,
        pools: list[BlockPool],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        policy: str = "decode_first",
        enable_prefix_caching: bool = True,
        lookahead: bool = False,
        num_groups: int = 1,
        target_itl_seconds: float = 0.0,
        decodes_alone: bool = False,
    ) -> None:
        """Starts without sequences.

        pools: one for each home, of equal size.
        lookahead: whether a sequence in a step in flight may be part of the next one.
        num_groups: number of steps in flight that share the running sequences, for a pipeline.
        target_itl_seconds: time that steps with decodes should take at most; 0 means no target.
        decodes_alone: as in `SchedulerView`.
        """
        sizes = {(pool.num_blocks, pool.block_size) for pool in pools}
        assert len(sizes) == 1, f"Pools must be of equal size: {sizes}"
        assert max_num_batched_tokens >= 1 and max_num_seqs >= 1
        self.pools = pools
        self.block_size = pools[0].block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.lookahead = lookahead
        self.num_groups = num_groups
        self.target_itl_seconds = target_itl_seconds
        self.decodes_alone = decodes_alone
        self.step_times = StepTimes()
        """Tokens and seconds of the last steps, if there is a target."""
        self.waiting: list[Sequence] = []
        """Waiting sequences, the oldest first."""
        self.running: list[Sequence] = []
        """Running sequences, the oldest first."""
        self.num_steps_in_flight = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all admitted sequences."""
        self.num_computed_tokens = 0
        """Tokens of all finished steps, including recomputed ones."""
        self.prefix_cache_queries = 0
        """Prompt tokens that were looked up in the prefix cache when first admitted."""
        self.prefix_cache_hits = 0
        self._policy = POLICIES[policy]
        self._sequences: dict[str, Sequence] = {}
        """All sequences that have not ended."""
        self._steps: dict[int, list[Sequence]] = {}
        """Sequences of the items of each step in flight, by the `id` of the step: the request id of
        one that has ended may be in use again."""
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks of all homes that no sequence uses."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of waiting sequences."""
        return sum(sequence.num_tokens for sequence in self.waiting)

    def get(self, request_id: str) -> Sequence | None:
        """Returns a sequence that waits or runs."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Appends a sequence to the queue. Raises a PlanError for one that can never run."""
        request = sequence.request
        problem = explain_refusal(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            max_model_len=self.max_model_len,
            num_blocks=self.pools[0].num_usable,
            block_size=self.block_size,
        )
        if problem:
            raise PlanError(problem)
        if request.request_id in self._sequences:
            raise PlanError(
                f"The request id {request.request_id!r} is in use. Ids of unfinished requests must "
                "be different. Use another id."
            )
        assert sequence.block_size == self.block_size, sequence.block_size
        sequence.arrival = self._num_added
        self._num_added += 1
        # Without a cache there is nothing to wait for.
        if request.parent_id and self.enable_prefix_caching and sequence.reads_prefix_cache:
            sequence.parent = self.get(request.parent_id)
        self._sequences[request.request_id] = sequence
        bisect.insort(self.waiting, sequence, key=_by_age)

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence that does not run the prefix cache has."""
        blocks = max(len(self._cached_blocks(sequence, pool)) for pool in self.pools)
        return blocks * self.block_size

    def schedule(self) -> ScheduledStep:
        """Returns the next step, with its blocks allocated; it is in flight from now on.

        An empty step is not in flight and is not finished. If steps are in flight, one of them must
        finish before there is work again.
        """
        step = self._policy(self._view())
        for request_id in step.preempted:
            self.num_preemptions += 1
            self._sequences[request_id].num_preemptions += 1
            self._return_to_queue(self._sequences[request_id])
        # Hits are acquired before anything is allocated, which could overwrite them.
        for request_id, home in step.admitted:
            self._admit(self._sequences[request_id], home)
        sequences = [self._sequences[item.request_id] for item in step.items]
        for item, sequence in zip(step.items, sequences, strict=True):
            end = item.start + item.num_tokens
            if end > len(sequence.block_ids) * self.block_size:
                self._allocate(sequence, end)
            sequence.num_in_flight += item.num_tokens
            sequence.num_steps_in_flight += 1
            sequence.num_pending_tokens += item.samples
        for request_id, _ in step.admitted:
            sequence = self._sequences[request_id]
            self._allocate(sequence, sequence.num_confirmed)
        if step.items:
            self.num_steps_in_flight += 1
            self._steps[id(step)] = sequences
        return step

    def finish_step(
        self,
        step: ScheduledStep,
        sampled: Mapping[str, Collection[int]],
        ended: Collection[str] = (),
    ) -> None:
        """Records the results of a step; steps of a sequence finish in their order.

        sampled: new tokens of the items that sample: one, or with draft tokens the accepted ones
            and a new one. Tokens of ended and restarted sequences are ignored.
        ended: ids of sequences that end with these tokens.
        """
        self.num_steps_in_flight -= 1
        for item, sequence in zip(step.items, self._steps.pop(id(step)), strict=True):
            sequence.num_in_flight -= item.num_tokens
            sequence.num_steps_in_flight -= 1
            sequence.num_pending_tokens -= item.samples
            self.num_computed_tokens += item.num_tokens
            if sequence.takes_tokens:
                sequence.num_computed = item.start + item.num_tokens
                if item.samples:
                    sequence.accept_tokens(sampled.get(item.request_id, ()))
                # The last token is always computed next, also if drafts were rejected.
                sequence.num_computed = min(sequence.num_computed, sequence.num_confirmed - 1)
                if sequence.num_computed >= (sequence.num_named_blocks + 1) * self.block_size:
                    self._name_full_blocks(sequence)
            elif sequence.num_steps_in_flight == 0:
                self._finish_discarding(sequence)
        for request_id in ended:
            self.end(request_id)

    def record_seconds(self, step: ScheduledStep, seconds: float) -> None:
        """Notes how long a step took, which the budget of later ones depends on."""
        if self.target_itl_seconds > 0.0:
            tokens = max(step.tokens_per_home(len(self.pools)))
            self.step_times = self.step_times.add(tokens, seconds)

    def end(self, request_id: str) -> None:
        """Ends a sequence; unknown and ended ones are ignored.

        Its blocks become free once no step in flight uses them.
        """
        sequence = self.get(request_id)
        if sequence is None:
            return
        _remove(self.waiting if sequence.status == "waiting" else self.running, sequence)
        sequence.status = "finished"
        sequence.parent = None
        del self._sequences[request_id]
        if sequence.num_steps_in_flight == 0:
            self._finish_discarding(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a sequence at the wish of its caller; unknown and ended ones are ignored."""
        self.end(request_id)

    def restart(self, sequence: Sequence, *, model: str | None = None) -> None:
        """Lets all tokens of a sequence be computed again, for example with other frequencies.

        Tokens that steps in flight sample are not used.

        model: new part of the names of its blocks; they differ from those so far then.
        """
        if model is not None:
            sequence.model = model
            sequence.block_hashes.clear()
        if sequence.status == "running":
            sequence.discards_in_flight = True
            if sequence.num_steps_in_flight == 0:
                self._finish_discarding(sequence)

    def reset_prefix_cache(self) -> None:
        """Removes all names of blocks, so that nothing computed so far is found again."""
        for pool in self.pools:
            pool.reset_prefix_cache()

    # ---- what a policy sees -------------------------------------------------------------------

    def _view(self) -> SchedulerView:
        """Returns the view of now."""
        return SchedulerView(
            running=self.running,
            waiting=self.waiting,
            free_blocks=[pool.num_free for pool in self.pools],
            block_size=self.block_size,
            max_num_batched_tokens=self._choose_budget(),
            max_num_seqs=self.max_num_seqs,
            num_groups=self.num_groups,
            in_flight=self._unavailable_ids(),
            decodes_alone=self.decodes_alone,
            find_prefix=self._find_prefix if self.enable_prefix_caching else None,
            count_freed=self._count_freed,
        )

    def _choose_budget(self) -> int:
        """Returns the maximum number of tokens of the next step in each home."""
        if self.target_itl_seconds == 0.0:
            return self.max_num_batched_tokens
        decodes = [0] * len(self.pools)
        for sequence in self.running:
            decodes[sequence.home] += sequence.num_generated > 0
        return choose_token_budget(
            self.step_times,
            self.target_itl_seconds,
            num_decodes=max(decodes),
            most=self.max_num_batched_tokens,
        )

    def _unavailable_ids(self) -> set[str]:
        """Returns the ids of running sequences that cannot be part of another step yet."""
        if not self.num_steps_in_flight:
            return set()
        return {
            sequence.request_id
            for sequence in self.running
            if sequence.num_steps_in_flight and not self._can_look_ahead(sequence)
        }

    def _can_look_ahead(self, sequence: Sequence) -> bool:
        """Returns whether a sequence in flight may be part of the next step."""
        if not self.lookahead or sequence.discards_in_flight:
            return False
        if sequence.num_draft_tokens:
            return False
        return not (sequence.num_pending_tokens and sequence.waits_for_tokens)

    def _find_prefix(self, view: SequenceView) -> list[PrefixHit]:
        """Returns what each home has cached of a waiting sequence."""
        sequence = cast(Sequence, view)
        hits = []
        for pool in self.pools:
            blocks = self._cached_blocks(sequence, pool)
            free = sum(pool.ref_count(block) == 0 for block in blocks)
            hits.append(PrefixHit(len(blocks), free))
        return hits

    def _cached_blocks(self, sequence: Sequence, pool: BlockPool) -> list[int]:
        """Returns the cached blocks of a waiting sequence, without its last token."""
        if not self.enable_prefix_caching or not sequence.reads_prefix_cache:
            return []
        # The logits of the last token are needed, so it is always computed.
        full = (sequence.num_tokens - 1) // self.block_size
        return pool.find_longest_prefix(sequence.extend_hashes(full))

    def _count_freed(self, view: SequenceView) -> int:
        """Returns how many blocks only this sequence uses."""
        sequence = cast(Sequence, view)
        pool = self.pools[sequence.home]
        return sum(pool.ref_count(block) == 1 for block in sequence.block_ids)

    # ---- changes of sequences -----------------------------------------------------------------

    def _admit(self, sequence: Sequence, home: int) -> None:
        """Moves a sequence from the queue to a home, with the blocks of its cached prefix."""
        _remove(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=_by_age)
        pool = self.pools[home]
        blocks = self._cached_blocks(sequence, pool)
        pool.acquire(blocks)
        sequence.home = home
        sequence.status = "running"
        sequence.block_ids = blocks
        sequence.num_named_blocks = len(blocks)
        sequence.num_computed = len(blocks) * self.block_size
        if not sequence.was_admitted:
            sequence.was_admitted = True
            cached = min(sequence.num_computed, sequence.num_prompt_tokens)
            sequence.num_cached_tokens = cached
            self.num_prompt_tokens += sequence.num_prompt_tokens
            if self.enable_prefix_caching and sequence.reads_prefix_cache:
                self.prefix_cache_queries += sequence.num_prompt_tokens
                self.prefix_cache_hits += cached

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a sequence blocks for its first tokens."""
        missing = count_blocks(num_tokens, self.block_size) - len(sequence.block_ids)
        if missing > 0:
            sequence.block_ids += self.pools[sequence.home].allocate(missing)

    def _name_full_blocks(self, sequence: Sequence) -> None:
        """Offers the full blocks of computed tokens to the prefix cache."""
        if not self.enable_prefix_caching:
            return
        full = sequence.num_computed // self.block_size
        hashes = sequence.extend_hashes(full)
        pool = self.pools[sequence.home]
        for i in range(sequence.num_named_blocks, full):
            pool.cache_block(sequence.block_ids[i], hashes[i])
        sequence.num_named_blocks = full

    def _free_blocks(self, sequence: Sequence) -> None:
        """Gives all blocks of a sequence back."""
        self.pools[sequence.home].free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_named_blocks = 0
        sequence.num_computed = 0

    def _return_to_queue(self, sequence: Sequence) -> None:
        """Lets a running sequence without steps in flight wait to be computed again."""
        assert sequence.num_steps_in_flight == 0, sequence.request_id
        self._free_blocks(sequence)
        sequence.accept_tokens(())
        sequence.status = "waiting"
        _remove(self.running, sequence)
        bisect.insort(self.waiting, sequence, key=_by_age)

    def _finish_discarding(self, sequence: Sequence) -> None:
        """Frees the blocks of an ended or restarted sequence that no step in flight uses."""
        sequence.discards_in_flight = False
        if sequence.status == "running":
            self._return_to_queue(sequence)
        else:
            self._free_blocks(sequence)


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from a list that is sorted by age."""
    place = bisect.bisect_left(sequences, sequence.age, key=_by_age)
    assert sequences[place] is sequence, sequence.request_id
    del sequences[place]
