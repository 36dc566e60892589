"""The embedded corpus.

Order by (seed, number), windows that cover it, documents that stay apart.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranvier.data.corpus import END, Corpus, packing, standard_library
from ranvier.errors import DataError


def test_an_epoch_reads_every_window_once_in_an_order_of_its_own() -> None:
    corpus = Corpus.of(np.arange(1001, dtype=np.uint16), seq=10)
    assert corpus.windows == 100
    first = [corpus.window(k, 3) for k in range(100)]
    second = [corpus.window(k, 3) for k in range(100, 200)]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second and first != [corpus.window(k, 4) for k in range(100)]


def test_a_batch_is_its_samples_whatever_its_size() -> None:
    corpus = Corpus.of(np.arange(1001, dtype=np.uint16), seq=10)
    tokens, targets = corpus.batch(5, 4, seed=1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens[2:], corpus.batch(7, 2, seed=1)[0])


def test_documents_and_positions_restart_after_an_end() -> None:
    documents, positions = packing(torch.tensor([[5, END, 7, 8, END, 9]]))
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]


def test_a_corpus_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"The corpus has 10 tokens\. A sample needs 11"):
        Corpus.of(np.arange(10, dtype=np.uint16), seq=10)


def test_the_standard_library_is_read_up_to_a_limit() -> None:
    stream = standard_library(20_000)
    assert 20_000 <= len(stream) < 20_100 and stream.max() == END
    assert "import" in bytes(stream[stream < END].astype(np.uint8)).decode(errors="ignore")
