"""Sources: documents of text files, JSON lines, parquet and arrow files, folders and the standard
library.

A text file is one document, a line of JSON or a row of a table another; empty ones are left out.
Everything is read in one fixed order and as a stream, but a text file is held whole.
"""

from __future__ import annotations

import difflib
import gzip
import importlib
import json
import os
import sysconfig
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ranvier.data.checksums import digest_of, file_checksum, file_size
from ranvier.data.saved_dataset import ARROW_SUFFIX, metadata_files, only_split, saved_files
from ranvier.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".txt.gz")
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TABLE_SUFFIXES = (".parquet", ARROW_SUFFIX)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *TABLE_SUFFIXES)
BATCH_ROWS = 1024
"""Rows of a table that are held at once."""
STDLIB = "stdlib"
"""The name of the standard library as a corpus."""
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
"""Folders of the standard library that are no part of the corpus."""


class DocumentReader:
    """The documents of one input, and how far they are read."""

    def __init__(
        self, path: str | Path, *, field: str = "text", max_bytes: int | None = None
    ) -> None:
        """Find the files; max_bytes: of the standard library read only so many."""
        self.name = str(path)
        self.field = field
        self.is_stdlib = path == STDLIB
        if self.is_stdlib:
            self.max_bytes = max_bytes
        else:
            self.max_bytes = None
        if self.is_stdlib:
            self.files = _library_files(self.max_bytes)
        else:
            self.files = _list_files(Path(path))
        self.total_bytes = sum(_file_size(file) for file in self.files)
        """Bytes to read."""
        if self.max_bytes is not None:
            self.total_bytes = min(self.total_bytes, self.max_bytes)
        self.done_bytes = 0
        """Bytes read."""

    def __iter__(self) -> Iterator[str]:
        """The documents; empty ones are left out, but there must be one."""
        self.done_bytes = 0
        found = False
        for file in self.files:
            before = self.done_bytes
            for text, position in self._read_file(file):
                self.done_bytes = min(before + position, self.total_bytes)
                if text:
                    found = True
                    yield text
            self.done_bytes = min(before + _file_size(file), self.total_bytes)
        if not found:
            raise DataError(
                f"{self.name} holds no document ({len(self.files)} files, {self.total_bytes} "
                "bytes). A "
                "corpus needs at least one that is not empty. Choose another file or folder."
            )

    @property
    def is_tabular(self) -> bool:
        """Whether all files hold records."""
        return not self.is_stdlib and all(
            suffix_of(file) not in TEXT_SUFFIXES for file in self.files
        )

    def read_records(self) -> Generator[tuple[dict[str, Any], str]]:
        """The records of all files and where each stands; there must be one."""
        self.done_bytes = 0
        found = False
        for file in self.files:
            before = self.done_bytes
            if suffix_of(file) in TABLE_SUFFIXES:
                objects = _read_rows(file)
            else:
                objects = _read_objects(file)
            for record, at, position in objects:
                self.done_bytes = min(before + position, self.total_bytes)
                found = True
                yield record, at
            self.done_bytes = min(before + _file_size(file), self.total_bytes)
        if not found:
            raise DataError(
                f"{self.name} holds no record ({len(self.files)} files, {self.total_bytes} "
                "bytes). A "
                "corpus needs at least one. Choose another file or folder."
            )

    def _read_file(self, file: Path) -> Iterator[tuple[str, int]]:
        if self.is_stdlib:
            # The last file may be cut inside a character.
            if self.max_bytes is None:
                left = None
            else:
                left = self.max_bytes - self.done_bytes
            with _open_content(file) as (_, content):
                yield content.read(-1 if left is None else left).decode(errors="ignore"), 0
            return
        kind = suffix_of(file)
        if kind in TEXT_SUFFIXES:
            yield _read_text(file), _file_size(file)
        elif kind in JSON_SUFFIXES:
            yield from _read_line_texts(file, self.field)
        else:
            yield from _read_row_texts(file, self.field)

    def content_digest(self) -> str:
        """The digest of all that is read: kind and content of each file, in order."""
        if self.is_stdlib:
            return digest_of(*self)
        parts = []
        for file in self.files:
            try:
                parts += [str(suffix_of(file)), file_checksum(file).digest]
            except OSError as error:
                raise _read_error(file, error) from None
        return digest_of(*parts)


def read_documents(
    path: str | Path, field: str = "text", *, max_bytes: int | None = None
) -> Iterator[str]:
    """The documents of a file, a folder or the standard library ("stdlib")."""
    return iter(DocumentReader(path, field=field, max_bytes=max_bytes))


