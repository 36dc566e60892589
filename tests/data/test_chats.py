"""Conversations in windows: whole, apart from each other, and with targets in answers only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.data.chat.template import load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.corpus import Corpus
from ranvier.data.dataset import TextData, cache_corpora, open_data
from ranvier.data.manifest import CorpusManifest
from ranvier.data.packing import ConversationStream, Packing, pack_pieces
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError
from ranvier.nn.cross_entropy import IGNORE_INDEX

PACKINGS: tuple[Packing, ...] = ("balanced", "full")
ANSWERS = ["ab", "a long answer of many words", "c", "", "of some words", "yes and no"] * 4


def talks(path: Path, answers: list[str] = ANSWERS) -> Path:
    """A file of conversations, a question and an answer each."""
    with path.open("w", encoding="utf-8") as file:
        for number, answer in enumerate(answers):
            said = [{"role": "user", "content": f"q{number}"}]
            said += [{"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")
    return path


def corpus_of(folder: Path, answers: list[str] = ANSWERS, **options: Any) -> Corpus:
    chat = ChatEncoder(load_chat_template(ByteTokenizer(), "bytes"), ByteTokenizer())
    path = talks(folder / "talks.jsonl", answers)
    prepare_corpus([path], folder / "made", ByteTokenizer(), chat=chat, **options)
    return Corpus.open(folder / "made")


def opened(folder: Path, seq: int, **options: Any) -> TextData:
    return open_data([folder / "made"], **{"seq": seq, "seed": 0, **options})


def stream_of(corpus: Corpus, seq: int, **options: Any) -> ConversationStream:
    found = corpus.open_stream(seq, **options)
    assert isinstance(found, ConversationStream)
    return found


def read(stream: ConversationStream) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of each piece, window after window; all else is checked here."""
    found = []
    for number in range(stream.num_windows):
        window = stream.read_window(number)
        last = window.documents[-1]
        for document in range(int(last) + 1):
            mine = np.flatnonzero(window.documents == document)
            assert np.array_equal(mine, np.arange(mine[0], mine[-1] + 1))
            assert np.array_equal(window.positions[mine], np.arange(len(mine)))
            tokens, targets = window.tokens[mine].tolist(), window.targets[mine].tolist()
            if not any(tokens) and document == last:
                assert set(targets) == {IGNORE_INDEX}, "padding has no targets"
            else:
                found.append((tokens, targets))
    return found


def text_of(number: int, answer: str) -> tuple[list[int], list[int]]:
    """Tokens and targets of a conversation, written down by hand."""
    head = [*f"user\nq{number}".encode(), 256, *b"\nassistant\n"]
    said = [*answer.encode(), 256]
    return [*head, *said, 10], [
        *[IGNORE_INDEX] * (len(head) - 1),
        *said,
        IGNORE_INDEX,
        IGNORE_INDEX,
    ]


@pytest.mark.parametrize("shard_tokens", [60, 1 << 20])
def test_every_conversation_is_there_once_with_its_answer(
    tmp_path: Path, shard_tokens: int
) -> None:
    corpus = corpus_of(tmp_path, shard_tokens=shard_tokens)
    assert (len(corpus.indexed_datasets) > 5) == (shard_tokens == 60)
    wanted = sorted(text_of(number, answer) for number, answer in enumerate(ANSWERS))
    stream = stream_of(corpus, 100)
    assert sorted(read(stream)) == wanted and stream.num_windows < len(ANSWERS) // 2
    alone = stream_of(corpus, 100, packed=False)
    assert (
        alone.num_windows == len(ANSWERS)
        and alone.num_tokens == stream.num_tokens == corpus.document_lengths.sum()
    )
    for number, (tokens, targets) in enumerate(wanted):
        one = alone.read_window(number)
        tokens, targets = text_of(number, ANSWERS[number])
        assert one.tokens[: len(tokens)].tolist() == tokens and not one.tokens[len(tokens) :].any()
        assert one.targets[: len(tokens)].tolist() == targets
        assert set(one.targets[len(tokens) :]) == {IGNORE_INDEX}
        assert np.array_equal(one.positions, np.arange(100))
        assert one.documents.tolist() == [int(i >= len(tokens)) for i in range(100)]


