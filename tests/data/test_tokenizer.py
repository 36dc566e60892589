"""Tokenizers: round trips, fingerprints, the standard one and its cache, files of others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranvier.data import tokenizer as module
from ranvier.data.tokenizer import (
    END_TOKEN,
    ByteTokenizer,
    load_tokenizer,
    parse_tokenizer,
    train_tokenizer,
)
from ranvier.errors import DataError, PlanError

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "def f(x):\n    return x",
    "",
    "naïve — 漢字 🙂\r\n",
    f"not an {END_TOKEN} of mine",
    "\0\t" * 3,
]


@pytest.fixture
def bpe() -> module.Tokenizer:
    return train_tokenizer(TEXTS * 3, 300)


def test_bytes_are_the_bytes_of_utf8() -> None:
    made = ByteTokenizer()
    assert (made.vocab_size, made.eos_token_id) == (257, 256)
    for text, ids in zip(TEXTS, made.encode(TEXTS), strict=True):
        assert ids.tolist() == list(text.encode())
        assert made.decode([*ids, made.eos_token_id]) == text
    assert made.decode([0xFF, 65]) == "\ufffdA"


def test_the_file_of_bytes_is_read_by_us_and_by_the_library(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer(str(tmp_path), tmp_path), ByteTokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.token_to_id(END_TOKEN) == 256
    for text in [*TEXTS[:3], "".join(map(chr, range(256)))]:
        ids = theirs.encode(text).ids
        assert ids == list(text.encode())
        assert theirs.decode(ids) == text


def test_bpe_goes_there_and_back(bpe: module.Tokenizer, tmp_path: Path) -> None:
    assert bpe.vocab_size <= 300
    for text, ids in zip(TEXTS, bpe.encode(TEXTS), strict=True):
        assert bpe.eos_token_id not in ids, "a text cannot end itself"
        assert bpe.decode([*ids, bpe.eos_token_id]) == text
    bpe.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path, tmp_path)
    assert again == bpe and again.fingerprint == bpe.fingerprint != ByteTokenizer().fingerprint
    assert [x.tolist() for x in again.encode(TEXTS)] == [x.tolist() for x in bpe.encode(TEXTS)]
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_halves_of_surrogates_are_replaced(bpe: module.Tokenizer) -> None:
    for made in (bpe, ByteTokenizer()):
        (ids,) = made.encode(["a\ud800b\ud83d\ude42"])
        assert made.decode(ids) == "a\ufffdb🙂"


def test_truncation_and_padding_of_a_file_are_off(bpe: module.Tokenizer) -> None:
    theirs = tokenizers.Tokenizer.from_str(bpe.json_text)
    theirs.enable_truncation(2)
    theirs.enable_padding(length=8)
    cut = parse_tokenizer(theirs.to_str(), "cut")
    assert [x.tolist() for x in cut.encode(TEXTS)] == [x.tolist() for x in bpe.encode(TEXTS)]


def test_layout_of_the_json_does_not_count_but_content_does(bpe: module.Tokenizer) -> None:
    content = json.loads(bpe.json_text)
    assert parse_tokenizer(json.dumps(content, indent=3), "x").fingerprint == bpe.fingerprint
    content["model"]["merges"].pop()
    assert parse_tokenizer(json.dumps(content), "x").fingerprint != bpe.fingerprint


@pytest.mark.parametrize("end", module.END_TOKENS)
def test_the_end_is_found_among_known_names(end: str) -> None:
    vocab = {"a": 0, end: 5}
    made = parse_tokenizer(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}), "x")
    assert (made.eos_token_id, made.vocab_size) == (5, 6)
    pieces = [["a", 0.0], ["b", -1.0]]
    added = [{"id": 2, "content": end}]
    made = parse_tokenizer(json.dumps({"model": {"vocab": pieces}, "added_tokens": added}), "x")
    assert (made.eos_token_id, made.vocab_size) == (2, 3)


@pytest.mark.parametrize(
    ("config", "special", "end"),
    [
        ({"eos_token": "[EOS]"}, None, 1),
        ({"eos_token": {"content": "[EOS]", "lstrip": False}}, None, 1),
        ({}, {"eos_token": {"content": "[EOS]"}}, 1),
        ({"eos_token": None}, {"eos_token": "[EOS]"}, 1),
        ({"eos_token": "<|endoftext|>"}, {"eos_token": "[EOS]"}, 3),  # as in Phi-3
        ({"eos_token": "not a token"}, None, 2),
        ({"eos_token": "3"}, None, 4),
        (None, None, 2),
    ],
)
def test_the_end_is_the_one_the_files_beside_it_name(
    config: object, special: object, end: int, tmp_path: Path
) -> None:
    vocab = {"a": 0, "[EOS]": 1, END_TOKEN: 2, "<|endoftext|>": 3, "3": 4}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocab}}))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    made = load_tokenizer(tmp_path, tmp_path)
    assert made == load_tokenizer(path, tmp_path) and made.eos_token_id == end
    # Wherever it is saved it is found again, and what lies there is kept.
    other = tmp_path / "other"
    other.mkdir()
    for there in ({}, {"eos_token": "a", "chat_template": "x"}):
        (other / "tokenizer_config.json").write_text(json.dumps(there))
        made.save(other / "tokenizer.json")
        assert load_tokenizer(other, tmp_path) == made
        kept = json.loads((other / "tokenizer_config.json").read_text())
        assert kept.get("chat_template") == there.get("chat_template")
    path.rename(tmp_path / "alone.json")
    assert load_tokenizer(tmp_path / "alone.json", tmp_path).eos_token_id == 2, (
        "nothing is beside it"
    )


def test_a_tokenizer_that_nothing_ends_says_where_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "[EOS]": 1}}}')
    with pytest.raises(
        DataError, match=r"no end-of-document token.*eos_token of the tokenizer_config\.json"
    ):
        load_tokenizer(tmp_path, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not a valid JSON object"):
        load_tokenizer(tmp_path, tmp_path)


def test_the_standard_one_is_trained_once_and_again_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STANDARD_BYTES", 60_000)
    monkeypatch.setattr(module, "STANDARD_VOCAB", 400)
    made = load_tokenizer("standard", tmp_path / "new")
    assert made.vocab_size == 400
    (path,) = (tmp_path / "new").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_tokenizer", None)
        assert load_tokenizer("standard", tmp_path / "new") == made
    path.write_text(made.json_text[:1000])
    assert load_tokenizer("standard", tmp_path / "new") == made
    assert path.read_text() == made.json_text


def test_training_is_the_same_in_every_process() -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path}\n"
        "from ranvier.data.sources import read_documents\n"
        "from ranvier.data.tokenizer import train_tokenizer\n"
        "print(train_tokenizer(read_documents('stdlib', max_bytes=100_000), 600).fingerprint)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        for threads in ("1", "3")
    ]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.strip()) == 32


def test_training_is_interrupted_before_its_end() -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path}\n"
        "import os, random, signal, threading, time\n"
        "from ranvier.data.tokenizer import train_tokenizer\n"
        "def texts():\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    yield random.Random(0).randbytes(10_000_000).hex()\n"  # half a minute of merges
        "start = time.monotonic()\n"
        "try:\n"
        "    train_tokenizer(texts(), 20_000)\n"
        "except KeyboardInterrupt:\n"
        "    print(time.monotonic() - start)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 8


def test_training_stops_to_read_when_interrupted() -> None:
    reading = threading.Event()
    seconds = []

    def texts() -> Iterator[str]:
        reading.set()
        while True:
            yield "abc " * 100
            time.sleep(0.001)

    def interrupt() -> None:
        assert reading.wait(30)
        seconds.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), 300)
    assert time.monotonic() - seconds[0] < 60
    left = [thread for thread in threading.enumerate() if thread.name == "trained tokenizer"]
    for thread in left:
        thread.join(10)
        assert not thread.is_alive(), "it stops reading"


def test_a_bad_document_in_training_is_told() -> None:
    def texts() -> Iterator[str]:
        yield "abc"
        raise DataError("line 7 is broken")

    with pytest.raises(DataError, match="line 7 is broken"):
        train_tokenizer(texts(), 300)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("byte", None, r"'byte' cannot be read.*A tokenizer is 'bytes'.*Did you mean 'bytes'\?"),
        ("none/here.json", None, r"No such file.*Check the path"),
        ("bad.json", b"{", r"bad.json is not a valid tokenizer.json: JSONDecodeError"),
        ("bad.json", b"[1]", r"bad.json is not a valid tokenizer.json: TypeError"),
        ("bad.json", b'{"model": {}}', r"KeyError: 'vocab'"),
        ("bad.json", b"\xff", r"it is not UTF-8"),
        ("x" * 300, None, r"cannot be read: .*: File name too long.*Check the path"),
        ("a\0b.json", None, r"cannot be read: .*: embedded null byte.*Check the path"),
        *(
            ("bad.json", b'{"model": {"vocab": {"</s>": 0, "a": %s}}}' % i, rf"id of 'a' is {said}")
            for i, said in [
                *((b"Infinity", "inf"), (b"NaN", "nan"), (b"-1", "-1"), (b"1e400", "inf")),
                *((b"1.5", r"1\.5"), (b"2147483648", "2147483648"), (b'"7"', "'7'")),
                *((b"true", "True"), (b"null", "None"), (b"9" * 400, "9{80},")),
            ]
        ),
        (
            "bad.json",
            b'{"model": {"vocab": {}}, "added_tokens": [{"content": "</s>", "id": Infinity}]}',
            r"id of '</s>' is inf, not in the range 0 to 2\^31 - 1",
        ),
        ("bad.json", b'{"model": {"vocab": {"a": 0}}}', r"1 tokens, but no end-of-document token"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, name: str, text: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(DataError, match=message):
        load_tokenizer(name if name == "byte" else path, tmp_path)


def test_a_json_the_library_refuses_and_a_vocabulary_too_small(tmp_path: Path) -> None:
    made = parse_tokenizer('{"model": {"type": "no", "vocab": {"</s>": 0}}}', "x")
    with pytest.raises(DataError, match="is not accepted"):
        made.encode(["a"])
    for vocab in (-1, 256, 2**20 + 1, 2**62):
        with pytest.raises(PlanError, match=rf"A tokenizer of {vocab} ids .*Use 257 to 1048576"):
            train_tokenizer(["a"], vocab)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"package tokenizers.*pip install tokenizers"):
        train_tokenizer(["a"], 300)
    made = parse_tokenizer('{"model": {"vocab": {"</s>": 0}}}', "x")
    with pytest.raises(DataError, match=r"pip install tokenizers"):
        made.encode(["a"])
