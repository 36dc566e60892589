"""Needles: exact lengths, places by depth, and documents that repeat their needles at the end."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from commands import call
from ranvier.data.corpus import Corpus
from ranvier.data.needles import (
    Haystack,
    NeedleBuilder,
    NeedleTemplate,
    build_training_documents,
    draw_needles,
    nearest_break,
)
from ranvier.data.tokenizer import ByteTokenizer

TEXT = "".join(f"line {number} of the text\n" for number in range(400))
SENTENCE = re.compile(r"\nThe magic number of (\w+ \w+) is (\d{5})\.")


def make_builder(text: str = TEXT, needle: str = "") -> NeedleBuilder:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    template = NeedleTemplate(needle) if needle else NeedleTemplate()
    return NeedleBuilder(template, ByteTokenizer(), Haystack(tokens, tokens == ord("\n")))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("length", [150, 3000])
def test_a_prompt_has_its_needle_at_its_depth_and_asks_for_it(length: int, depth: float) -> None:
    builder = make_builder()
    for seed in range(5):
        draw = np.random.default_rng(seed)
        found = builder.build_prompt(length, depth, distractors=0, draw=draw)
        assert len(found.tokens) + builder.answer_tokens == length
        text = ByteTokenizer().decode(found.tokens)
        ((key, value),) = SENTENCE.findall(text)
        assert (key, value) == (found.needle.key, found.needle.value)
        body, _, question = text.rpartition("\n")
        assert question == f"The magic number of {key} is"
        place = SENTENCE.search(text)
        assert place is not None
        size = place.end() - place.start() + 1
        share = place.start() / (len(body) - size)
        assert abs(share - depth) <= 0.05 + 1 / (len(body) - size), "at most a line break away"
        if depth in (0.0, 1.0):
            assert share == depth
        elif length == 3000:
            assert text[place.start() - 1] == "\n", "between two lines"


def test_distractors_have_other_keys_and_do_not_change_the_length() -> None:
    builder = make_builder()
    draw = np.random.default_rng(1)
    found = builder.build_prompt(2000, 0.5, distractors=20, draw=draw)
    planted = SENTENCE.findall(ByteTokenizer().decode(found.tokens))
    assert len(planted) == len({key for key, _ in planted}) == 21
    assert (found.needle.key, found.needle.value) in planted
    assert len(found.tokens) + builder.answer_tokens == 2000


def test_documents_have_exact_lengths_and_repeat_every_needle() -> None:
    builder = make_builder()
    lengths = [256, 1024]
    documents = list(
        build_training_documents(builder, lengths, tokens=40_000, max_needles=0, seed=0)
    )
    sizes = [len(tokens) for tokens in documents]
    assert sizes == sorted(sizes, reverse=True) and {*sizes} == {*lengths}
    assert sizes.count(256) == 4 * sizes.count(1024) and sum(sizes) == 38_912
    counts = set()
    for tokens in documents:
        assert tokens[-1] == ByteTokenizer().eos_token_id
        assert not (tokens[:-1] == ByteTokenizer().eos_token_id).any()
        planted = SENTENCE.findall(ByteTokenizer().decode(tokens))
        half = len(planted) // 2
        assert sorted(planted[:half]) == sorted(planted[half:])
        counts.add(half)
    assert {1, 2} <= counts and max(counts) <= builder.max_needles(1024)
    again = build_training_documents(builder, lengths, tokens=40_000, max_needles=0, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(documents, again, strict=True))


def test_a_short_text_is_repeated_and_a_text_without_lines_is_cut_anywhere() -> None:
    builder = make_builder("no end of a line ")
    draw = np.random.default_rng(0)
    found = builder.build_prompt(500, 0.5, distractors=0, draw=draw)
    assert len(found.tokens) + builder.answer_tokens == 500
    assert nearest_break(0.5, 100, np.array([48, 53])) == 48
    assert nearest_break(0.5, 100, np.array([20])) == 50, "too far away"


def test_answers_are_exact() -> None:
    template = NeedleTemplate()
    assert template.find_problem() == ""
    for said, right in ((" 12345.", True), ("12345", True), (" 12345 and", True)):
        assert template.is_answer(said, "12345") is right
    for said in ("", " 123456.", " 1234", " is 12345", "\n12345"):
        assert not template.is_answer(said, "12345")
    for text in ("no places", "{value} of {key}", "{key} {key} {value}", "{key} {value}0"):
        assert "Use 'The magic number" in NeedleTemplate(text).find_problem()
    keys = [one.key for one in draw_needles(1000, np.random.default_rng(0))]
    assert len({*keys}) == 1000


def test_the_command_writes_samples_of_whole_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    words = ("data", "needles", "text.txt", "--tokenizer", "bytes", "--tokens", "30000")
    assert call(*words, "--lengths", "192", "384", "--output", "made") == 0
    assert "--data.seq-len 384" in capsys.readouterr().out
    corpus = Corpus.open("made")
    stream = corpus.open_stream(384, 0.3, "train")
    assert stream is not None and stream.num_documents < corpus.manifest.documents
    for number in range(stream.num_windows - 1):
        # Also with documents held out, each window has one document or two halves.
        starts = np.flatnonzero(stream.read_window(number).positions == 0).tolist()
        assert starts in ([0], [0, 192]), starts
    for options, message in (
        (("--lengths", "64"), "lengths=64 is too short"),
        (("--lengths", "500", "1024"), "lengths=500 does not divide 1024"),
        (("--lengths", "0"), "lengths=[0] is invalid"),
        (("--tokens", "3"), "tokens=3 is out of range"),
        (("--needle", "x"), "needle='x' has {key} 0 times"),
    ):
        assert call(*words, *options) != 0
        assert message in capsys.readouterr().err
