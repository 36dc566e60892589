"""The scheduler with a model that checks every block it reads.

The keys and values of a token are a hash of all tokens up to it. A step writes those of its tokens
and compares all earlier ones of the sequence with what they must be, so a block that was shared,
freed or overwritten wrongly is found at once. The next token is a function of the hash.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from ranvier.errors import PlanError
from ranvier.infer.block_pool import PADDING_BLOCK, BlockPool
from ranvier.infer.policy import POLICIES, ScheduledStep, WorkItem
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.scheduler import Scheduler, explain_refusal
from ranvier.infer.sequence import Sequence

VOCAB = 50
SHORT = "short"
LONG = "long"
FREQUENCIES = {SHORT: 1, LONG: 2}


@dataclass
class Launched:
    """A step in flight, with the block tables of its launch."""

    step: ScheduledStep
    blocks: dict[str, list[int]]
    models: dict[str, str]


@dataclass
class FakeEngine:
    """A scheduler, and a model whose keys, values and tokens are hashes of prefixes."""

    scheduler: Scheduler
    max_in_flight: int = 1
    border: int = 10**9
    """Length from which all keys are computed by other frequencies."""
    forces_tokens: bool = False
    num_drafts: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    cache: dict[tuple[int, int, int], int] = field(default_factory=dict)
    on_device: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that the device knows, some of them before the host."""
    in_flight: deque[Launched] = field(default_factory=deque)
    expected: dict[str, list[int]] = field(default_factory=dict)
    """What drafts are made from."""
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    num_computed: int = 0
    num_empty: int = 0

    def add(
        self, name: str, prompt: list[int], max_tokens: int, **other: str | int | None
    ) -> Sequence:
        logprobs = other.pop("prompt_logprobs", None)
        assert logprobs is None or isinstance(logprobs, int)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=logprobs)
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=params,
            **other,  # type: ignore[arg-type]
        )
        sequence = Sequence(
            request=request,
            block_size=self.scheduler.block_size,
            max_model_len=self.scheduler.max_model_len,
            model=LONG if len(prompt) > self.border else SHORT,
            waits_for_tokens=self.forces_tokens or self.num_drafts > 0,
        )
        self.scheduler.add(sequence)
        return sequence

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            self.step()
        raise AssertionError("the sequences do not come to their end")

    def step(self) -> None:
        """Launches a step, and finishes the oldest one if enough are in flight."""
        self._propose_drafts()
        step = self.scheduler.schedule()
        if step.items:
            self._launch(step)
        else:
            self.num_empty += 1
            assert self.in_flight or not self.scheduler.has_unfinished, "nothing can run"
        if self.in_flight and (not step.items or len(self.in_flight) >= self.max_in_flight):
            self._finish(self.in_flight.popleft())

    def _launch(self, step: ScheduledStep) -> None:
        blocks = {}
        models = {}
        for item in step.items:
            sequence = self.scheduler.get(item.request_id)
            assert sequence is not None and PADDING_BLOCK not in sequence.block_ids
            blocks[item.request_id] = [*sequence.block_ids]
            models[item.request_id] = sequence.model
            if not sequence.num_pending_tokens - item.samples:
                # The host knows all tokens, so the device gets them.
                self.on_device[item.request_id] = [*sequence.token_ids]
        self.in_flight.append(Launched(step, blocks, models))

    def _finish(self, launched: Launched) -> None:
        sampled: dict[str, list[int]] = {}
        ended = []
        restarted = []
        pools = self.scheduler.pools
        for item in launched.step.items:
            name = item.request_id
            blocks = launched.blocks[name]
            assert all(pools[item.home].ref_count(block) for block in blocks)
            tokens = self.on_device[name]
            self.num_computed += item.num_tokens
            values = self._compute(item.home, blocks, tokens, item, launched.models[name])
            sequence = self.scheduler.get(name)
            if not item.samples:
                continue
            if sequence is None or sequence.discards_in_flight:
                self.on_device[name] = [*tokens, values[-1] % VOCAB]
                continue
            new = self._verify(sequence, tokens, values, item.start + item.num_tokens)
            left = sequence.max_num_tokens - sequence.num_confirmed
            sampled[name] = new[:left]
            self.on_device[name] = tokens[: sequence.num_confirmed] + sampled[name]
            if len(new) >= left:
                ended.append(name)
            elif sequence.num_confirmed <= self.border < sequence.num_confirmed + len(new):
                restarted.append(sequence)
        for name, new in sampled.items():
            self.outputs.setdefault(name, []).extend(new)
        self.scheduler.finish_step(launched.step, sampled, ended)
        self.finished += ended
        for sequence in restarted:
            self.scheduler.restart(sequence, model=LONG)
        self._force_tokens(sampled)

    def _compute(
        self, home: int, blocks: list[int], tokens: list[int], item: WorkItem, model: str
    ) -> list[int]:
        """Writes the values of the new tokens, and compares those of the earlier ones."""
        size = self.scheduler.block_size
        value = FREQUENCIES[model]
        new = []
        for place, token in enumerate(tokens[: item.start + item.num_tokens]):
            value = hash((value, token))
            slot = home, blocks[place // size], place % size
            if place < item.start:
                assert self.cache[slot] == value, f"position {place} has another content"
            else:
                self.cache[slot] = value
                new.append(value)
        assert len(new) == item.num_tokens
        return new

    def _verify(
        self, sequence: Sequence, tokens: list[int], values: list[int], end: int
    ) -> list[int]:
        """Accepts draft tokens while they are the right ones, and one more token."""
        accepted = []
        for place in range(sequence.num_confirmed, end + 1):
            # The value of the token before a place chooses the token there.
            token = values[place - 1 - end] % VOCAB
            accepted.append(token)
            if place == end or tokens[place] != token:
                break
        return accepted

    def _propose_drafts(self) -> None:
        if not self.num_drafts:
            return
        for sequence in self.scheduler.running:
            ready = sequence.num_confirmed - sequence.num_computed == 1
            if ready and not sequence.num_in_flight and not sequence.num_draft_tokens:
                right = self.expected[sequence.request_id][sequence.num_generated :]
                drafts = [
                    token if self.chance.random() < 0.7 else 0 for token in right[: self.num_drafts]
                ]
                sequence.append_drafts(drafts)

    def _force_tokens(self, sampled: dict[str, list[int]]) -> None:
        """Appends two tokens without sampling after some tokens."""
        if not self.forces_tokens:
            return
        for name, new in sampled.items():
            sequence = self.scheduler.get(name)
            if sequence is not None and new[-1] % 5 == 0:
                sequence.append_tokens([1, 2])
                self.outputs[name] += [1, 2]
                if sequence.num_confirmed >= sequence.max_num_tokens:
                    self.scheduler.end(name)
                    self.finished.append(name)


def reference(
    tokens: list[int], count: int, border: int = 10**9, forces_tokens: bool = False
) -> list[int]:
    """What a model alone generates after tokens."""
    known = [*tokens]
    while len(known) < len(tokens) + count:
        value = FREQUENCIES[LONG if len(known) > border else SHORT]
        for token in known:
            value = hash((value, token))
        known.append(value % VOCAB)
        if forces_tokens and known[-1] % 5 == 0 and len(known) < len(tokens) + count:
            known += [1, 2]
    return known[len(tokens) :]


def make_scheduler(
    *,
    homes: int = 1,
    blocks: int = 40,
    size: int = 4,
    budget: int = 16,
    rows: int = 8,
    length: int = 100,
    policy: str = "decode_first",
    prefix: bool = True,
    lookahead: bool = False,
    groups: int = 1,
) -> Scheduler:
    return Scheduler(
        [BlockPool(blocks + 1, size) for _ in range(homes)],
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
        max_model_len=length,
        policy=policy,
        enable_prefix_caching=prefix,
        lookahead=lookahead,
        num_groups=groups,
    )


def check_all_free(scheduler: Scheduler) -> None:
    assert not scheduler.has_unfinished and scheduler.num_steps_in_flight == 0
    for pool in scheduler.pools:
        assert pool.num_free == pool.num_usable
    assert scheduler._sequences == {}


@dataclass(frozen=True)
class Setting:
    """How an engine runs."""

    policy: str
    homes: int
    in_flight: int
    lookahead: bool
    kind: str = "plain"

    def __str__(self) -> str:
        ahead = "ahead" if self.lookahead else "behind"
        return f"{self.policy}-homes{self.homes}-flight{self.in_flight}-{ahead}-{self.kind}"


SETTINGS = [
    Setting(policy, homes, in_flight, lookahead, kind)
    for policy in POLICIES
    for homes in (1, 3)
    for in_flight, lookahead in ((1, False), (3, False), (2, True))
    for kind in ("plain", "forced", "drafts", "border")
]


def play(setting: Setting, seed: int, num_requests: int) -> Scheduler:
    """Random requests with shared prefixes, children, aborts and too few blocks."""
    chance = random.Random(seed)
    size = chance.choice([1, 3, 3, 16])
    longest = 60
    least = -(-longest // size)
    scheduler = make_scheduler(
        homes=setting.homes,
        blocks=chance.choice([least, least + 2]),
        size=size,
        budget=chance.choice([1, 5, 16, 64]),
        rows=chance.choice([5, 20]),
        length=longest,
        policy=setting.policy,
        prefix=chance.random() < 0.8,
        lookahead=setting.lookahead,
        groups=1 if setting.lookahead else setting.in_flight,
    )
    engine = FakeEngine(
        scheduler,
        setting.in_flight,
        border=25 if setting.kind == "border" else 10**9,
        forces_tokens=setting.kind == "forced",
        num_drafts=3 if setting.kind == "drafts" else 0,
        chance=chance,
    )
    prefixes = [[chance.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    expected = engine.expected
    aborted = set()
    rate = chance.choice([0.3, 1.0])
    while len(expected) < num_requests or scheduler.has_unfinished:
        if len(expected) < num_requests and chance.random() < rate:
            name = f"r{len(expected)}"
            prompt = chance.choice(prefixes)[: chance.randint(0, 20)]
            prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 4))]
            count = chance.randint(1, 36)
            parent = ""
            if expected and chance.random() < 0.2:
                parent = chance.choice([*expected])
                prompt = prompts[parent]
            prompts[name] = prompt
            logprobs = 0 if chance.random() < 0.1 else None
            priority = chance.choice([0, 0, 0, 1])
            engine.add(
                name, prompt, count, parent_id=parent, prompt_logprobs=logprobs, priority=priority
            )
            expected[name] = reference(prompt, count, engine.border, engine.forces_tokens)
        if chance.random() < 0.01 and expected:
            name = chance.choice([*expected])
            if scheduler.get(name) is not None:
                aborted.add(name)
            scheduler.abort(name)
        if scheduler.has_unfinished:
            engine.step()
    engine.run()
    for name, tokens in expected.items():
        if name in aborted:
            assert engine.outputs.get(name, []) == tokens[: len(engine.outputs.get(name, []))]
        else:
            assert engine.outputs[name][: len(tokens)] == tokens, name
    assert {*engine.finished} == {*expected} - aborted
    assert engine.num_computed == scheduler.num_computed_tokens
    check_all_free(scheduler)
    return scheduler


@pytest.mark.sample(9)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_do_not_depend_on_the_schedule(setting: Setting) -> None:
    preemptions = sum(play(setting, seed, 20).num_preemptions for seed in range(5))
    assert preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_do_not_depend_on_the_schedule_for_long(setting: Setting) -> None:
    for seed in range(40):
        play(setting, 1000 + seed, 40)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_pool_of_one_longest_request_serves_a_hundred(policy: str, lookahead: bool) -> None:
    chance = random.Random(7)
    # The last token of a sequence is never stored.
    scheduler = make_scheduler(
        blocks=16, size=4, length=65, policy=policy, lookahead=lookahead, rows=100
    )
    engine = FakeEngine(scheduler, 2 if lookahead else 1)
    for i in range(100):
        count = 40 if i % 10 == 0 else chance.randint(1, 40)
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 65 - count))]
        if i % 10 == 0:
            prompt = [chance.randrange(VOCAB) for _ in range(25)]  # the longest
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert len(engine.finished) == 100 and scheduler.num_preemptions > 0
    check_all_free(scheduler)


