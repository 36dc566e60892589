"""The data of a run: from inputs to mixtures, and what must agree."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import write_pair

from ranvier.data import dataset
from ranvier.data.dataset import TextData, cache_corpora, open_data
from ranvier.data.manifest import manifest_digest
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError, PlanError


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two texts of 40 and 10 documents, and a pair of an unknown tokenizer."""
    for name, count in (("a", 40), ("b", 10)):
        lines = [json.dumps({"text": f"{name} {i}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    write_pair(tmp_path / "c", [[1, 2, 300], [4]])
    inputs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c")]
    return cache_corpora(inputs, cache=tmp_path / "cache", tokenizer="bytes", verify=True)


def opened(folders: list[Path], **options: object) -> TextData:
    return open_data(folders, **{"seq": 8, "seed": 0, **options})  # type: ignore[arg-type]


def test_corpora_are_mixed_and_described(folders: list[Path]) -> None:
    data = opened(folders, weights=[1, 1, 2], held_out=0.2)
    assert data.train.quotas == [2500, 2500, 5000]
    assert data.vocab == 301
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert data.validation is not None
    aside = sum(stream.num_documents for stream in data.validation.streams)
    assert sum(stream.num_documents for stream in data.train.streams) + aside == 52
    assert len(data.summary_lines) == 3
    assert (
        "a.jsonl: 40 documents (" in data.summary_lines[0]
        and "25.00% of the samples" in data.summary_lines[0]
    )
    assert (
        ByteTokenizer().fingerprint in data.summary_lines[0]
        and "tokenizer unknown" in data.summary_lines[2]
    )
    data.check_vocab(301)
    with pytest.raises(DataError, match=r"c\.bin: document 0 has token 300 at offset 2"):
        data.check_vocab(300)


def test_without_weights_tokens_count(folders: list[Path]) -> None:
    data = opened(folders)
    tokens = [stream.num_tokens for stream in data.train.streams]
    assert data.validation is None
    assert [round(n / 100) for n in data.train.quotas] == [
        round(100 * n / sum(tokens)) for n in tokens
    ]


def test_the_fingerprint_follows_corpora_and_shares(folders: list[Path]) -> None:
    prints = [
        opened(folders, weights=weights).fingerprint
        for weights in ([1, 1, 1], [2, 2, 2], [1, 1, 2])
    ]
    assert prints[0] == prints[1] != prints[2]
    assert opened(folders[:2], weights=[1, 1]).fingerprint not in prints
    assert opened(folders[:2], weights=[1, 1]).fingerprint == (
        opened(folders[:2], weights=[1, 1], seed=3, seq=5).fingerprint
    )


def test_held_out_samples_do_not_depend_on_the_seed(folders: list[Path]) -> None:
    read = []
    for seed in (0, 1):
        held_out = opened(folders, seed=seed, held_out=0.3).validation
        assert held_out is not None
        read.append([held_out.read_sample(n).tokens.tolist() for n in range(held_out.num_windows)])
    assert read[0] == read[1]


def test_a_corpus_without_weight_is_not_read(folders: list[Path]) -> None:
    data = opened(folders, weights=[1, 0, 0], held_out=0.2)
    assert {data.train.pick_stream(n)[0] for n in range(200)} == {0}
    assert data.validation is not None and len(data.validation.streams) == 1


def test_tokenizers_must_agree_and_need_no_library(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"model": {"vocab": {"</s>": 400}}}))
    write_pair(tmp_path / "d", [[1, 2]])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    other = cache_corpora([str(tmp_path / "d")], cache=tmp_path / "cache", tokenizer=str(mine))
    data = opened(other)
    assert data.tokenizer is not None and data.tokenizer.eos_token_id == 400 and data.vocab == 401
    with pytest.raises(DataError, match=r"different tokenizers: .*a\.jsonl: .*, .*d: "):
        opened([folders[0], other[0]])
    assert opened([folders[2], other[0]]).tokenizer is not None


def removed(path: Path) -> None:
    path.unlink()


def broken(path: Path) -> None:
    path.write_text(path.read_text()[:-9])


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff")


def replaced(path: Path) -> None:
    path.write_text(json.dumps({"model": {"vocab": {"</s>": 256}}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed, r"cannot be read: No such file"),
        (broken, r"is changed or damaged: its fingerprint is unknown, JSONDecodeError"),
        (no_text, r"is changed or damaged: its fingerprint is unknown, UnicodeDecodeError"),
        (replaced, r"is changed or damaged: its fingerprint is [0-9a-f]{32}\."),
    ],
)
def test_the_tokenizer_beside_the_tokens_must_be_theirs(
    folders: list[Path],
    change: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert opened(folders[::-1]).tokenizer == ByteTokenizer()
    assert opened(folders[2:]).tokenizer is None
    path = folders[0] / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert opened(folders).tokenizer == ByteTokenizer(), "layout does not count"
    change(path)
    both = rf"tokenizer\.json {message}.* names the tokenizer {ByteTokenizer().fingerprint}"
    with pytest.raises(DataError, match=both + r".* prepare the corpus again\."):
        opened(folders)


def test_a_manifest_must_agree_with_its_tokenizer(folders: list[Path]) -> None:
    path = folders[0] / "corpus.json"
    content = json.loads(path.read_text()) | {"vocab": 300}
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": manifest_digest(content)}))
    with pytest.raises(DataError, match=r"has 257 ids and the end token 256\. .* with 300 ids"):
        opened(folders)


def test_documents_of_one_token_teach_nothing_when_packed(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[1], [], [2], [3]])
    folders = cache_corpora([str(tmp_path / "x")], cache=tmp_path / "cache")
    with pytest.raises(
        DataError, match=r"nothing to learn: each of its 3 training documents has 1 token"
    ):
        opened(folders)
    assert opened(folders, packed=False).train.num_windows == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq": 0}, r"seq_len=0 is too small\. A sample must have at least 1 token"),
        ({"held_out": 1.0}, r"validation_fraction=1\.0 is not a valid fraction"),
        ({"held_out": float("nan")}, r"validation_fraction=nan"),
        ({"weights": [1]}, r"1 mixture weights for 3 corpora"),
    ],
)
def test_senseless_numbers_are_refused(
    folders: list[Path], options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        opened(folders, **options)


def test_the_package_needs_no_optional_package() -> None:
    for path in Path(dataset.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.name for name in node.names] + [getattr(node, "module", None) or ""]
                roots = {name.partition(".")[0] for name in names}
                assert not roots & {"tyro", "rich", "tokenizers", "pyarrow"}, (path, names)


def test_a_run_needs_a_corpus() -> None:
    with pytest.raises(PlanError, match="No corpus was given"):
        opened([])
