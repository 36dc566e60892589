"""Small corpora for the tests: documents given as lists of tokens, or texts as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ranvier.data.cache import index_pairs
from ranvier.data.corpus import Corpus
from ranvier.data.indexed_dataset import IndexedDatasetBuilder


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> Path:
    """A pair of documents; its prefix."""
    writer = IndexedDatasetBuilder(prefix, dtype)
    for document in documents:
        writer.add_document(np.array(document, np.int64))
    writer.close()
    return prefix


def corpus_of(folder: Path, *shards: Sequence[Sequence[int]]) -> Corpus:
    """A corpus of documents in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [write_pair(folder / f"part{i}", shard) for i, shard in enumerate(shards)]
    return Corpus.open(index_pairs(pairs, folder / "cache"))
