"""What a corpus is worth: every token once, on every grid what one process finds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation import serial, trained
from pool import Pool
from ranvier.data.corpus import Corpus
from ranvier.errors import DataError
from ranvier.eval.model_server import ModelServer
from ranvier.eval.perplexity import PerplexityResult, compute_perplexity, split_into_windows
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import Grid
from ranvier.infer.load import load_model

SEQ = 16


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_each_token_but_the_first_is_predicted_once(length: int, seq: int, stride: int) -> None:
    stride, tokens = min(stride, seq), np.arange(length)
    found = list(split_into_windows(tokens, seq, stride))
    counted = [token for _, window, first in found for token in window[first + 1 :]]
    assert counted == list(range(1, length))
    for start, window, first in found:
        assert window == list(range(start, start + len(window)))
        assert len(window) <= seq + 1 and 0 <= first < len(window) - 1
        whole = window[0] == 0 or first >= seq - stride
        assert whole, "it has the context that the stride leaves"


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, tmp_path_factory.mktemp("run"))


def measured(grid: Grid, folder: str, stride: int, held_out: float) -> PerplexityResult | None:
    served = ModelServer(
        load_model(Path(folder), grid, "cpu"), EvalTokenizer.from_run(Path(folder)), 4
    )
    corpus = Corpus.open(Path(folder).parent / "corpus")
    return served.run_on_first_rank(
        lambda s: compute_perplexity(s, corpus, seq=SEQ, stride=stride, held_out=held_out)
    )


@pytest.mark.parametrize(
    ("stride", "held_out"), [pytest.param(0, 0.0, marks=pytest.mark.full), (5, 0.3)]
)
def test_it_is_that_of_one_process(pool: Pool, folder: Path, stride: int, held_out: float) -> None:
    model, corpus = serial(folder), Corpus.open(folder.parent / "corpus")
    stream = corpus.open_stream(SEQ, held_out, "held_out" if held_out else "train")
    assert stream is not None
    nats, tokens, size, start = 0.0, 0, 0, 0
    for end, shift in zip(stream.document_ends, stream.corpus_offsets, strict=True):
        ids = torch.tensor(corpus.read_tokens(np.arange(start, end) + shift))
        start = end
        size += sum(1 for token in ids[1:].tolist() if token < 256)
        done = 1
        for begin in range(0, len(ids) - 1, stride or SEQ):
            window = ids[begin : begin + SEQ + 1]
            if begin + len(window) <= done:
                break
            with torch.no_grad():
                log = model(window[None, :-1])[0].log_softmax(-1)
            new = log.gather(1, window[1:, None])[done - begin - 1 :]
            nats, tokens = nats - float(new.sum()), tokens + len(new)
            done = begin + len(window)
    for degrees in ({"row": 2, "depth": 2}, {"pipe": 2, "col": 2}):
        found, *others = pool.on_grid(degrees, measured, str(folder), stride, held_out)
        assert others == [None] * 3
        assert (found.tokens, found.documents, found.bytes) == (tokens, stream.num_documents, size)
        assert found.nats == pytest.approx(nats, rel=1e-12)
        assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-12)
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-12)


def test_a_corpus_of_single_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    from ranvier.data.prepare import prepare_corpus
    from ranvier.data.tokenizer import ByteTokenizer

    (tmp_path / "one.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError):
        prepare_corpus([tmp_path / "one.jsonl"], tmp_path / "corpus", ByteTokenizer())
        compute_perplexity(
            ModelServer(torch.nn.Module(), EvalTokenizer.from_run(folder)),
            Corpus.open(tmp_path / "corpus"),
            seq=4,
        )


def test_of_conversations_answers_count(pool: Pool, folder: Path, tmp_path: Path) -> None:
    """The same as the masked loss of one process."""
    from ranvier.data.chat.template import load_chat_template
    from ranvier.data.chat.tokenize import ChatEncoder
    from ranvier.data.prepare import prepare_corpus
    from ranvier.data.tokenizer import ByteTokenizer

    lines = [{"prompt": "2+2?", "completion": "4."}, {"prompt": "b", "completion": "long enough"}]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ByteTokenizer()
    chat = ChatEncoder(load_chat_template(words, "bytes"), words)
    prepare_corpus([file], tmp_path / "corpus", words, chat=chat)
    corpus, model = Corpus.open(tmp_path / "corpus"), serial(folder)
    nats = tokens = 0.0
    for number in range(2):
        places = corpus.document_starts[number] + np.arange(corpus.document_lengths[number])
        ids, heard = map(torch.tensor, corpus.read_with_mask(places))
        assert 0 < heard.sum() < len(heard)
        with torch.no_grad():
            log = model(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        nats, tokens = nats - float(log[heard[1:]].sum()), tokens + int(heard[1:].sum())
    served = ModelServer(load_model(folder, Grid({}), "cpu"), EvalTokenizer.from_run(folder), 4)
    found = compute_perplexity(served, corpus, seq=200)
    assert (found.tokens, found.bytes) == (tokens, 0)
    assert found.nats == pytest.approx(nats, rel=1e-12)
