"""Draws equal a plain float64 reference on every split of the vocabulary and in every batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import KINDS, expected, kept_tokens, make_case, reference_token, row_of, whole
from torch import Tensor

from pool import Pool, device_of
from ranvier.counter_rng import random_key
from ranvier.grid import Grid
from ranvier.infer import sampler
from ranvier.infer.sampler import (
    SampledTokens,
    change_logits,
    sample_tokens,
    score_tokens,
)
from ranvier.infer.sampling_inputs import (
    SamplingInputs,
    SamplingRow,
    SamplingState,
    token_bitmask,
)
from ranvier.infer.sampling_params import SamplingParams
from ranvier.nn.cross_entropy import VocabShard


def sample(logits: Tensor | np.ndarray, rows: list[SamplingRow]) -> SampledTokens:
    x = torch.as_tensor(logits)
    return sample_tokens(x, SamplingInputs.from_rows(rows, x.shape[1]), whole(x.shape[1]))


@pytest.mark.parametrize(("vocab", "count"), [(1, 30), (3, 60), (50, 200), (3000, 120)])
def test_draws_equal_the_reference(vocab: int, count: int) -> None:
    logits, rows = make_case(vocab, vocab, count)
    found = sample(logits, rows)
    assert found.tokens.tolist() == expected(logits, rows)
    assert not found.failed.any()


def test_draws_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = make_case(5, 1100, 80)
    together = sample(logits, rows).tokens.tolist()
    assert together == [int(sample(logits[i : i + 1], rows[i : i + 1]).tokens) for i in range(80)]
    # Nor on the number of rows at once.
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 2500)
    assert together == sample(logits, rows).tokens.tolist()
    assert (
        together
        != sample(
            logits, [dataclasses.replace(row, position=row.position + 1) for row in rows]
        ).tokens.tolist()
    ), "the position matters"


def test_logits_of_other_dtypes_are_rounded_to_fp32() -> None:
    logits, rows = make_case(6, 300, 60)
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.as_tensor(logits).to(dtype) + torch.tensor(1e-12, dtype=dtype)
        rounded = x.float().numpy()
        assert sample(x, rows).tokens.tolist() == expected(rounded, rows)


def split_draws(grid: Grid, names: tuple[str, ...], cases: list[tuple[int, int, int]]) -> list[Any]:
    """Tokens and scores of logits whose vocabulary is split over an axis."""
    axis = grid.axis(*names)
    found: list[Any] = []
    for case in cases:
        logits, rows = make_case(*case)
        rows = [dataclasses.replace(row, params=with_logprobs(row.params)) for row in rows]
        vocab = logits.shape[1]
        width = -(-vocab // axis.size)
        first = min(axis.index * width, vocab)
        shard = VocabShard(axis, grid.axis(), first, min(width, vocab - first))
        # Padding has any value.
        padded = np.pad(logits, ((0, 0), (0, width * axis.size - vocab)), constant_values=99.0)
        mine = torch.as_tensor(padded[:, axis.index * width :][:, :width].copy())
        inputs = SamplingInputs.unpack(*SamplingInputs.from_rows(rows, vocab).pack())
        device = device_of(grid)
        sampled = sample_tokens(mine.to(device), inputs.to(device), shard)
        assert sampled.scores is not None
        scores = dataclasses.astuple(sampled.scores)
        found.append([x.tolist() for x in (sampled.tokens, sampled.failed, *scores)])
    return found


def with_logprobs(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, logprobs=3)


SPLITS = [
    ({"row": 2, "col": 2}, ("row", "col")),
    ({"row": 2}, ("row",)),
    ({"row": 3}, ("row",)),
    ({"row": 2, "col": 2}, ("row",)),
    ({"pipe": 2, "row": 2, "col": 2}, ("pipe", "row", "col")),
]


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("degrees", "names"),
    [pytest.param(*one, marks=pytest.mark.full if i > 1 else ()) for i, one in enumerate(SPLITS)],
)
def test_draws_equal_the_reference_on_every_split(
    pool: Pool, degrees: dict[str, int], names: tuple[str, ...]
) -> None:
    # Five tokens on four ranks leave one with padding only.
    cases = [(1, 5, 60), (2, 60, 100), (3, 2501, 60)]
    told = pool.on_grid(degrees, split_draws, names, cases)
    assert all(one == told[0] for one in told), "all ranks draw the same"
    for case, (tokens, failed, *scores) in zip(cases, told[0], strict=True):
        logits, rows = make_case(*case)
        assert tokens == expected(logits, rows)
        assert not any(failed)
        alone = score_tokens(
            torch.as_tensor(logits), torch.tensor(tokens), whole(case[1]), num_top=3
        )
        for have, want in zip(scores, dataclasses.astuple(alone), strict=True):
            torch.testing.assert_close(torch.tensor(have), want, rtol=1e-6, atol=1e-6)
        assert scores[1] == alone.ranks.tolist()
        assert scores[2] == alone.top_tokens.tolist()


# ---- distributions ----------------------------------------------------------------------


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.07},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_have_the_right_distribution(params: dict[str, Any]) -> None:
    count, vocab = 100_000, 12
    x = np.random.default_rng(1).normal(size=vocab).astype(np.float32) * 1.5
    row = row_of(**params)
    inputs = SamplingInputs.from_rows([row], vocab)
    many = {
        one.name: getattr(inputs, one.name).expand(count)
        for one in dataclasses.fields(inputs)
        if getattr(getattr(inputs, one.name), "shape", None) == (1,)
    }
    inputs = dataclasses.replace(inputs, **many | {"positions": torch.arange(count)})
    tokens = sample_tokens(torch.as_tensor(x).expand(count, -1), inputs, whole(vocab)).tokens
    kept = kept_tokens(x.astype(np.float64), row.params)
    shares = np.zeros(vocab)
    shares[kept] = np.exp(x[kept].astype(np.float64) / row.params.temperature)
    shares /= shares.sum()
    found = np.bincount(tokens.numpy(), minlength=vocab)
    assert set(found.nonzero()[0]) <= set(kept)
    check_chi_square(found[kept], shares[kept] * count)
    # Neighbouring positions are independent.
    pairs = np.bincount((tokens[0::2] * vocab + tokens[1::2]).numpy(), minlength=vocab**2)
    wanted = np.outer(shares, shares).flatten() * count / 2
    likely = wanted > 5.0
    check_chi_square(pairs[likely], wanted[likely])


def check_chi_square(found: np.ndarray, wanted: np.ndarray) -> None:
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    # Four standard deviations of the approximate normal distribution of Wilson and Hilferty.
    spread = 2.0 / (9.0 * max(freedom, 1))
    assert (statistic / max(freedom, 1)) ** (1 / 3) < 1.0 - spread + 4.0 * spread**0.5, statistic


# ---- properties -------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    logits=st.lists(
        st.integers(-4, 4).map(lambda i: i / 2) | st.floats(-20, 20, width=32),
        min_size=1,
        max_size=40,
    ),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)
def test_any_parameters_draw_as_the_reference(
    logits: list[float], seed: int, position: int, **params: Any
) -> None:
    x = np.array([logits], dtype=np.float32)
    row = row_of(position=position, seed=seed, **params)
    found = sample(x, [row])
    assert int(found.tokens) == reference_token(x[0], row)
    assert not bool(found.failed)


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 200),
    count=st.integers(0, 12),
    extra=st.integers(0, 3),
)
@settings(max_examples=40)
def test_packed_inputs_are_the_same(seed: int, vocab: int, count: int, extra: int) -> None:
    _, rows = make_case(seed, vocab, count)
    inputs = SamplingInputs.from_rows(rows, vocab, num_rows=count + extra)
    integers, floats = inputs.pack()
    assert (integers.dtype, floats.dtype) == (torch.int64, torch.float64)
    again = SamplingInputs.unpack(integers, floats)
    assert again.flags == inputs.flags
    for one in dataclasses.fields(inputs):
        want = getattr(inputs, one.name)
        if isinstance(want, Tensor):
            have = getattr(again, one.name)
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert torch.equal(have, want)


# ---- flags ------------------------------------------------------------------------------


def test_flags_select_the_work() -> None:
    def flags(*params: dict[str, Any]) -> Any:
        return SamplingInputs.from_rows([row_of(**one) for one in params], 32_000).flags

    greedy = flags({"temperature": 0.0, "top_k": 5}, {"temperature": 0.0})
    assert greedy.is_greedy and greedy.num_candidates == 0
    assert flags({}).num_candidates == 0
    assert flags({"top_k": 40}, {"temperature": 0.0}).num_candidates == 64
    assert flags({"top_k": 40}).is_bounded and not flags({"top_k": 40}, {}).is_bounded
    assert not flags({"top_k": 40, "top_p": 0.5}).may_need_all
    assert flags({"top_p": 0.5}).may_need_all and flags({"top_k": 1025}).may_need_all
    assert flags({"min_p": 0.5}).num_candidates == 1
    assert flags({}).num_logprobs == -1 and flags({"logprobs": 0}, {}).num_logprobs == 0
    assert hash(flags({})) == hash(flags({"temperature": 0.5}))


def test_more_rows_are_greedy() -> None:
    logits, rows = make_case(9, 40, 20)
    inputs = SamplingInputs.from_rows(rows, 40, num_rows=23)
    x = torch.cat([torch.as_tensor(logits), torch.eye(3, 40)])
    assert sample_tokens(x, inputs, whole(40)).tokens.tolist() == [*expected(logits, rows), 0, 1, 2]


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_no_rows_are_a_batch(params: dict[str, Any]) -> None:
    inputs = SamplingInputs.from_rows([row_of(logprobs=2, **params)], 9)
    none = {
        one.name: getattr(inputs, one.name)[:0]
        for one in dataclasses.fields(inputs)
        if isinstance(getattr(inputs, one.name), Tensor)
    }
    found = sample_tokens(torch.zeros(0, 9), dataclasses.replace(inputs, **none), whole(9))
    assert found.tokens.shape == (0,)
    assert found.scores is not None and found.scores.top_tokens.shape == (0, 2)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_row_without_an_allowed_token_fails(params: dict[str, Any]) -> None:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    x[2, 4], x[3, 8], x[4, 1] = math.nan, -math.nan, math.inf
    rows = [row_of(i, **params) for i in range(6)]
    rows[1] = dataclasses.replace(rows[1], masks=[token_bitmask([], 9)])
    rows[5] = dataclasses.replace(rows[5], forbidden_token_ids=range(9))
    found = sample(x, rows)
    assert found.failed.tolist() == [False, True, True, True, True, True]
    assert found.tokens[1:].tolist() == [0] * 5


# ---- log-probabilities ------------------------------------------------------------------


def test_scores_are_those_of_unchanged_logits() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)) * 5
    logits[::4] = logits[::4].round()
    rows = [
        row_of(i, temperature=0.5, top_k=3, logit_bias={7: 50.0}, logprobs=i % 6) for i in range(40)
    ]
    found = sample(logits, rows)
    scores = found.scores
    assert scores is not None and scores.logprobs.dtype == torch.float32
    wanted = logits.double().log_softmax(1)
    tokens = found.tokens.unsqueeze(1)
    torch.testing.assert_close(
        scores.logprobs.double(), wanted.gather(1, tokens).squeeze(1), rtol=1e-6, atol=1e-6
    )
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(scores.ranks, (order == tokens).nonzero()[:, 1] + 1)
    assert torch.equal(scores.top_tokens, order[:, :5])
    torch.testing.assert_close(
        scores.top_logprobs.double(), wanted.gather(1, order[:, :5]), rtol=1e-6, atol=1e-6
    )


def test_scores_of_float64_are_float64() -> None:
    logits = torch.randn(5, 30, dtype=torch.float64)
    tokens = torch.arange(5)
    found = score_tokens(logits, tokens, whole(30))
    wanted = logits.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(found.logprobs, wanted, rtol=1e-12, atol=1e-12)
    assert found.top_tokens.shape == (5, 0)
    greedy = score_tokens(logits, logits.argmax(1), whole(30))
    assert greedy.ranks.tolist() == [1] * 5


def test_a_forbidden_token_has_no_probability() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    found = score_tokens(logits, torch.tensor([1]), whole(3), num_top=3)
    assert found.logprobs.tolist() == [-math.inf]
    assert found.top_tokens.tolist() == [[2, 0, 1]]


# ---- changes of logits ------------------------------------------------------------------


def changed(logits: Tensor, row: SamplingRow) -> Tensor:
    inputs = SamplingInputs.from_rows([row], logits.shape[0])
    return change_logits(logits.unsqueeze(0), inputs, 0)[0]


def test_penalties_are_those_of_their_formulas() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 4.0, -1.0])
    row = row_of(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    row = dataclasses.replace(row, output_counts={0: 3, 1: 1}, prompt_token_ids={1, 3})
    assert changed(logits, row).tolist() == [1.0 - 0.75 - 0.5, -4.0 - 0.25 - 0.5, 1.0, 2.0, -1.0]
    # Only the repetition penalty concerns the prompt.
    row = dataclasses.replace(row, params=SamplingParams(presence_penalty=0.5))
    assert changed(logits, row).tolist() == [1.5, -2.5, 1.0, 4.0, -1.0]


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    prompt, output = [1, 5, 9, 5], [9, 30, 30]
    state = SamplingState(
        SamplingParams(repetition_penalty=1.7),
        stream=0,
        prompt_token_ids=prompt,
        end_token_ids=(),
        vocab=50,
    )
    for token in output:
        state.append(token)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([prompt + output]), logits.unsqueeze(0).clone()
    )[0]
    torch.testing.assert_close(changed(logits, state.next_row()), wanted)


def test_a_bias_does_not_allow_a_forbidden_token() -> None:
    row = row_of(logit_bias={1: 100.0, 2: 7.5}, repetition_penalty=3.0)
    row = dataclasses.replace(
        row, forbidden_token_ids={1, 3}, output_counts={1: 1}, masks=[token_bitmask([0, 1, 3], 4)]
    )
    assert changed(torch.zeros(4), row).tolist() == [0.0, -math.inf, -math.inf, -math.inf]


def test_ignored_entries_change_nothing() -> None:
    inputs = SamplingInputs.from_rows([row_of(logit_bias={1: 2.0})], 4)
    inputs = dataclasses.replace(
        inputs,
        bias_entries=torch.tensor([[0, -1], [0, 1], [0, -1]]),
        bias_values=torch.tensor([5.0, 2.0, 3.0], dtype=torch.float64),
    )
    assert change_logits(torch.zeros(1, 4), inputs, 0).tolist() == [[0.0, 2.0, 0.0, 0.0]]


@given(tokens=st.sets(st.integers(0, 199)), vocab=st.sampled_from([200, 224, 500]))
def test_bitmasks_have_the_bits_of_their_tokens(tokens: set[int], vocab: int) -> None:
    mask = token_bitmask(tokens, vocab)
    assert mask.dtype == np.int32 and len(mask) * 32 >= vocab
    assert {i for i in range(vocab) if (int(mask[i // 32]) >> (i % 32)) & 1} == tokens


def test_masks_are_combined_and_may_be_short() -> None:
    row = dataclasses.replace(
        row_of(), masks=[token_bitmask(range(1, 100), 100), token_bitmask([0, 1, 40], 64)[:2]]
    )
    allowed = changed(torch.zeros(100), row).isfinite().nonzero().flatten().tolist()
    assert allowed == [1, 40]


# ---- the state of a request -------------------------------------------------------------


def state_of(prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> SamplingState:
    return SamplingState(
        SamplingParams(**params),
        stream=2,
        prompt_token_ids=prompt,
        end_token_ids={99},
        vocab=100,
    )


def test_end_tokens_are_forbidden_before_min_tokens() -> None:
    state = state_of(min_tokens=2, stop_token_ids=frozenset({50}))
    for wanted in ({50, 99}, {50, 99}, set()):
        row = state.next_row()
        assert set(row.forbidden_token_ids) == wanted
        state.append(7)
    assert row.position == 2 and row.key == random_key(0, "draw", 2)
    # The number of tokens is known before they are.
    assert set(state_of(min_tokens=2).next_row(position=2).forbidden_token_ids) == set()
    ignoring = state_of(min_tokens=2, ignore_eos=True, stop_token_ids=frozenset({50}))
    assert set(ignoring.next_row().forbidden_token_ids) == {50}


def test_the_end_of_a_bad_word_is_forbidden_after_its_beginning() -> None:
    state = state_of(bad_words=((2, 3, 4), (5,), (4, 6), (1, 2, 3, 6, 4, 8)))
    found = []
    for token in (6, 4, 2, 3, 9):
        found.append(set(state.next_row().forbidden_token_ids))
        state.append(token)
    assert found == [{4, 5}, {5}, {5, 6, 8}, {5}, {4, 5}]
    assert state.needs_last_token and not state_of(bad_words=((5,),)).needs_last_token


def test_counts_and_masks_of_a_request() -> None:
    state = state_of(frequency_penalty=0.5, repetition_penalty=1.5, allowed_token_ids=(4, 5))
    for token in (4, 5, 4):
        state.append(token)
    row = state.next_row(mask=token_bitmask([5, 6], 100))
    assert dict(row.output_counts) == {4: 2, 5: 1}
    assert set(row.prompt_token_ids) == {1, 2, 3}
    assert state.needs_last_token
    assert changed(torch.zeros(100), row).isfinite().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 9, "top_p": 0.5}], ids=str
)
def test_padding_of_the_vocabulary_is_never_drawn(params: dict[str, Any]) -> None:
    """On the last rank of a vocabulary that the axis does not divide."""
    logits = np.random.default_rng(3).normal(size=(20, 13)).astype(np.float32)
    rows = [row_of(stream=i, temperature=0.8, **params) for i in range(20)]
    padded = torch.cat([torch.from_numpy(logits), torch.full((20, 3), 99.0)], 1)
    found = sample_tokens(padded, SamplingInputs.from_rows(rows, 13), whole(13))
    assert not found.failed.any()
    assert found.tokens.tolist() == expected(logits, rows)