def test_a_preempted_sequence_comes_back_before_younger_ones() -> None:
    scheduler = make_scheduler(blocks=6, size=4, budget=64, length=25)
    engine = FakeEngine(scheduler)
    for i in range(6):
        engine.add(f"r{i}", [i] * 6, 17)
    preempted = set()
    while scheduler.has_unfinished:
        engine.step()
        preempted |= {one.request_id for one in scheduler.waiting if one.num_preemptions}
        ages = [one.age for one in scheduler.running]
        assert all(one.age > max(ages, default=(0, -1)) for one in scheduler.waiting)
    assert preempted and engine.finished == sorted(engine.finished)


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    scheduler = make_scheduler(size=4)
    engine = FakeEngine(scheduler)
    prompt = [*range(16)]
    engine.add("cold", prompt, 1)
    engine.run()
    assert engine.num_computed == 16
    warm = engine.add("warm", prompt, 1)
    engine.run()
    # Three of four blocks are hits; the last one is given back.
    assert engine.num_computed == 16 + 4 and warm.num_cached_tokens == 12
    longer = engine.add("longer", [*prompt, 40, 41], 1)
    engine.run()
    assert engine.num_computed == 16 + 4 + 2 and longer.num_cached_tokens == 16
    assert scheduler.prefix_cache_queries == 16 + 16 + 18
    assert scheduler.prefix_cache_hits == 12 + 16
    assert engine.outputs["cold"] == engine.outputs["warm"]