def test_what_is_longer_than_a_window(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, ["ab", "x" * 40, "", "y" * 100])
    whole = [text_of(n, answer) for n, answer in enumerate(["ab", "x" * 40, "", "y" * 100])]
    seq = 50

    def pieces(truncate: Any) -> list[tuple[list[int], list[int]]]:
        return sorted(read(stream_of(corpus, seq, truncate=truncate)))

    short = [one for one in whole if len(one[0]) <= seq]
    assert pieces("drop") == sorted(short) and len(short) == 2
    cut = [(tokens[:seq], [*targets[: seq - 1], IGNORE_INDEX]) for tokens, targets in whole]
    assert pieces("right") == sorted(short + [one for one in cut if len(one[0]) == seq])
    tail = [(tokens[-seq:], targets[-seq:]) for tokens, targets in whole if len(tokens) > seq]
    assert pieces("left") == sorted(short + tail)
    split = [
        (tokens[i : i + seq], targets[i : i + seq])
        for tokens, targets in whole
        for i in range(0, len(tokens), seq)
    ]
    heard = [one for one in split if set(one[1]) != {IGNORE_INDEX}]
    assert pieces("split") == sorted(heard)
    total = sum(x != IGNORE_INDEX for _, targets in whole for x in targets)
    assert total == sum(x != IGNORE_INDEX for _, targets in pieces("split") for x in targets)
    assert stream_of(corpus, seq, truncate="drop").summary_line.count("2 longer ones dropped") == 1


def test_nothing_to_learn_is_left_out_and_counted(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, ["ab", "cd"])
    with pytest.raises(DataError, match=r"nothing to learn.*data\.seq_len=8") as refused:
        opened(tmp_path, 8)
    assert str(refused.value).startswith(corpus.manifest.source), "the file, not its tokens"
    assert "2 dropped without a target" not in opened(tmp_path, 40).summary_lines[1]
    everything = stream_of(corpus, 8, loss_on="all")
    assert everything.num_documents == 2 and everything.pieces.num_long == 2
    tokens, targets = read(everything)[0]
    assert targets == [*tokens[1:], IGNORE_INDEX]
    talk = [{"role": "user", "content": "?"}]
    path = tmp_path / "mixed.jsonl"
    answered = [*talk, {"role": "assistant", "content": "!"}]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (talk, answered)))
    prepare_corpus([path], tmp_path / "mixed", ByteTokenizer(), chat=corpus.chat_encoder)
    data = open_data([tmp_path / "mixed"], seq=40, seed=0)
    assert (
        "1 conversations" in data.summary_lines[1]
        and "1 dropped without a target" in data.summary_lines[1]
    )
    assert "(0 held out)" in data.summary_lines[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_windows_hold_each_piece_once_and_are_well_filled(lengths: list[int], seq: int) -> None:
    order, bounds = pack_pieces(np.array(lengths, np.int64), seq)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in order[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(sizes) <= seq and min(sizes) > 0
    # no two windows could be one: what best fit promises
    assert len(sizes) < 2 or sum(sorted(sizes)[:2]) > seq


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(40, 80))
def test_balanced_windows_hold_each_piece_once_and_are_hardly_more(
    lengths: list[int], seq: int
) -> None:
    full = len(pack_pieces(np.array(lengths), seq)[1])
    order, bounds = pack_pieces(np.array(lengths), seq, "balanced")
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in order[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(sizes) <= seq and min(sizes) > 0
    assert len(sizes) <= 1.01 * (full - 1)


def test_a_window_with_the_least_work_may_have_no_room() -> None:
    """Ten short pieces fill a window, and have less work than one long piece."""
    lengths = np.array([40] + [10] * 16)
    order, bounds = pack_pieces(lengths, 100, "balanced")
    assert np.add.reduceat(lengths[order], bounds[:-1]).tolist() == [100, 100]


@pytest.mark.parametrize("kind", ["uniform", "long_tail", "short_and_long"])
def test_balanced_windows_have_similar_attention_work(kind: str) -> None:
    drawn = np.random.default_rng(0)
    few = drawn.random(4000) < 0.1
    lengths = {
        "uniform": drawn.integers(5, 300, 4000),
        "long_tail": np.clip(np.exp(drawn.normal(4, 1, 4000)).astype(int), 2, 820),
        "short_and_long": np.where(
            few, drawn.integers(200, 820, 4000), drawn.integers(2, 60, 4000)
        ),
    }[kind]
    spread = {}
    filled = {}
    for packing in PACKINGS:
        order, bounds = pack_pieces(lengths, 820, packing)
        work = np.add.reduceat(lengths[order].astype(float) ** 2, bounds[:-1])
        spread[packing] = work.std() / work.mean()
        filled[packing] = lengths.sum() / (820 * (len(bounds) - 1))
    limit = {"uniform": 0.3, "long_tail": 0.85, "short_and_long": 0.9}[kind]
    assert spread["balanced"] < limit * spread["full"], spread
    assert filled["balanced"] > 0.99 * filled["full"], filled


@pytest.mark.parametrize("truncate", ["right", "split"])
def test_packings_have_the_same_conversations_cut_alike(tmp_path: Path, truncate: str) -> None:
    corpus = corpus_of(tmp_path, ["word " * (n * n % 23) + "end" for n in range(80)])
    streams = [stream_of(corpus, 64, truncate=truncate, packing=packing) for packing in PACKINGS]
    found = [read(stream) for stream in streams]
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1])


