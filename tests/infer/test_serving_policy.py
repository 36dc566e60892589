"""The rules of serving policies, on random views."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ranvier.infer import policy
from ranvier.infer.policy import (
    POLICIES,
    Admission,
    PrefixHit,
    ScheduledStep,
    SchedulerView,
    SequenceView,
    count_blocks,
)


@dataclass(frozen=True)
class FakeSequence:
    """A sequence as a policy sees it."""

    request_id: str
    num_tokens: int
    age: tuple[int, int]
    num_draft_tokens: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    num_blocks: int = 0
    home: int = 0
    waits_for_parent: bool = False
    num_prompt_tokens: int = 1000
    is_scored: bool = False

    @property
    def start(self) -> int:
        return self.num_computed + self.num_in_flight


def count_remaining(sequence: SequenceView) -> int:
    return sequence.num_tokens - sequence.num_computed - sequence.num_in_flight


def random_view(chance: random.Random) -> SchedulerView:
    """A view that an engine could have, with few and many free blocks."""
    homes = chance.choice([1, 1, 1, 2, 3])
    size = chance.choice([1, 2, 4, 16])
    ages = sorted((chance.choice([0, 0, 0, 1]), i) for i in range(chance.randint(0, 14)))
    running = []
    waiting = []
    cached = {}
    in_flight = set()
    looks_ahead = chance.random() < 0.5
    for age in ages:
        name = f"r{age[1]}"
        if chance.random() < 0.5:
            start = chance.randint(0, 5 * size)
            ahead = chance.choice([1, 1, 1, 0, chance.randint(1, 4 * size)])
            flying = min(start, chance.choice([0, 0, 1, size]))
            spare = chance.choice([0, 0, 0, 1, count_blocks(ahead, size)])
            running.append(
                FakeSequence(
                    name,
                    start + ahead,
                    age,
                    num_computed=start - flying,
                    num_in_flight=flying,
                    num_blocks=max(1, count_blocks(start, size) + spare),
                    home=chance.randrange(homes),
                )
            )
            if flying and not (looks_ahead and chance.random() < 0.8):
                in_flight.add(name)
        else:
            tokens = chance.randint(1, 6 * size)
            waiting.append(FakeSequence(name, tokens, age, waits_for_parent=chance.random() < 0.1))
            most = (tokens - 1) // size
            found = [chance.randint(0, most) * (chance.random() < 0.3) for _ in range(homes)]
            cached[name] = [PrefixHit(hit, chance.randint(0, hit)) for hit in found]
    free = [chance.choice([0, 0, 1, 2, chance.randint(0, 30)]) for _ in range(homes)]
    # Cached blocks that count as free are among the free ones.
    for hits in cached.values():
        for home, hit in enumerate(hits):
            free[home] = max(free[home], hit.num_free)
    return SchedulerView(
        running=running,
        waiting=waiting,
        free_blocks=free,
        block_size=size,
        max_num_batched_tokens=chance.choice([1, 2, 7, 32, 1000]),
        max_num_seqs=chance.choice([1, 3, 8, 64]),
        in_flight=in_flight,
        find_prefix=lambda sequence: cached[sequence.request_id],
    )


def check_items(view: SchedulerView, step: ScheduledStep) -> None:
    """Items are the next tokens of their sequences, at most one for each, within the budget."""
    running = {one.request_id: one for one in view.running}
    waiting = {one.request_id: one for one in view.waiting}
    homes = dict(step.admitted)
    assert len({item.request_id for item in step.items}) == len(step.items)
    for item in step.items:
        name = item.request_id
        assert item.num_tokens >= 1 and name not in view.in_flight and name not in step.preempted
        if name in running:
            sequence = running[name]
            assert item.home == sequence.home
            assert item.start == sequence.num_computed + sequence.num_in_flight
        else:
            sequence = waiting[name]
            assert item.home == homes[name] and view.find_prefix is not None
            hit = view.find_prefix(sequence)[item.home]
            assert item.start == hit.num_blocks * view.block_size
        assert item.start + item.num_tokens <= sequence.num_tokens
        assert item.samples == (item.start + item.num_tokens == sequence.num_tokens)
    used = step.tokens_per_home(len(view.free_blocks))
    assert sum(used) == step.num_tokens
    assert max(used) <= view.max_num_batched_tokens
    assert step.is_decode_only == (
        bool(step.items) and all(item.num_tokens == 1 for item in step.items)
    )


def free_after(view: SchedulerView, step: ScheduledStep) -> list[int]:
    """Free blocks of each home after the step; none of them may be negative."""
    assert view.find_prefix is not None
    free = [*view.free_blocks]
    items = {item.request_id: item for item in step.items}
    for one in view.running:
        if one.request_id in step.preempted:
            free[one.home] += one.num_blocks
        elif one.request_id in items:
            item = items[one.request_id]
            total = count_blocks(item.start + item.num_tokens, view.block_size)
            free[one.home] -= max(0, total - one.num_blocks)
    waiting = {one.request_id: one for one in view.waiting}
    for name, home in step.admitted:
        hit = view.find_prefix(waiting[name])[home]
        total = count_blocks(waiting[name].num_tokens, view.block_size)
        free[home] -= total - hit.num_blocks + hit.num_free
    return free


def check_preemptions(view: SchedulerView, step: ScheduledStep) -> None:
    """The youngest are preempted, for older ones, and never while in flight."""
    for name in step.preempted:
        victim = next(one for one in view.running if one.request_id == name)
        assert not victim.num_in_flight and name not in view.in_flight
        others = [one for one in view.running if one.home == victim.home]
        younger = [one for one in others if one.age > victim.age]
        for one in younger:
            assert (
                one.request_id in step.preempted
                or one.num_in_flight
                or one.request_id in view.in_flight
            )
        assert others[0].request_id != name, "the oldest is never preempted"
        assert any(item.home == victim.home for item in step.items) or any(
            one.num_in_flight for one in younger
        )


def fits(view: SchedulerView, sequence: object, home: int, free: int, rows: int) -> bool:
    """Whether the blocks of a waiting sequence and one for each running one are free."""
    assert isinstance(sequence, FakeSequence) and view.find_prefix is not None
    hit = view.find_prefix(sequence)[home]
    total = count_blocks(sequence.num_tokens, view.block_size)
    return total - hit.num_blocks + hit.num_free + rows <= free


def check_admissions(view: SchedulerView, step: ScheduledStep, *, uses_budget: bool) -> None:
    """First come, first served; a row, a reserve and the best home; and nobody is left out."""
    ready = [one for one in view.waiting if not one.waits_for_parent]
    assert [name for name, _ in step.admitted] == [
        one.request_id for one in ready[: len(step.admitted)]
    ]
    homes = range(len(view.free_blocks))
    rows = [sum(one.home == home for one in view.running) for home in homes]
    load = [sum(one.num_tokens for one in view.running if one.home == home) for home in homes]
    before = ScheduledStep(
        tuple(item for item in step.items if item.request_id not in dict(step.admitted)),
        (),
        step.preempted,
    )
    free = free_after(view, before)
    budget = [view.max_num_batched_tokens - used for used in before.tokens_per_home(len(homes))]
    assert not (step.admitted and step.preempted and uses_budget)
    counts = {item.request_id: item.num_tokens for item in step.items}
    for one in ready:
        possible = [
            home
            for home in homes
            if rows[home] < view.max_num_seqs
            and (budget[home] > 0 or not uses_budget)
            and fits(view, one, home, free[home], rows[home])
        ]
        chosen = dict(step.admitted).get(one.request_id)
        if chosen is None:
            stalled = {
                other.home
                for other in view.running
                if count_remaining(other) > 0
                and other.request_id not in counts
                and other.request_id not in view.in_flight
            }
            assert step.preempted or {*possible} <= stalled
            return
        assert chosen in possible and view.find_prefix is not None
        hits = view.find_prefix(one)
        best = min(possible, key=lambda home: (-hits[home].num_blocks, load[home], home))
        # A home in which a running sequence lacks a block takes no new ones.
        if chosen != best:
            assert any(
                other.home == best and other.request_id not in counts for other in view.running
            )
        total = count_blocks(one.num_tokens, view.block_size)
        free[chosen] -= total - hits[chosen].num_blocks + hits[chosen].num_free
        rows[chosen] += 1
        load[chosen] += one.num_tokens
        budget[chosen] -= counts.get(one.request_id, 0)


def check_progress(view: SchedulerView, step: ScheduledStep) -> None:
    """The oldest of each home progresses, and budget is left only if no work is."""
    items = {item.request_id: item for item in step.items}
    free = free_after(view, step)
    used = step.tokens_per_home(len(free))
    for home in range(len(free)):
        own = [one for one in view.running if one.home == home]
        able = [
            one
            for one in own
            if count_remaining(one) > 0
            and one.request_id not in view.in_flight
            and one.request_id not in step.preempted
        ]
        flying = [one for one in own if one.num_in_flight or one.request_id in view.in_flight]
        if able and able[0].request_id not in items:
            # It waits for blocks of younger ones in flight, or nothing is left to take.
            younger = [one for one in own if one.age > able[0].age]
            waits = any(one in flying for one in younger)
            assert waits or free[home] == 0
            assert waits or all(one.request_id in step.preempted for one in younger)
        if used[home] < view.max_num_batched_tokens:
            for one in able:
                item = items.get(one.request_id)
                whole = item is not None and item.samples
                assert whole or free[home] == 0 or flying or step.preempted


def check_view(chance: random.Random) -> None:
    view = random_view(chance)
    for name, choose in POLICIES.items():
        step = choose(view)
        assert step == choose(view)
        check_items(view, step)
        assert min(free_after(view, step)) >= 0
        check_preemptions(view, step)
        if name == "decode_first":
            check_admissions(view, step, uses_budget=True)
            check_progress(view, step)
        elif name == "static":
            assert not (view.running and step.admitted)
            if view.running:
                check_progress(view, step)
            else:
                check_admissions(view, step, uses_budget=False)
        else:
            # Prompts and decodes of a home are not mixed.
            starts = {one.request_id: one for one in view.running}
            prompts = {
                item.home
                for item in step.items
                if item.request_id not in starts or count_remaining(starts[item.request_id]) > 1
            }
            for item in step.items:
                if item.request_id in starts and count_remaining(starts[item.request_id]) == 1:
                    assert item.home not in prompts


@pytest.mark.parametrize("seed", range(4))
def test_rules_hold_on_random_views(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(600):
        check_view(chance)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_rules_hold_on_many_random_views(seed: int) -> None:
    chance = random.Random(100 + seed)
    for _ in range(10_000):
        check_view(chance)


def view_of(
    running: list[FakeSequence],
    waiting: list[FakeSequence],
    *,
    free: int = 100,
    budget: int = 8,
    rows: int = 8,
    size: int = 4,
) -> SchedulerView:
    return SchedulerView(
        running=running,
        waiting=waiting,
        free_blocks=[free],
        block_size=size,
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
    )


def counts(step: ScheduledStep) -> dict[str, int]:
    return {item.request_id: item.num_tokens for item in step.items}


DECODES = [
    FakeSequence("a", 9, (0, 0), num_computed=8, num_blocks=3),
    FakeSequence("b", 6, (0, 1), num_computed=5, num_blocks=2),
]
BEGUN = FakeSequence("c", 12, (0, 2), num_computed=4, num_blocks=3)
NEW = [FakeSequence("d", 3, (0, 3)), FakeSequence("e", 30, (0, 4))]


def test_decode_first_orders_decodes_begun_and_new_prompts() -> None:
    view = view_of([*DECODES, BEGUN], NEW, budget=16)
    step = policy.decode_first(view)
    assert counts(step) == {"a": 1, "b": 1, "c": 8, "d": 3, "e": 3}
    assert step.admitted == (Admission("d", 0), Admission("e", 0))
    # The last prompt is cut; a smaller budget cuts the one before.
    assert counts(policy.decode_first(view_of([*DECODES, BEGUN], NEW, budget=5))) == {
        "a": 1,
        "b": 1,
        "c": 3,
    }


def test_the_last_generated_token_is_computed_alone_if_asked_for() -> None:
    # A preempted sequence, one that has only its last token left, and two prompts.
    preempted = FakeSequence("c", 7, (0, 2), num_blocks=2, num_prompt_tokens=4)
    decode = FakeSequence("a", 9, (0, 0), num_computed=8, num_blocks=3, num_prompt_tokens=4)
    prompts = [FakeSequence("d", 3, (0, 3), num_prompt_tokens=3)]
    admitted = FakeSequence("e", 6, (0, 4), num_prompt_tokens=5)
    view = view_of([decode, preempted], [*prompts, admitted], budget=32)
    assert counts(policy.decode_first(view)) == {"a": 1, "c": 7, "d": 3, "e": 6}
    alone = policy.decode_first(replace(view, decodes_alone=True))
    assert counts(alone) == {"a": 1, "c": 6, "d": 3, "e": 5}
    assert {item.request_id for item in alone.items if item.samples} == {"a", "d"}
    scored = [replace(prompts[0], is_scored=True), replace(admitted, is_scored=True)]
    one_by_one = policy.decode_first(replace(view, waiting=scored, decodes_alone=True))
    assert counts(one_by_one) == {"a": 1, "c": 6, "d": 1, "e": 1}


def test_prefill_first_lets_decodes_wait() -> None:
    view = view_of([*DECODES, BEGUN], NEW, budget=16)
    assert counts(policy.prefill_first(view)) == {"c": 8, "d": 3, "e": 5}
    assert counts(policy.prefill_first(view_of(DECODES, []))) == {"a": 1, "b": 1}


def test_static_runs_a_batch_to_its_end() -> None:
    view = view_of([*DECODES, BEGUN], NEW, budget=16)
    assert counts(policy.static(view)) == {"a": 1, "b": 1, "c": 8}
    step = policy.static(view_of([], NEW, budget=2))
    # Both are admitted, although only the first has tokens in this step.
    assert counts(step) == {"d": 2} and len(step.admitted) == 2


def test_the_oldest_progresses_before_decodes_of_others() -> None:
    oldest = FakeSequence("z", 40, (-1, 9), num_computed=0, num_blocks=10)
    assert counts(policy.decode_first(view_of([oldest, *DECODES], [], budget=2))) == {
        "z": 1,
        "a": 1,
    }
    assert counts(policy.decode_first(view_of([oldest, *DECODES], [], budget=8))) == {
        "z": 6,
        "a": 1,
        "b": 1,
    }


def test_the_youngest_is_preempted_and_nothing_is_admitted() -> None:
    full = [
        FakeSequence("a", 9, (0, 0), num_computed=8, num_blocks=2),
        FakeSequence("b", 5, (0, 1), num_computed=4, num_blocks=1),
        FakeSequence("c", 7, (0, 2), num_computed=6, num_blocks=2),
    ]
    step = policy.decode_first(view_of(full, [FakeSequence("d", 1, (0, 3))], free=0))
    assert step.preempted == ("c",) and step.admitted == ()
    assert counts(step) == {"a": 1, "b": 1}


def test_the_budget_of_a_preempted_sequence_is_used_by_others() -> None:
    full = [
        FakeSequence("a", 6, (0, 0), num_computed=5, num_blocks=2),
        FakeSequence("p", 12, (0, 1), num_computed=4, num_blocks=1),
        FakeSequence("q", 12, (0, 2), num_computed=4, num_blocks=3),
        FakeSequence("c", 3, (0, 3), num_computed=2, num_blocks=1),
    ]
    step = policy.decode_first(view_of(full, [], free=0, budget=3))
    assert step.preempted == ("c",) and counts(step) == {"a": 1, "p": 1, "q": 1}


def test_a_sequence_in_flight_is_preempted_a_step_later() -> None:
    full = [
        FakeSequence("a", 9, (0, 0), num_computed=8, num_blocks=2),
        FakeSequence("b", 6, (0, 1), num_computed=4, num_in_flight=1, num_blocks=2),
    ]
    step = policy.decode_first(view_of(full, [], free=0))
    assert step.preempted == () and counts(step) == {}
    landed = FakeSequence("b", 6, (0, 1), num_computed=5, num_blocks=2)
    step = policy.decode_first(view_of([full[0], landed], [], free=0))
    assert step.preempted == ("b",) and counts(step) == {"a": 1}


def test_admission_keeps_a_block_for_each_running_sequence() -> None:
    new = [FakeSequence("d", 8, (0, 3))]
    assert policy.decode_first(view_of(DECODES, new, free=4)).admitted == (Admission("d", 0),)
    assert policy.decode_first(view_of(DECODES, new, free=3)).admitted == ()
    # Alone it needs no reserve.
    assert policy.decode_first(view_of([], new, free=2)).admitted == (Admission("d", 0),)


def test_a_sequence_that_does_not_fit_is_not_overtaken() -> None:
    new = [FakeSequence("long", 400, (0, 3)), FakeSequence("short", 1, (0, 4))]
    assert policy.decode_first(view_of(DECODES, new, free=50)).admitted == ()


def test_a_child_that_waits_for_its_parent_is_passed_over() -> None:
    new = [FakeSequence("child", 8, (0, 3), waits_for_parent=True), FakeSequence("d", 8, (0, 4))]
    assert policy.decode_first(view_of(DECODES, new)).admitted == (Admission("d", 0),)


def test_admission_prefers_the_longest_prefix_then_the_fewest_tokens() -> None:
    running = [FakeSequence("a", 9, (0, 0), num_computed=8, num_blocks=3, home=0)]
    new = [FakeSequence("d", 8, (0, 3)), FakeSequence("e", 8, (0, 4))]
    hits = {"d": [PrefixHit(1, 1), PrefixHit()], "e": [PrefixHit(), PrefixHit()]}
    view = SchedulerView(
        running=running,
        waiting=new,
        free_blocks=[10, 10],
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        find_prefix=lambda sequence: hits[sequence.request_id],
    )
    step = policy.decode_first(view)
    assert step.admitted == (Admission("d", 0), Admission("e", 1))
    # The cached block of d is not computed again.
    assert [(item.request_id, item.start) for item in step.items] == [
        ("a", 8),
        ("d", 4),
        ("e", 0),
    ]