def test_salts_and_adapters_do_not_share_blocks() -> None:
    engine = FakeEngine(make_scheduler(size=4))
    prompt = [*range(16)]
    engine.add("one", prompt, 1)
    engine.run()
    for i, other in enumerate([{"cache_salt": "a"}, {"adapter": "a"}, {"cache_salt": "b"}]):
        assert engine.add(f"r{i}", prompt, 1, **other).num_cached_tokens == 0
        engine.run()
    assert engine.num_computed == 4 * 16
    again = engine.add("again", prompt, 1, cache_salt="a")
    engine.run()
    assert again.num_cached_tokens == 12


def test_prompt_logprobs_write_the_cache_but_do_not_read_it() -> None:
    engine = FakeEngine(make_scheduler(size=4))
    prompt = [*range(16)]
    first = engine.add("first", prompt, 1, prompt_logprobs=0)
    engine.run()
    second = engine.add("second", prompt, 1, prompt_logprobs=0)
    engine.run()
    third = engine.add("third", prompt, 1)
    engine.run()
    cached = [one.num_cached_tokens for one in (first, second, third)]
    assert cached == [0, 0, 12] and engine.num_computed == 16 + 16 + 4


def test_children_share_the_prompt_of_their_parent() -> None:
    scheduler = make_scheduler(size=4, budget=8)
    engine = FakeEngine(scheduler)
    prompt = [*range(18)]
    engine.add("parent", prompt, 3)
    for i in range(3):
        engine.add(f"child{i}", prompt, 3, parent_id="parent")
    engine.add("other", [5], 1)
    engine.step()
    # The children wait, and others pass them.
    engine.step()
    assert [one.request_id for one in scheduler.running] == ["parent"]
    assert [one.waits_for_parent for one in scheduler.waiting] == [True, True, True, False]
    engine.step()
    assert engine.finished == ["other"]
    engine.run()
    assert engine.num_computed == 18 + 3 * 2 + 4 * 2 + 1
    check_all_free(scheduler)