def import_optional(name: str, use: str) -> Any:
    """An optional package, imported when it is needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"The package {package} cannot be imported ({error}). It is needed for {use}. "
            f"Install it: pip install {package}"
        ) from None


def suffix_of(path: Path) -> str | None:
    """The suffix that says how a file is read, None for an unknown one."""
    name = path.name.lower()
    # the longest first: .jsonl.gz before .gz
    return next((s for s in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(s)), None)


def _read_error(path: Path, error: OSError) -> DataError:
    name = str(path).replace("\0", "\\0")
    return DataError(
        f"{name} cannot be read: {error.strerror or error}. A corpus is {STDLIB!r}, a file "
        f"({', '.join(SUFFIXES)}), a folder of them, a prepared corpus or a Megatron pair. "
        "Check the path and its permissions."
    )


def _file_size(path: Path) -> int:
    try:
        return file_size(path)
    except OSError as error:
        raise _read_error(path, error) from None


def _list_files(path: Path) -> list[Path]:
    """The files of a path, of a folder sorted by relative path."""
    if not os.path.isdir(path):  # unlike Path.is_dir, whatever the name
        _file_size(path)
        if suffix_of(path) is None:
            raise DataError(
                f"{path} has an unknown suffix. Suffixes are {', '.join(SUFFIXES)}. Rename or "
                "convert the file."
            )
        return [path]
    found = []
    try:
        for folder, below, names in os.walk(path, onerror=_raise_error):
            below[:] = [name for name in below if not name.startswith(".")]
            split = only_split(Path(folder), names)
            if split is not None:
                below[:] = [name for name in below if name == split]
            saved = saved_files(Path(folder), names)
            if saved is not None:
                below.clear()
                names = [file.name for file in saved]
            aside = metadata_files(names)
            visible = [Path(folder, x) for x in names if not x.startswith(".") and x not in aside]
            found += [file for file in visible if suffix_of(file) is not None]
    except OSError as error:
        raise _read_error(path, error) from None
    if not found:
        raise DataError(
            f"The folder {path} holds no file that can be read. Suffixes are "
            f"{', '.join(SUFFIXES)}; hidden files are skipped. Choose another folder."
        )
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _raise_error(error: OSError) -> None:
    raise error


@contextmanager
def _open_content(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file as it lies on disk, and its content."""
    try:
        with path.open("rb") as raw:
            if path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as content:
                    yield raw, cast(BinaryIO, content)
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is no whole gzip file ({_file_size(path)} bytes): {error}. It must be "
            "readable to "
            "its end. Copy or make it again."
        ) from None
    except OSError as error:
        raise _read_error(path, error) from None


def _decode_utf8(raw: bytes, path: Path, start: int) -> str:
    """Bytes of a file as text; `start`: where in the file they lie."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {start + error.start}. "
            "Texts are read as UTF-8. Convert the file (iconv -t UTF-8)."
        ) from None
    if start == 0:
        return text.removeprefix("\ufeff")
    return text


def _read_text(path: Path) -> str:
    with _open_content(path) as (_, content):
        return _decode_utf8(content.read(), path, 0)


def _read_line_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far of each line of JSON."""
    for line, at, position in _number_lines(path):
        record = _parse_object(line, at, f'{{"{field}": "..."}}')
        if field not in record:
            raise _missing_field_error(field, record, at, "record")
        yield _check_string(record[field], field, at), position


def _number_lines(path: Path) -> Iterator[tuple[str, str, int]]:
    """Line, its place and bytes read so far; empty lines are left out."""
    with _open_content(path) as (raw, content):
        start = 0
        for number, line in enumerate(content, 1):
            text = _decode_utf8(line, path, start)
            start += len(line)
            if text.strip():
                yield text, f"{path}:{number}", raw.tell()


