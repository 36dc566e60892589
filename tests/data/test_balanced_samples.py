"""The samples of a step are assigned to ranks and micro-batches by cost, and remain the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of

from ranvier.data.corpus import DocumentStream
from ranvier.data.loader import load_micro_batches
from ranvier.data.mixture import CorpusMixture
from ranvier.data.window_assignment import WindowCost
from ranvier.grid import Grid
from ranvier.models import MODEL_SIZES
from ranvier.models.document_attention import Documents

SEQ = 64


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> CorpusMixture:
    """Short documents, and some that fill a window."""
    drawn = np.random.default_rng(0)
    sizes = [int(n) for n in np.where(drawn.random(400) < 0.1, 64, drawn.integers(1, 12, 400))]
    folder: Path = tmp_path_factory.mktemp("corpus")
    stream = corpus_of(folder, [[i % 50 + 1] * n for i, n in enumerate(sizes)]).open_stream(SEQ)
    assert isinstance(stream, DocumentStream)
    return CorpusMixture([stream], [1], seed=1)


def test_lengths_of_documents_are_known_without_the_tokens(mixture: CorpusMixture) -> None:
    for number in range(2 * mixture.num_windows):
        batch = mixture.read_batch([number])
        assert mixture.document_lengths(number) == Documents.from_ids(batch.documents).lengths[0]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_share_the_samples_of_a_step_by_cost(
    mixture: CorpusMixture, micro_batch: int
) -> None:
    cost = WindowCost.from_config(MODEL_SIZES["tiny"])
    degrees = {"data": 2, "depth": 2}
    worst = {}
    for how in (None, cost):
        work = np.zeros((4, 8 // micro_batch))
        found = []
        for rank in range(4):
            grid = Grid(degrees, rank=rank)
            micros = load_micro_batches(mixture, 100, 32, grid, micro_batch, cost=how)
            for i, micro in enumerate(micros):
                assert micro.samples is not None
                numbers = micro.samples.tolist()
                found += numbers
                work[rank, i] = sum(
                    cost.of_documents(mixture.document_lengths(number)) for number in numbers
                )
        assert sorted(found) == list(range(100, 132))
        # Ranks wait for the most expensive one in every micro-batch.
        worst[how] = work.max(0).sum() / (work.sum() / 4)
    assert worst[cost] < worst[None]
    assert worst[cost] < 1.02