def test_children_of_an_aborted_parent_start() -> None:
    engine = FakeEngine(make_scheduler())
    engine.add("parent", [1, 2, 3], 3)
    engine.add("child", [1, 2, 3], 3, parent_id="parent")
    engine.scheduler.abort("parent")
    engine.run()
    assert engine.finished == ["child"] and engine.outputs["child"] == reference([1, 2, 3], 3)


def test_a_sampled_token_after_the_end_is_not_kept() -> None:
    scheduler = make_scheduler(size=2, lookahead=True)
    engine = FakeEngine(scheduler, max_in_flight=2)
    sequence = engine.add("one", [1, 2, 3], 10)
    engine.step()
    engine.step()
    # The second step is in flight; the first has ended the sequence.
    scheduler.end("one")
    assert scheduler.pools[0].num_free < scheduler.pools[0].num_usable
    assert sequence.num_steps_in_flight == 1
    computed = sequence.num_confirmed
    engine.run()
    assert sequence.num_confirmed == computed
    # Tokens 1, 2 and 3 and the first sampled one fill two blocks, but only one is confirmed.
    assert scheduler.pools[0].num_cached == 1
    check_all_free(scheduler)


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_last_token_of_a_sequence_is_not_computed(lookahead: bool) -> None:
    engine = FakeEngine(make_scheduler(lookahead=lookahead), 2 if lookahead else 1)
    engine.add("one", [1, 2, 3], 5)
    engine.run()
    assert len(engine.outputs["one"]) == 5 and engine.num_computed == 3 + 4