def _read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, its place and bytes read so far: of each line, or of one array in a .json file."""
    form = '{"messages": [...]}'
    if "json" in path.name.lower().split(".") and _first_character(path) == "[":
        try:
            records = json.loads(_read_text(path))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: broken JSON: {error}. It begins as an array of objects. Mend the file."
            ) from None
        for number, record in enumerate(records):
            at = f"{path}: record {number}"
            yield _check_object(record, at, form), at, _file_size(path) * number // len(records)
        return
    for line, at, position in _number_lines(path):
        yield _parse_object(line, at, form), at, position


def _first_character(path: Path) -> str:
    return next((line.strip()[:1] for line, _, _ in _number_lines(path)), "")


def _parse_object(line: str, at: str, form: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{at}: broken JSON: {error}. Every line must be one JSON object. Mend or remove the "
            "line."
        ) from None
    return _check_object(record, at, form)


def _check_object(record: Any, at: str, form: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(
            f"{at}: a {type(record).__name__}, not an object. Every line must be one JSON object, "
            f"as {form}. Convert the file."
        )
    return record


def _check_string(value: Any, field: str, at: str) -> str:
    if isinstance(value, str):
        return value
    raise DataError(
        f"{at}: the field {field!r} is a {type(value).__name__}, not a string. A document is a "
        "string. Mend the record or choose another field."
    )


def _missing_field_error(field: str, names: Iterable[str], at: str, thing: str) -> DataError:
    known = list(names)
    near = difflib.get_close_matches(field, known, n=1, cutoff=0.0)
    shown = ", ".join(map(repr, known[:20])) or "none"
    if near:
        remedy = f"Use the field {near[0]!r}"
    else:
        remedy = "Choose another file"
    return DataError(
        f"{at}: the {thing} has no field {field!r}; its fields are {shown}. The text of a document "
        f"is read from one field. {remedy}."
    )


def _read_row_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far of each row of a table."""
    for record, at, position in _read_rows(path, field):
        yield _check_string(record[field], field, at), position


def _read_rows(path: Path, field: str | None = None) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, its place and bytes read so far of each row; field: only this column."""
    arrow = import_optional("pyarrow", f"reading {path}")
    size = _file_size(path)
    number = 0
    if suffix_of(path) == ARROW_SUFFIX:
        batches = _arrow_batches
    else:
        batches = _parquet_batches
    try:
        for batch, position in batches(path, field):
            for record in batch.to_pylist():
                number += 1
                yield record, f"{path}: row {number}", position
    except (arrow.ArrowException, OSError) as error:
        if suffix_of(path) == ARROW_SUFFIX:
            kind = "arrow"
        else:
            kind = "parquet"
        raise DataError(
            f"{path} is no whole {kind} file ({size} bytes, row {number + 1}): {error!s:.300}. It "
            "must be readable to its end. Copy or make it again."
        ) from None


def _parquet_batches(path: Path, field: str | None) -> Iterator[tuple[Any, int]]:
    """Rows of a parquet file, and bytes read so far as a share of them."""
    parquet = import_optional("pyarrow.parquet", f"reading {path}")
    done = 0
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if field is not None and field not in names:
            raise _missing_field_error(field, names, str(path), "table")
        columns = None if field is None else [field]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                done += len(batch)
                yield batch, _file_size(path) * done // file.metadata.num_rows


def _arrow_batches(path: Path, field: str | None) -> Iterator[tuple[Any, int]]:
    """Rows of an arrow file, which is a stream (as datasets writes it) or a file of batches."""
    arrow = import_optional("pyarrow", f"reading {path}")
    ipc = import_optional("pyarrow.ipc", f"reading {path}")
    with arrow.memory_map(str(path)) as source:
        stream = source.read(6) != b"ARROW1"
        source.seek(0)
        if stream:
            reader = ipc.open_stream(source)
        else:
            reader = ipc.open_file(source)
        if field is not None and field not in reader.schema.names:
            raise _missing_field_error(field, reader.schema.names, str(path), "table")
        if stream:
            whole = reader
        else:
            whole = map(reader.get_batch, range(reader.num_record_batches))
        for batch in whole:
            if field is None:
                some = batch
            else:
                some = batch.select([field])
            some.validate(full=True)  # offsets in it may lead anywhere
            for start in range(0, len(some), BATCH_ROWS):
                yield some.slice(start, BATCH_ROWS), source.tell()


def _library_files(limit: int | None) -> list[Path]:
    """The files of the standard library, in order, until they hold `limit` bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    size = 0
    try:
        for path in _walk_sources(root):
            if limit is not None and size >= limit:
                break
            files.append(path)
            size += path.stat().st_size
    except OSError as error:
        raise _read_error(root, error) from None
    return files


def _walk_sources(root: Path) -> Iterator[Path]:
    """Sources and texts of a folder, then of the folders below it, sorted."""
    entries = sorted(root.iterdir())
    yield from (path for path in entries if path.suffix in (".py", ".txt") and path.is_file())
    for folder in entries:
        if folder.name not in SKIPPED_FOLDERS and folder.is_dir() and not folder.is_symlink():
            yield from _walk_sources(folder)
