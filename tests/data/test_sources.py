"""Sources: every format read, every mistake named with its file and place."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest

from ranvier.data.sources import DocumentReader, read_documents
from ranvier.errors import DataError

DOCUMENTS = ["one\r\ntwo", "drei – 漢字", "x" * 5000]
RECORDS = [{"text": text, "id": i} for i, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def parquet(path: Path, column: dict[str, Any], **options: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(arrow.table(column), path, **options)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".rst", ".txt.gz", ".TXT"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    raw = "\n".join(DOCUMENTS).encode()
    path.write_bytes(gzip.compress(raw) if suffix.endswith(".gz") else raw)
    assert list(read_documents(path)) == ["\n".join(DOCUMENTS)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_line_of_json_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    raw = b"\xef\xbb\xbf" + LINES + b'\n  \n{"text": ""}\n'
    path.write_bytes(gzip.compress(raw) if suffix.endswith(".gz") else raw)
    reader = DocumentReader(path)
    assert list(reader) == list(reader) == DOCUMENTS
    assert reader.done_bytes == reader.total_bytes == path.stat().st_size


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(50)]
    parquet(tmp_path / "a.parquet", {"id": list(range(50)), "body": texts}, row_group_size=7)
    reader = DocumentReader(tmp_path / "a.parquet", field="body")
    assert list(reader) == texts
    assert reader.done_bytes == reader.total_bytes > 0


def saved(folder: Path, shards: list[list[str]], **state: object) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as file:
            file.write_table(table)
    files = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps({**files, **state}, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    return folder


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(3000)]
    folder = saved(tmp_path / "one", [texts[:2500], texts[2500:]])
    reader = DocumentReader(folder)
    assert (
        list(reader) == texts and reader.done_bytes == reader.total_bytes > 0 and reader.is_tabular
    )
    assert [record["id"] for record, _ in reader.read_records()][2499:2501] == [2499, 0]
    with pytest.raises(
        DataError, match=r"data-00000-of-00002\.arrow: the table has no field 'txt'"
    ):
        list(read_documents(folder, "txt"))
    saved(tmp_path / "many" / "a", [["a"]])
    saved(tmp_path / "many" / "b", [["b"]])
    assert list(read_documents(tmp_path / "many")) == ["a", "b"]
    other = tmp_path / "file.arrow"  # the other form of such files
    table = pyarrow.table({"text": ["x", "y"]})
    with pyarrow.ipc.new_file(other, table.schema) as file:
        file.write_table(table)
    assert list(read_documents(other)) == ["x", "y"]


def test_the_splits_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    both = tmp_path / "both"
    for split in ("train", "test"):
        saved(both / split, [[split]])
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match=r"splits train, test\. A corpus reads one split.* Use .*both/train"
    ):
        list(read_documents(both))
    assert list(read_documents(both / "test")) == ["test"]
    (both / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert list(read_documents(both)) == ["test"]
    (both / "dataset_dict.json").write_text('{"splits": 3}')
    with pytest.raises(DataError, match=r"dataset_dict\.json lists the splits 3"):
        list(read_documents(both))


def test_a_saved_dataset_that_is_broken_is_named(tmp_path: Path) -> None:
    rows = saved(tmp_path / "rows", [["a"]], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match=r"flatten_indices\(\)"):
        list(read_documents(rows))
    for i, listed in enumerate(([], None, 3, ["x"], [{"filename": "../x.arrow"}], [{}])):
        folder = saved(tmp_path / f"listed{i}", [["a"]], _data_files=listed)
        with pytest.raises(DataError, match=r"state\.json lists the files"):
            list(read_documents(folder))
    folder = saved(tmp_path / "cut", [["a" * 1000] * 1000])
    (file,) = folder.glob("*.arrow")
    os.truncate(file, 2000)
    with pytest.raises(DataError, match=r"\.arrow is not a complete arrow file \(2000 bytes"):
        list(read_documents(folder))
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        list(read_documents(folder))


@pytest.mark.full
def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    made.save_to_disk(tmp_path / "one", num_shards=2)
    made.select([2, 0]).save_to_disk(tmp_path / "some")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "splits")
    assert (
        list(read_documents(tmp_path / "one"))
        == list(read_documents(tmp_path / "splits"))
        == [*"abc"]
    )
    assert list(read_documents(tmp_path / "some")) == ["c", "a"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.md", "a.txt", ".hidden.txt", ".git/x.txt", "x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.jsonl").write_bytes(LINES)
    assert list(read_documents(tmp_path)) == ["a.txt", "a/b/c.md", "a/z.txt", "b.txt", *DOCUMENTS]


def test_the_standard_library_is_read_up_to_a_limit() -> None:
    texts = list(read_documents("stdlib", max_bytes=20_000))
    assert 19_900 <= sum(len(text.encode()) for text in texts) <= 20_000
    assert "import" in "".join(texts)
    reader = DocumentReader("stdlib", max_bytes=20_000)
    assert list(reader) == texts and reader.done_bytes == reader.total_bytes == 20_000
    more = list(read_documents("stdlib", max_bytes=40_000))
    assert more[: len(texts) - 1] == texts[:-1] and more[len(texts) - 1].startswith(texts[-1])


def test_the_digest_follows_content_not_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    digests = {DocumentReader(tmp_path / name).content_digest() for name in ("a.jsonl", "b.jsonl")}
    (tmp_path / "b.jsonl").write_bytes(LINES.replace(b"one", b"ONE"))
    assert (
        len(digests) == 1 and DocumentReader(tmp_path / "b.jsonl").content_digest() not in digests
    )
    assert (
        DocumentReader(tmp_path / "b.jsonl").content_digest()
        != DocumentReader(tmp_path).content_digest()
    )
    small, large = (
        DocumentReader("stdlib", max_bytes=n).content_digest() for n in (10_000, 10_001)
    )
    assert small != large == DocumentReader("stdlib", max_bytes=10_001).content_digest()


BAD: dict[str, tuple[str, bytes, str]] = {
    "not utf-8": ("a.txt", b"abc\xffdef", r"a\.txt is not UTF-8: byte 0xff at offset 3\..*iconv"),
    "line not utf-8": ("a.jsonl", LINES + b'"\xfe"', rf"byte 0xfe at offset {len(LINES) + 1}"),
    "broken json": (
        "a.jsonl",
        LINES + b'{"text": \n',
        r"a\.jsonl:4: invalid JSON: .*one JSON object",
    ),
    "deep json": ("a.jsonl", b"[" * 200_000, r"a\.jsonl:1: invalid JSON"),
    "no object": ("a.json", b"[1, 2]\n", r"a\.json:1: the record is a list, not an object"),
    "no field": ("a.jsonl", b'{"txt": "a", "id": 1}', r":1: the record has no field 'text'; its "),
    "keys": ("a.jsonl", b'{"id": 1, "txt": "a"}', r"'id', 'txt'\..* Use data\.text_field='txt' "),
    "no key": ("a.jsonl", b"{}", r"its fields are none\. .*Choose another file"),
    "a number": ("a.jsonl", b'{"text": 3}', r":1: the field 'text' has type int, not str"),
    "a null": ("a.jsonl", b'{"text": null}', r":1: the field 'text' has type NoneType"),
    "cut gzip": (
        "a.jsonl.gz",
        gzip.compress(LINES)[:-20],
        r"a\.jsonl\.gz is not a complete gzip file",
    ),
    "no gzip": ("a.txt.gz", b"plain text", r"a\.txt\.gz is not a complete gzip file \(10 bytes\)"),
    "bad gzip": (
        "a.txt.gz",
        gzip.compress(b"")[:10] + b"\xff" * 40,
        r"is not a complete gzip file",
    ),
    "suffix": (
        "a.docx",
        b"x",
        r"a\.docx has an unknown suffix\. Supported suffixes are \.txt, \.md",
    ),
    "empty": ("a.txt", b"", r"a\.txt has no documents \(files: 1, 0 bytes\)"),
    "all empty": ("a.jsonl", b'{"text": ""}\n\n', r"has no documents"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_with_the_place(tmp_path: Path, case: str) -> None:
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(tmp_path / name))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, {"txt": ["a"], "number": [1]})
    with pytest.raises(
        DataError, match=r"no field 'text'; its fields are 'txt', 'number'\..*'txt'"
    ):
        list(read_documents(path))
    with pytest.raises(DataError, match=r"a\.parquet: row 1: the field 'number' has type int"):
        list(read_documents(path, "number"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet is not a complete parquet file"):
        list(read_documents(path, "txt"))
    parquet(path, {"text": ["a", None]})
    with pytest.raises(DataError, match=r"row 2: the field 'text' has type NoneType"):
        list(read_documents(path))


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install pyarrow"):
        list(read_documents(tmp_path / "a.parquet"))


def missing(folder: Path) -> Path:
    return folder / "none.txt"


def empty(folder: Path) -> Path:
    (folder / "a.png").write_bytes(b"x")
    return folder


def dangling(folder: Path) -> Path:
    os.symlink(folder / "nowhere", folder / "a.txt")
    return folder


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def folder_of_a_fifo(folder: Path) -> Path:
    (folder / "b.txt").write_text("b")
    return fifo(folder).parent


def device(folder: Path) -> Path:
    os.symlink("/dev/zero", folder / "a.txt")
    return folder / "a.txt"


def too_long(folder: Path) -> Path:
    return folder / ("x" * 300 + ".txt")


def with_nul(folder: Path) -> Path:
    return folder / "a\0b.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, r"a\.txt cannot be read: it is not a regular file"),
        (folder_of_a_fifo, r"a\.txt cannot be read: it is not a regular file"),
        (device, r"a\.txt cannot be read: it is not a regular file"),
        (too_long, r"x\.txt cannot be read: File name too long"),
        (with_nul, r"a\\0b\.txt cannot be read: embedded null byte"),
        (missing, r"none\.txt cannot be read: No such file.*A corpus is 'stdlib', a file"),
        (empty, r"The folder .* contains no file that can be read\. Supported suffixes are"),
        (dangling, r"a\.txt cannot be read: No such file"),
    ],
)
def test_bad_paths_are_named(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_documents(make(tmp_path)))