def test_groups_share_the_running_sequences() -> None:
    scheduler = make_scheduler(budget=64, groups=3)
    engine = FakeEngine(scheduler, max_in_flight=3)
    for i in range(6):
        engine.add(f"r{i}", [i] * 3, 9)
    engine.step()
    engine.step()  # all are in flight, so the step finishes
    engine.step()
    engine.step()
    assert [len(one.step.items) for one in engine.in_flight] == [2, 2]
    engine.run()
    assert len(engine.finished) == 6


def test_an_abort_frees_blocks_when_no_step_reads_them() -> None:
    scheduler = make_scheduler()
    engine = FakeEngine(scheduler, max_in_flight=3)
    engine.add("one", [1, 2, 3], 10)
    engine.add("two", [4, 5], 10)
    engine.step()
    scheduler.abort("one")
    scheduler.abort("one")
    scheduler.abort("unknown")
    assert scheduler.num_free_blocks == scheduler.pools[0].num_usable - 2
    assert scheduler.get("one") is None
    engine.step()
    assert scheduler.num_free_blocks == scheduler.pools[0].num_usable - 1
    engine.run()
    assert engine.finished == ["two"]
    check_all_free(scheduler)


def test_a_request_that_never_fits_is_refused() -> None:
    scheduler = make_scheduler(blocks=4, size=4, length=100)
    engine = FakeEngine(scheduler)
    with pytest.raises(PlanError, match=r"may store 18 tokens, but the KV cache has 16 \(4 blocks"):
        engine.add("long", [1] * 10, 9)
    with pytest.raises(PlanError, match=r"prompt has 100 tokens, but a sequence may have 100"):
        engine.add("prompt", [1] * 100, 1)
    with pytest.raises(PlanError, match="0 tokens"):
        engine.add("empty", [], 1)
    engine.add("fits", [1] * 10, 7)
    with pytest.raises(PlanError, match="'fits' is in use"):
        engine.add("fits", [1] * 10, 7)
    engine.run()
    assert engine.finished == ["fits"]
    assert not explain_refusal(99, None, max_model_len=100, num_blocks=25, block_size=4)
    assert explain_refusal(99, None, max_model_len=100, num_blocks=24, block_size=4)


def test_reset_prefix_cache_forgets_everything() -> None:
    scheduler = make_scheduler(size=4)
    engine = FakeEngine(scheduler)
    engine.add("one", [*range(16)], 1)
    engine.run()
    scheduler.reset_prefix_cache()
    two = engine.add("two", [*range(16)], 1)
    engine.run()
    assert two.num_cached_tokens == 0 and engine.num_computed == 32


def test_homes_fill_evenly_and_share_no_blocks() -> None:
    scheduler = make_scheduler(homes=2, size=4, budget=64)
    engine = FakeEngine(scheduler)
    for i in range(4):
        engine.add(f"r{i}", [i] * 8, 3)
    engine.step()
    assert sorted(one.home for one in scheduler.running) == [0, 0, 1, 1]
    engine.run()
    # The same prompt goes where its blocks are.
    again = engine.add("again", [1] * 8, 3)
    engine.step()
    assert again.home == 1 and again.num_cached_tokens == 4
    engine.run()
    check_all_free(scheduler)
