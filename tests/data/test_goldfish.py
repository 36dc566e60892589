"""Which targets the goldfish loss drops: by its definitions, and the same for every reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.corpora import corpus_of
from ranvier.data.batch import Window
from ranvier.data.dataset import open_data
from ranvier.data.goldfish import GoldfishMask, GoldfishStrategy, hash_windows
from ranvier.data.loader import load_micro_batches
from ranvier.data.mixture import CorpusMixture
from ranvier.data.window_assignment import WindowCost
from ranvier.grid import Grid
from ranvier.models import DecoderConfig
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import IGNORE_INDEX

STRATEGIES: tuple[GoldfishStrategy, ...] = get_args(GoldfishStrategy)
PRIME = 2**61 - 1


def window_of(*documents: list[int] | np.ndarray) -> Window:
    """A sample that documents fill; its last token has no target."""
    tokens = np.concatenate([np.asarray(one, np.int64) for one in documents])
    lengths = [len(one) for one in documents]
    ends = np.cumsum(lengths) - 1
    targets = np.append(tokens[1:], IGNORE_INDEX)
    targets[ends] = IGNORE_INDEX
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Window(tokens, targets, positions, np.repeat(np.arange(len(lengths)), lengths))


def hash_of(context: list[int], seed: int) -> int:
    """The definition of the hash, in integers without a limit."""
    key = seed + 1
    for token in context:
        key = (key * 0x9E3779B97F4A7C15 + token + 1) % PRIME
    key = (key ^ (key >> 29)) * 0xBF58476D1CE4E5B9 % PRIME
    return (key ^ (key >> 32)) * 0x94D049BB133111EB % PRIME


def published_mask(targets: torch.Tensor, k: int, width: int) -> torch.Tensor:
    """The published rule: a table of uniforms by the product of targets in int64, `[b, s]`."""
    size = 1_000_003
    table = torch.rand(size, generator=torch.Generator().manual_seed(2971215073))
    dropped = torch.zeros_like(targets, dtype=torch.bool)
    keys = targets.unfold(1, width, 1).prod(-1) % size
    dropped[:, width - 1 :] = table[keys] < 1 / k
    return dropped


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40),
    st.integers(1, 14),
    st.one_of(st.integers(2, 9), st.just(128), st.just(2**31)),
    st.one_of(st.integers(0, 3), st.just(2**63 - 1)),
)
def test_the_hash_is_its_definition(tokens: list[int], width: int, k: int, seed: int) -> None:
    rule = GoldfishMask(k, width, "hash", seed)
    dropped = rule.find_dropped(window_of(tokens), 0)
    for place in range(len(tokens)):
        context = tokens[max(place - width + 1, 0) : place + 1]
        want = len(context) == width and hash_of(context, seed) * k < PRIME
        assert dropped[place] == want, place


def test_products_at_the_limits_are_exact() -> None:
    """Hashes next to the modulus, where a wrong carry would show."""
    tokens = np.array([0, 1, 2**31 - 1, 2**31 - 2, 0, 0, 2**30, 2**31 - 1], np.int64)
    for seed in (0, PRIME - 2, PRIME - 1, PRIME, 2**62):
        for width in (1, 2, 5):
            have = hash_windows(tokens, width, seed).tolist()
            count = len(tokens) - width + 1
            want = [hash_of(tokens[i : i + width].tolist(), seed) for i in range(count)]
            assert have == want


@pytest.mark.parametrize("width", [4, 13])
@pytest.mark.parametrize("k", [2, 3, 4, 8, 128])
def test_a_million_published_masks(k: int, width: int) -> None:
    """Equal on 1,000,000 targets, among them zeros and powers of two, which overflow."""
    drawn = torch.Generator().manual_seed(k)
    tokens = torch.randint(0, 50_000, (10, 100_001), generator=drawn)
    tokens[:2] = 2 ** torch.randint(0, 16, (2, 100_001), generator=drawn)
    want = published_mask(tokens[:, 1:], k, width)
    rule = GoldfishMask(k, width, "hash-table")
    for row, mask in zip(tokens, want, strict=True):
        zeros = np.zeros(100_000, np.int64)
        window = Window(row[:-1].numpy(), row[1:].numpy(), np.arange(100_000), zeros)
        assert np.array_equal(rule.find_dropped(window, 0), mask.numpy())
    assert want.sum() > 1000


def test_about_one_of_k_is_dropped_whatever_the_tokens() -> None:
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(0, 32000, 200_000)
    tokens[::20] = 0
    powers = 2 ** drawn.integers(0, 15, 200_000)
    for k in (2, 3, 8):
        for name in ("hash", "random", "static"):
            for some in (tokens, powers):
                share = GoldfishMask(k, 13, name).find_dropped(window_of(some), 5).mean()
                assert abs(share - 1 / k) < 0.01, (k, name, share)
    # What the published rule does with them is the reason for ours.
    published = GoldfishMask(4, 13, "hash-table")
    assert published.find_dropped(window_of(tokens), 0).mean() > 0.6
    assert published.find_dropped(window_of(powers), 0).mean() > 0.9


@pytest.mark.parametrize("strategy", ["hash", "hash-table", "static"])
def test_a_document_has_one_mask_wherever_it_is(strategy: GoldfishStrategy) -> None:
    drawn = np.random.default_rng(1)
    rule = GoldfishMask(3, 5, strategy, seed=7)
    passage = drawn.integers(1, 1000, 50)
    alone = rule.find_dropped(window_of(passage), 0)[:-1]
    assert alone.any() and not alone.all()
    for before in (1, 4, 37):
        other = drawn.integers(1, 1000, before)
        both = window_of(other, passage, other)
        found = rule.find_dropped(both, before)[before : before + 49]
        assert np.array_equal(found, alone), before
    # The order of tokens matters for ours only.
    swapped = passage.copy()
    swapped[[20, 21]] = swapped[[21, 20]]
    differs = (rule.find_dropped(window_of(swapped), 0)[:-1] != alone)[22:25]
    assert strategy == "hash" or not differs.any()


def test_random_masks_differ_between_samples_only() -> None:
    window = window_of(np.arange(500))
    rule = GoldfishMask(4, 13, "random", seed=3)
    masks = [rule.find_dropped(window, number) for number in (0, 1, 10_000, 0)]
    assert np.array_equal(masks[0], masks[3])
    for other in masks[1:3]:
        # Independent masks of a quarter agree in 10 of 16 places.
        assert 0.5 < (masks[0] == other).mean() < 0.75
    other_seed = GoldfishMask(4, 13, "random", seed=4).find_dropped(window, 0)
    assert not np.array_equal(masks[0], other_seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_targets_that_are_masked_already_do_not_change_the_rule(
    strategy: GoldfishStrategy,
) -> None:
    """A token counts if both masks keep it; what is no answer still is context."""
    drawn = np.random.default_rng(2)
    whole = window_of(drawn.integers(1, 1000, 200))
    answers = drawn.random(200) < 0.5
    some = np.where(answers, whole.targets, IGNORE_INDEX)
    rule = GoldfishMask(4, 6, strategy)
    both = rule.apply(Window(whole.tokens, some, whole.positions, whole.documents), 9).targets
    alone = rule.apply(whole, 9).targets
    assert np.array_equal(both, np.where(answers, alone, IGNORE_INDEX))
    assert (both != IGNORE_INDEX).sum() < (some != IGNORE_INDEX).sum()


def random_corpus(folder: Path) -> Any:
    drawn = np.random.default_rng(3)
    return corpus_of(
        folder, [drawn.integers(1, 500, drawn.integers(2, 60)).tolist() for _ in range(60)]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packed", [True, False])
def test_every_rank_reads_its_part_of_one_mask(
    tmp_path: Path, strategy: GoldfishStrategy, packed: bool
) -> None:
    """Targets of all ranks and micro-batches, put together, are those of one process."""
    stream = random_corpus(tmp_path).open_stream(32, packed=packed)
    assert stream is not None
    rule = GoldfishMask(3, 5, strategy, seed=1)
    mixture = CorpusMixture([stream], [1], 1, goldfish=rule)
    (whole,) = load_micro_batches(mixture, 16, 16, Grid({}), 16)
    dropped = (
        whole.targets
        != load_micro_batches(CorpusMixture([stream], [1], 1), 16, 16, Grid({}), 16)[0].targets
    )
    assert 0.1 < dropped.float().mean() < 0.5
    cost = WindowCost.from_config(DecoderConfig(layers=2, embed=16, heads=2, mlp=32, vocab=500))
    for degrees in ({"data": 2, "depth": 2}, {"context": 2, "expert": 2}, {"context": 4}):
        for balance in (None, cost if packed else None):
            found: dict[int, set[tuple[int, ...]]] = {}
            for rank in range(4):
                grid = Grid(degrees, rank=rank)
                for micro in load_micro_batches(mixture, 16, 16, grid, 2, cost=balance):
                    assert micro.samples is not None and micro.tokens.shape[0] == 2
                    positions = micro.positions
                    for row, number in enumerate(micro.samples.tolist()):
                        place: Sequence[int] = range(32)
                        if isinstance(micro.documents, ContextDocuments):
                            place = micro.documents.token_numbers[row].tolist()
                        pairs = zip(place, micro.targets[row].tolist(), strict=True)
                        found.setdefault(number, set()).update(pairs)
                    assert positions is None or positions.shape == micro.tokens.shape
            assert sorted(found) == list(range(16, 32))
            for number, pairs in found.items():
                want = whole.targets[number - 16].tolist()
                assert [target for _, target in sorted(pairs)] == want, number


def test_windows_stay_inside_documents_without_a_document_mask(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path)
    rule = GoldfishMask(2, 4)
    masks = []
    for packed in (True, False):
        stream = corpus.open_stream(32, packed=packed)
        assert stream is not None
        windows = [stream.read_window(k) for k in range(stream.num_windows - 1)]
        masks.append(np.stack([rule.find_dropped(window, 0) for window in windows]))
    assert np.array_equal(*masks) and masks[0].any()


def test_held_out_samples_keep_their_targets_and_the_fingerprint_knows_the_rule(
    tmp_path: Path,
) -> None:
    folder = random_corpus(tmp_path).folder
    rules = [None, *(GoldfishMask(4, 5, name) for name in STRATEGIES), GoldfishMask(3, 5)]
    found = [open_data([folder], seq=32, seed=0, held_out=0.3, goldfish=rule) for rule in rules]
    assert len({data.fingerprint for data in found}) == len(rules)
    plain = found[0].validation
    assert plain is not None
    for data in found:
        assert data.validation is not None
        for number in range(data.validation.num_windows):
            targets = data.validation.read_sample(number).targets
            assert np.array_equal(targets, plain.read_sample(number).targets)
    assert found[1].summary_lines[-1] == "goldfish hash, k=4, context width 5"
