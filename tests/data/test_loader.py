"""Loader: order, errors, closing; the rows of a rank are those that Batch would give it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from corpora import corpus_of

from ranvier.data.batch import Batch
from ranvier.data.corpus import DocumentStream
from ranvier.data.loader import Loader, load_micro_batches, rank_rows, validation_batches
from ranvier.data.mixture import CorpusMixture
from ranvier.grid import Grid
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import IGNORE_INDEX


def test_things_come_in_order_and_not_too_early() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number * 10

    with Loader(make, first=5, ahead=3) as loader:
        assert [next(loader) for _ in range(50)] == [10 * n for n in range(5, 55)]
        time.sleep(0.05)
        assert made[-1] <= 55 + 3
    assert made == list(range(5, 5 + len(made)))


def test_an_error_comes_in_its_place_and_stays() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    with Loader(make) as loader:
        assert [next(loader), next(loader)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="two"):
                next(loader)


def test_closing_ends_the_thread_also_when_it_is_full() -> None:
    before = threading.active_count()
    loader = Loader(lambda number: number, ahead=1)
    time.sleep(0.02)
    start = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - start < 30
    assert threading.active_count() == before
    assert list(loader) == []


def test_waiting_is_counted_once() -> None:
    def make(number: int) -> int:
        time.sleep(0.05)
        return number

    with Loader(make, ahead=1) as loader:
        next(loader)
        assert 0.02 < loader.take_wait_seconds() < 5
        assert loader.take_wait_seconds() == 0.0


@pytest.fixture
def stream(tmp_path: Path) -> DocumentStream:
    made = corpus_of(tmp_path, [[i, i + 1, i + 2] for i in range(40)]).open_stream(4)
    assert made is not None
    return made


GRIDS = [{}, {"data": 2, "row": 2}, {"pipe": 2, "data": 2, "expert": 2, "context": 2, "depth": 3}]


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_a_rank_reads_the_rows_that_a_batch_gives_it(
    stream: DocumentStream, degrees: dict[str, int]
) -> None:
    mixture = CorpusMixture([stream], [1], seed=1)
    whole = [mixture.read_sample(100 + i) for i in range(24)]
    names = ("tokens", "targets", "positions", "documents")
    stacked = [torch.stack([torch.tensor(getattr(w, n)) for w in whole]) for n in names]
    batch = Batch(*stacked, samples=torch.arange(100, 124))
    for rank in range(Grid(degrees).world_size):
        grid = Grid(degrees, rank=rank)
        found = load_micro_batches(mixture, 100, 24, grid, 2)
        expected = batch.split_micro_batches(grid, 2)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            for name in ("tokens", "targets", "positions", "samples"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            documents, wanted = mine.documents, theirs.documents
            if isinstance(documents, ContextDocuments):
                assert isinstance(wanted, ContextDocuments)
                assert documents.orders == wanted.orders and documents.index == wanted.index
                documents, wanted = documents.token_numbers, wanted.token_numbers
            assert isinstance(documents, torch.Tensor) and isinstance(wanted, torch.Tensor)
            assert torch.equal(documents, wanted)


def test_the_thread_makes_no_group() -> None:
    grid = Grid({"data": 2, "depth": 2}, rank=3)
    assert rank_rows(8, grid) == range(6, 8)
    assert not grid._axes


def test_without_packing_a_batch_has_no_documents(tmp_path: Path) -> None:
    stream = corpus_of(tmp_path, [[1, 2, 3]]).open_stream(4, packed=False)
    assert stream is not None
    (batch,) = load_micro_batches(CorpusMixture([stream], [1], 0), 0, 1, Grid({}), 1)
    assert batch.positions is None and batch.documents is None
    assert batch.samples is not None and batch.samples.tolist() == [0]


def test_held_out_samples_come_once_and_are_filled_up(stream: DocumentStream) -> None:
    found: list[list[int]] = []
    blanks = 0
    count = stream.num_windows  # 30 in batches of 8
    for rank in range(4):
        grid = Grid({"data": 4}, rank=rank)
        batches = list(validation_batches(stream, count, 8, grid, 1))
        assert [len(micros) for micros in batches] == [2, 2, 2, 2]
        for micro in (micro for micros in batches for micro in micros):
            assert micro.tokens.shape == (1, 4) and micro.samples is not None
            if micro.samples[0] < count:
                found.append(micro.tokens[0].tolist())
            else:
                blanks += 1
                assert (micro.targets == IGNORE_INDEX).all()
    assert sorted(found) == sorted(stream.read_window(k).tokens.tolist() for k in range(count))
    assert blanks == 2
