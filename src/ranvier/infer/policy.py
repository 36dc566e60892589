"""Serving policies: choose the work of a step from a view of the sequences.

A policy is a pure function of the view: no clock, no tensors, no randomness, no state. The engine
and the simulator use the same ones.

    decode_first    all decodes, then prompts that have begun, then new ones (Sarathi, vLLM)
    prefill_first   prompts alone; decodes wait for them (nano-vllm, mini-sglang)
    static          batches that run to their end

Sequences have a home, the block pool that their blocks are in: on a grid where col splits samples,
or with several replicas that step together, a step has one list of tokens per home. Each home has
its own free blocks and its own budget of tokens.

Rules of all policies:

- Neither the budget nor the free blocks of a home are exceeded.
- New sequences are admitted in the order of priority, then arrival. Only a sequence that waits for
  the prompt of its parent is passed over.
- A sequence is admitted to a home whose free blocks hold all its tokens, and one block more for
  each running sequence there. All its blocks are allocated then.
- A running sequence that needs a block when none is free takes it from the youngest one of its
  home, which is preempted: it gives all its blocks back and waits to be computed again. So the
  oldest sequence always progresses.
- A sequence that a step in flight computes is not preempted, because the step still uses its
  blocks. It is left out of the following steps and preempted once the step has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class SequenceView(Protocol):
    """What a policy reads of a sequence. A policy changes nothing."""

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute so far, including those that steps in flight sample."""

    @property
    def num_draft_tokens(self) -> int:
        """Number of the last of these tokens that are guesses, which the step verifies."""

    @property
    def num_computed(self) -> int:
        """Number of tokens whose keys and values exist."""

    @property
    def num_in_flight(self) -> int:
        """Number of tokens that steps in flight compute, after the computed ones."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequence uses."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""

    @property
    def age(self) -> tuple[int, int]:
        """Priority and order of arrival; the oldest sequence has the least."""

    @property
    def home(self) -> int:
        """Home of a running sequence."""

    @property
    def waits_for_parent(self) -> bool:
        """Whether it cannot be admitted yet, because its parent computes the same prompt."""


class PrefixHit(NamedTuple):
    """Blocks of the prefix cache that a waiting sequence can use in one home."""

    num_blocks: int = 0
    num_free: int = 0
    """Number of them that no sequence uses, so that they count as free until then."""


@dataclass(frozen=True, kw_only=True)
class SchedulerView:
    """What a policy sees."""

    running: Sequence[SequenceView]
    """Running sequences, the oldest first."""
    waiting: Sequence[SequenceView]
    """Waiting sequences, the oldest first; preempted ones are among them."""
    free_blocks: Sequence[int]
    """Number of free blocks of each home."""
    block_size: int
    max_num_batched_tokens: int
    """Budget: maximum number of tokens of a step in each home."""
    max_num_seqs: int
    """Maximum number of running sequences in each home."""
    num_groups: int = 1
    """Number of steps in flight that share the running sequences of a home: each step takes at most
    this fraction of them. For a pipeline."""
    in_flight: Collection[str] = ()
    """Ids that cannot be scheduled now, because a step in flight computes them."""
    decodes_alone: bool = False
    """Whether a token whose logits are needed is not computed together with earlier ones: the last
    token of a sequence that generates, also after a preemption, and tokens of a scored prompt."""
    find_prefix: Callable[[SequenceView], Sequence[PrefixHit]] | None = None
    """Looks up the prefix cache of each home for a waiting sequence; None if there is none. The
    last token is never part of a hit."""
    count_freed: Callable[[SequenceView], int] | None = None
    """Returns how many blocks become free if a sequence is preempted; None if all of its blocks do,
    because no blocks are shared."""


class WorkItem(NamedTuple):
    """Tokens of a sequence that a step computes."""

    request_id: str
    num_tokens: int
    start: int
    """Position of the first of them."""
    home: int
    samples: bool
    """Whether they include the last confirmed token, so that a new one is sampled."""


class Admission(NamedTuple):
    """A sequence that leaves the queue, and its home."""

    request_id: str
    home: int


@dataclass(frozen=True)
class ScheduledStep:
    """The work of a step."""

    items: tuple[WorkItem, ...]
    """Single tokens before longer chunks, and older sequences before younger ones."""
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all homes."""
        return sum(item.num_tokens for item in self.items)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has exactly one token."""
        # Chunks come last.
        return bool(self.items) and self.items[-1].num_tokens == 1

    def tokens_per_home(self, num_homes: int) -> list[int]:
        """Returns the number of tokens of each home."""
        counts = [0] * num_homes
        for item in self.items:
            counts[item.home] += item.num_tokens
        return counts


ServingPolicy = Callable[[SchedulerView], ScheduledStep]


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks that hold a number of tokens."""
    return -(-num_tokens // block_size)


class _StepBuilder:
    """A step under construction, with the budget and the free blocks that are left."""

    def __init__(self, view: SchedulerView) -> None:
        self.view = view
        self.num_homes = len(view.free_blocks)
        self.budget = [view.max_num_batched_tokens] * self.num_homes
        self.free_blocks = list(view.free_blocks)
        self.running: list[list[SequenceView]]
        if self.num_homes == 1:
            self.running = [list(view.running)]
        else:
            self.running = [[] for _ in view.free_blocks]
            for sequence in view.running:
                self.running[sequence.home].append(sequence)
        self.num_rows = [len(sequences) for sequences in self.running]
        self.items: dict[str, WorkItem] = {}
        self.blocks_taken: dict[str, int] = {}
        self.admitted: list[Admission] = []
        self.preempted: list[str] = []
        self.excluded: set[str] = {*view.in_flight}
        """Ids that get no tokens in this step."""
        self.stalled_homes: set[int] = set()
        """Homes in which a running sequence lacks a block."""

    def split_by_phase(self, home: int) -> tuple[list[SequenceView], list[SequenceView]]:
        """Returns the sequences of a home with one token to compute, and those with more.

        Draft tokens are not counted. Sequences that cannot be scheduled are left out, and those
        that another group takes.
        """
        decodes: list[SequenceView] = []
        prompts: list[SequenceView] = []
        excluded = self.excluded
        limit = -(-len(self.running[home]) // self.view.num_groups)
        for sequence in self.running[home]:
            if sequence.request_id in excluded:
                continue
            if len(decodes) + len(prompts) == limit:
                break
            remaining = sequence.num_tokens - sequence.num_computed - sequence.num_in_flight
            if 0 < remaining <= 1 + sequence.num_draft_tokens:
                decodes.append(sequence)
            elif remaining > 0:
                prompts.append(sequence)
        return decodes, prompts

    def run(self, sequence: SequenceView, limit: int | None = None) -> None:
        """Adds tokens of a running sequence, as many as budget, blocks and `limit` allow."""
        request_id = sequence.request_id
        if request_id in self.excluded or request_id in self.items:
            return
        home = sequence.home
        start = sequence.num_computed + sequence.num_in_flight
        num_tokens = sequence.num_tokens
        count = self._count_tokens(sequence, start, home)
        if limit is not None:
            count = min(count, limit)
        if count <= 0:
            return
        size = self.view.block_size
        num_blocks = sequence.num_blocks
        if start + count > num_blocks * size:
            # A shorter chunk is preferred to a preemption.
            if start >= (num_blocks + self.free_blocks[home]) * size:
                self._reclaim_block(sequence)
            count = min(count, (num_blocks + self.free_blocks[home]) * size - start)
            if count <= 0:
                self.stalled_homes.add(home)
                return
            taken = max(0, count_blocks(start + count, size) - num_blocks)
            self.free_blocks[home] -= taken
            self.blocks_taken[request_id] = taken
        samples = start + count >= num_tokens - sequence.num_draft_tokens
        self._add_item(WorkItem(request_id, count, start, home, samples))

    def _count_tokens(self, sequence: SequenceView, start: int, home: int) -> int:
        """Returns how many tokens from `start` on the budget of a home allows."""
        stop = sequence.num_tokens
        if self.view.decodes_alone and start < stop - 1:
            if sequence.is_scored:
                stop = start + 1
            elif stop > sequence.num_prompt_tokens:
                stop -= 1
        return min(stop - start, self.budget[home])

    def run_decodes(self, sequences: Sequence[SequenceView], home: int) -> None:
        """Adds one token of each sequence, and its draft tokens.

        Most decodes need no new block. They take a short path, because a step may have hundreds.
        """
        items = self.items
        size = self.view.block_size
        for sequence in sequences:
            start = sequence.num_computed + sequence.num_in_flight
            if (
                start >= sequence.num_blocks * size
                or sequence.num_draft_tokens
                or self.budget[home] <= 0
            ):
                self.run(sequence)
            elif sequence.request_id not in self.excluded:
                items[sequence.request_id] = WorkItem(sequence.request_id, 1, start, home, True)
                self.budget[home] -= 1

    def admit(self, *, ignore_budget: bool = False) -> None:
        """Admits waiting sequences in order, until one does not fit.

        ignore_budget: admits sequences even if no tokens of them are left to compute in this step.
        """
        # Blocks are short after a preemption, and the preempted sequence is first in the queue.
        if self.preempted:
            return
        for sequence in self.view.waiting:
            if sequence.waits_for_parent:
                continue
            homes = [home for home in range(self.num_homes) if self._has_row(home, ignore_budget)]
            if not homes:
                return
            hits = self._find_prefix(sequence)
            homes = [home for home in homes if self._fits(sequence, home, hits[home])]
            if not homes:
                return
            self._admit_to(sequence, homes, hits)

    def build(self) -> ScheduledStep:
        """Returns the step."""
        items = [*self.items.values()]
        singles = [item for item in items if item.num_tokens == 1]
        if len(singles) < len(items):
            items = singles + [item for item in items if item.num_tokens > 1]
        return ScheduledStep(tuple(items), tuple(self.admitted), tuple(self.preempted))

    def _add_item(self, item: WorkItem) -> None:
        """Adds tokens of a sequence to the step."""
        self.items[item.request_id] = item
        self.budget[item.home] -= item.num_tokens

    def _reclaim_block(self, sequence: SequenceView) -> None:
        """Preempts the youngest sequences of the home until a block is free.

        Only sequences younger than `sequence` are preempted. Those in flight are left out of this
        step, so that they can be preempted in a later one.
        """
        home = sequence.home
        expected = 0
        for victim in reversed(self.running[home]):
            if victim is sequence or self.free_blocks[home] + expected > 0:
                return
            request_id = victim.request_id
            if request_id in self.preempted:
                continue
            freed = victim.num_blocks
            if self.view.count_freed is not None:
                freed = self.view.count_freed(victim)
            self.excluded.add(request_id)
            self._cancel_item(request_id, home)
            if victim.num_in_flight or request_id in self.view.in_flight:
                expected += freed
            else:
                self.preempted.append(request_id)
                self.free_blocks[home] += freed

    def _cancel_item(self, request_id: str, home: int) -> None:
        """Removes the tokens of a sequence from the step."""
        item = self.items.pop(request_id, None)
        if item is not None:
            self.budget[home] += item.num_tokens
            self.free_blocks[home] += self.blocks_taken.pop(request_id, 0)

    def _has_row(self, home: int, ignore_budget: bool) -> bool:
        """Returns whether a home can take one more sequence, apart from blocks."""
        return (
            self.num_rows[home] < self.view.max_num_seqs
            and (ignore_budget or self.budget[home] > 0)
            and home not in self.stalled_homes
        )

    def _find_prefix(self, sequence: SequenceView) -> Sequence[PrefixHit]:
        """Returns what each home has cached of a sequence."""
        if self.view.find_prefix is None:
            return [PrefixHit()] * self.num_homes
        return self.view.find_prefix(sequence)

    def _blocks_needed(self, sequence: SequenceView, hit: PrefixHit) -> int:
        """Returns how many free blocks a waiting sequence takes."""
        total = count_blocks(sequence.num_tokens, self.view.block_size)
        return total - (hit.num_blocks - hit.num_free)

    def _fits(self, sequence: SequenceView, home: int, hit: PrefixHit) -> bool:
        """Returns whether the blocks of a sequence and one per running sequence are free."""
        reserve = self.num_rows[home]
        return self._blocks_needed(sequence, hit) + reserve <= self.free_blocks[home]

    def _admit_to(
        self, sequence: SequenceView, homes: Sequence[int], hits: Sequence[PrefixHit]
    ) -> None:
        """Admits a sequence to the home with the longest prefix, then the fewest tokens."""
        if len(homes) == 1:
            home = homes[0]
        else:
            home = min(homes, key=lambda home: (-hits[home].num_blocks, self._load(home), home))
        self.free_blocks[home] -= self._blocks_needed(sequence, hits[home])
        self.num_rows[home] += 1
        self.admitted.append(Admission(sequence.request_id, home))
        start = hits[home].num_blocks * self.view.block_size
        count = self._count_tokens(sequence, start, home)
        if count > 0:
            samples = start + count == sequence.num_tokens
            self._add_item(WorkItem(sequence.request_id, count, start, home, samples))
        self.running[home].append(sequence)

    def _load(self, home: int) -> int:
        """Returns the number of tokens of the sequences that run in a home."""
        return sum(sequence.num_tokens for sequence in self.running[home])


def _run_decode_first(builder: _StepBuilder, home: int) -> None:
    """Adds the running sequences of a home, decodes before prompts."""
    decodes, prompts = builder.split_by_phase(home)
    if prompts and decodes and prompts[0].age < decodes[0].age:
        # The oldest sequence progresses even if the decodes of others would use all the budget.
        builder.run(prompts[0], limit=max(1, builder.budget[home] - len(decodes)))
    builder.run_decodes(decodes, home)
    for sequence in prompts:
        builder.run(sequence)


def decode_first(view: SchedulerView) -> ScheduledStep:
    """Returns all decodes, then prompts that have begun, then new ones, up to the budget."""
    builder = _StepBuilder(view)
    for home in range(builder.num_homes):
        _run_decode_first(builder, home)
    builder.admit()
    return builder.build()


def prefill_first(view: SchedulerView) -> ScheduledStep:
    """Returns prompts, and decodes only in homes without prompts to compute."""
    builder = _StepBuilder(view)
    phases = [builder.split_by_phase(home) for home in range(builder.num_homes)]
    for _, prompts in phases:
        for sequence in prompts:
            builder.run(sequence)
    builder.admit()
    busy = {item.home for item in builder.items.values()}
    for home, (decodes, _) in enumerate(phases):
        if home not in busy:
            builder.run_decodes(decodes, home)
    return builder.build()


def static(view: SchedulerView) -> ScheduledStep:
    """Returns the next tokens of a batch; a new batch is admitted when the last has ended."""
    builder = _StepBuilder(view)
    if view.running:
        for home in range(builder.num_homes):
            _run_decode_first(builder, home)
    else:
        builder.admit(ignore_budget=True)
    return builder.build()


POLICIES: dict[str, ServingPolicy] = {
    "decode_first": decode_first,
    "prefill_first": prefill_first,
    "static": static,
}
"""Policies by the name of the setting `engine.scheduling_policy`."""