def test_held_out_order_and_mixing_with_texts(tmp_path: Path) -> None:
    corpus_of(tmp_path, [f"answer {n}" for n in range(60)])
    (tmp_path / "text.txt").write_text("some words " * 200)
    texts = cache_corpora([str(tmp_path / "text.txt")], cache=tmp_path / "cache", tokenizer="bytes")
    data = open_data(
        [tmp_path / "made", *texts], seq=64, seed=3, held_out=0.3, weights=[3.0, 1.0], packed=True
    )
    assert data.validation is not None
    aside, kept = data.validation.streams[0], data.train.streams[0]
    assert aside.num_documents > 0 and aside.num_documents + kept.num_documents == 60
    assert f"({aside.num_documents} held out)" in data.summary_lines[0]
    assert data.train.quotas == [7500, 2500]
    for number in range(20):
        share = (data.train.read_sample(number).targets != IGNORE_INDEX).mean()
        assert (share < 0.6) == (data.train.pick_stream(number)[0] == 0)
    again = open_data([tmp_path / "made", *texts], seq=64, seed=3, held_out=0.3, weights=[3.0, 1.0])
    for number in (0, 7, 12_345):
        assert np.array_equal(
            again.train.read_sample(number).tokens, data.train.read_sample(number).tokens
        )


def test_chats_are_known_by_their_first_record(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "cache", "tokenizer": "bytes", "verify": True}
    path = talks(tmp_path / "talks.jsonl")
    (folder,) = cache_corpora([str(path)], **options)
    manifest = CorpusManifest.read_from(folder)
    assert manifest.template and manifest.learn == "answers" and manifest.documents == len(ANSWERS)
    assert cache_corpora([str(path)], **options) == [folder]
    (other,) = cache_corpora([str(path)], loss_on="all", **options)
    assert other != folder and CorpusManifest.read_from(other).fingerprint != manifest.fingerprint
    with pytest.raises(DataError, match=r"data\.loss_on=all"):
        open_data([other], seq=64, seed=0)
    assert open_data([other], seq=64, seed=0, loss_on="all").train.num_windows > 0
    array = tmp_path / "talks.json"
    array.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()]))
    (same,) = cache_corpora([str(array)], **options)
    assert CorpusManifest.read_from(same).fingerprint == manifest.fingerprint
    (tmp_path / "both.jsonl").write_text('{"text": "a text", "messages": []}\n')
    (text,) = cache_corpora([str(tmp_path / "both.jsonl")], **options)
    assert not CorpusManifest.read_from(text).template
    with pytest.raises(DataError, match="no field 'text'"):
        cache_corpora([str(path)], form="text", **options)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match=r"data\.format=chat"):
        cache_corpora([str(tmp_path / "x.txt")], form="chat", **options)
    path.write_text(path.read_text() + '{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match=r"talks.jsonl:25: message 0"):
        cache_corpora([str(path)], **options)


def test_parquet_holds_chats_too(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in talks(tmp_path / "t.jsonl").read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    options: dict[str, Any] = {"cache": tmp_path / "cache", "tokenizer": "bytes"}
    found = [
        CorpusManifest.read_from(cache_corpora([str(tmp_path / name)], **options)[0]).fingerprint
        for name in ("t.parquet", "t.jsonl")
    ]
    assert found[0] == found[1]


def test_a_changed_mask_or_template_is_found(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    mask = tmp_path / "made" / "shard-00000.mask"
    raw = bytearray(mask.read_bytes())
    raw[0] ^= 1
    mask.write_bytes(raw)
    with pytest.raises(DataError, match=r"shard-00000\.mask is changed or damaged"):
        corpus.manifest.check_files(corpus.folder, verify=True)
    mask.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=r"shard-00000\.mask cannot be read"):
        opened(tmp_path, 64)
    config = tmp_path / "made" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("assistant", "helper"))
    with pytest.raises(DataError, match=r"tokenizer_config\.json is changed"):
        _ = Corpus.open(tmp_path / "made").chat_encoder
