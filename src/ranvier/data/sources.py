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

from ranvier.data.checksums import digest_of, size_of, stamp_of
from ranvier.data.saved_dataset import ARROW, metadata_files, only_split, saved_files
from ranvier.errors import DataError

TEXT = (".txt", ".md", ".py", ".rst", ".txt.gz")
LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TABLES = (".parquet", ARROW)
SUFFIXES = (*TEXT, *LINES, *TABLES)
ROWS = 1024
"""Rows of a table that are held at once."""
EMBEDDED = "stdlib"
"""The name of the standard library as a corpus."""
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library that are no part of the corpus."""


class Reader:
    """The documents of one input, and how far they are read."""

    def __init__(
        self, path: str | Path, *, field: str = "text", max_bytes: int | None = None
    ) -> None:
        """Find the files; max_bytes: of the standard library read only so many."""
        self.name, self.field = str(path), field
        self.embedded = path == EMBEDDED
        self.limit = max_bytes if self.embedded else None
        self.files = _library_files(self.limit) if self.embedded else _files(Path(path))
        self.total = sum(_size(file) for file in self.files)
        """Bytes to read."""
        if self.limit is not None:
            self.total = min(self.total, self.limit)
        self.done = 0
        """Bytes read."""

    def __iter__(self) -> Iterator[str]:
        """The documents; empty ones are left out, but there must be one."""
        self.done, found = 0, False
        for file in self.files:
            before = self.done
            for text, position in self._read(file):
                self.done = min(before + position, self.total)
                if text:
                    found = True
                    yield text
            self.done = min(before + _size(file), self.total)
        if not found:
            raise DataError(
                f"{self.name} holds no document ({len(self.files)} files, {self.total} bytes). A "
                "corpus needs at least one that is not empty. Choose another file or folder."
            )

    @property
    def tabular(self) -> bool:
        """Whether all files hold records."""
        return not self.embedded and all(suffix_of(file) not in TEXT for file in self.files)

    def records(self) -> Generator[tuple[dict[str, Any], str]]:
        """The records of all files and where each stands; there must be one."""
        self.done, found = 0, False
        for file in self.files:
            before = self.done
            objects = _tables(file) if suffix_of(file) in TABLES else _objects(file)
            for record, at, position in objects:
                self.done, found = min(before + position, self.total), True
                yield record, at
            self.done = min(before + _size(file), self.total)
        if not found:
            raise DataError(
                f"{self.name} holds no record ({len(self.files)} files, {self.total} bytes). A "
                "corpus needs at least one. Choose another file or folder."
            )

    def _read(self, file: Path) -> Iterator[tuple[str, int]]:
        if self.embedded:
            # The last file may be cut inside a character.
            left = None if self.limit is None else self.limit - self.done
            with _opened(file) as (_, content):
                yield content.read(-1 if left is None else left).decode(errors="ignore"), 0
            return
        kind = suffix_of(file)
        if kind in TEXT:
            yield _text(file), _size(file)
        elif kind in LINES:
            yield from _lines(file, self.field)
        else:
            yield from _rows(file, self.field)

    def digest(self) -> str:
        """The digest of all that is read: kind and content of each file, in order."""
        if self.embedded:
            return digest_of(*self)
        parts = []
        for file in self.files:
            try:
                parts += [str(suffix_of(file)), stamp_of(file).digest]
            except OSError as error:
                raise _unreadable(file, error) from None
        return digest_of(*parts)


def documents(
    path: str | Path, field: str = "text", *, max_bytes: int | None = None
) -> Iterator[str]:
    """The documents of a file, a folder or the standard library ("stdlib")."""
    return iter(Reader(path, field=field, max_bytes=max_bytes))


def imported(name: str, use: str) -> Any:
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


def _unreadable(path: Path, error: OSError) -> DataError:
    name = str(path).replace("\0", "\\0")
    return DataError(
        f"{name} cannot be read: {error.strerror or error}. A corpus is {EMBEDDED!r}, a file "
        f"({', '.join(SUFFIXES)}), a folder of them, a prepared corpus or a Megatron pair. "
        "Check the path and its permissions."
    )


def _size(path: Path) -> int:
    try:
        return size_of(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _files(path: Path) -> list[Path]:
    """The files of a path, of a folder sorted by relative path."""
    if not os.path.isdir(path):  # unlike Path.is_dir, whatever the name
        _size(path)
        if suffix_of(path) is None:
            raise DataError(
                f"{path} has an unknown suffix. Suffixes are {', '.join(SUFFIXES)}. Rename or "
                "convert the file."
            )
        return [path]
    found = []
    try:
        for folder, below, names in os.walk(path, onerror=_raise):
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
        raise _unreadable(path, error) from None
    if not found:
        raise DataError(
            f"The folder {path} holds no file that can be read. Suffixes are "
            f"{', '.join(SUFFIXES)}; hidden files are skipped. Choose another folder."
        )
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
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
            f"{path} is no whole gzip file ({_size(path)} bytes): {error}. It must be readable to "
            "its end. Copy or make it again."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _decoded(raw: bytes, path: Path, start: int) -> str:
    """Bytes of a file as text; `start`: where in the file they lie."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {start + error.start}. "
            "Texts are read as UTF-8. Convert the file (iconv -t UTF-8)."
        ) from None
    return text.removeprefix("\ufeff") if start == 0 else text


def _text(path: Path) -> str:
    with _opened(path) as (_, content):
        return _decoded(content.read(), path, 0)


def _lines(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far of each line of JSON."""
    for line, at, position in _numbered(path):
        record = _object(line, at, f'{{"{field}": "..."}}')
        if field not in record:
            raise _missing(field, record, at, "record")
        yield _string(record[field], field, at), position


def _numbered(path: Path) -> Iterator[tuple[str, str, int]]:
    """Line, its place and bytes read so far; empty lines are left out."""
    with _opened(path) as (raw, content):
        start = 0
        for number, line in enumerate(content, 1):
            text = _decoded(line, path, start)
            start += len(line)
            if text.strip():
                yield text, f"{path}:{number}", raw.tell()


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, its place and bytes read so far: of each line, or of one array in a .json file."""
    form = '{"messages": [...]}'
    if "json" in path.name.lower().split(".") and _begins(path) == "[":
        try:
            records = json.loads(_text(path))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: broken JSON: {error}. It begins as an array of objects. Mend the file."
            ) from None
        for number, record in enumerate(records):
            at = f"{path}: record {number}"
            yield _checked(record, at, form), at, _size(path) * number // len(records)
        return
    for line, at, position in _numbered(path):
        yield _object(line, at, form), at, position


def _begins(path: Path) -> str:
    return next((line.strip()[:1] for line, _, _ in _numbered(path)), "")


def _object(line: str, at: str, form: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{at}: broken JSON: {error}. Every line must be one JSON object. Mend or remove the "
            "line."
        ) from None
    return _checked(record, at, form)


def _checked(record: Any, at: str, form: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(
            f"{at}: a {type(record).__name__}, not an object. Every line must be one JSON object, "
            f"as {form}. Convert the file."
        )
    return record


def _string(value: Any, field: str, at: str) -> str:
    if isinstance(value, str):
        return value
    raise DataError(
        f"{at}: the field {field!r} is a {type(value).__name__}, not a string. A document is a "
        "string. Mend the record or choose another field."
    )


def _missing(field: str, names: Iterable[str], at: str, thing: str) -> DataError:
    known = list(names)
    near = difflib.get_close_matches(field, known, n=1, cutoff=0.0)
    shown = ", ".join(map(repr, known[:20])) or "none"
    remedy = f"Use the field {near[0]!r}" if near else "Choose another file"
    return DataError(
        f"{at}: the {thing} has no field {field!r}; its fields are {shown}. The text of a document "
        f"is read from one field. {remedy}."
    )


def _rows(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far of each row of a table."""
    for record, at, position in _tables(path, field):
        yield _string(record[field], field, at), position


def _tables(path: Path, field: str | None = None) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, its place and bytes read so far of each row; field: only this column."""
    arrow = imported("pyarrow", f"reading {path}")
    size, number = _size(path), 0
    batches = _arrow_batches if suffix_of(path) == ARROW else _parquet_batches
    try:
        for batch, position in batches(path, field):
            for record in batch.to_pylist():
                number += 1
                yield record, f"{path}: row {number}", position
    except (arrow.ArrowException, OSError) as error:
        kind = "arrow" if suffix_of(path) == ARROW else "parquet"
        raise DataError(
            f"{path} is no whole {kind} file ({size} bytes, row {number + 1}): {error!s:.300}. It "
            "must be readable to its end. Copy or make it again."
        ) from None


def _parquet_batches(path: Path, field: str | None) -> Iterator[tuple[Any, int]]:
    """Rows of a parquet file, and bytes read so far as a share of them."""
    parquet = imported("pyarrow.parquet", f"reading {path}")
    done = 0
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if field is not None and field not in names:
            raise _missing(field, names, str(path), "table")
        columns = None if field is None else [field]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns):
                done += len(batch)
                yield batch, _size(path) * done // file.metadata.num_rows


def _arrow_batches(path: Path, field: str | None) -> Iterator[tuple[Any, int]]:
    """Rows of an arrow file, which is a stream (as datasets writes it) or a file of batches."""
    arrow = imported("pyarrow", f"reading {path}")
    ipc = imported("pyarrow.ipc", f"reading {path}")
    with arrow.memory_map(str(path)) as source:
        stream = source.read(6) != b"ARROW1"
        source.seek(0)
        reader = ipc.open_stream(source) if stream else ipc.open_file(source)
        if field is not None and field not in reader.schema.names:
            raise _missing(field, reader.schema.names, str(path), "table")
        whole = reader if stream else map(reader.get_batch, range(reader.num_record_batches))
        for batch in whole:
            some = batch if field is None else batch.select([field])
            some.validate(full=True)  # offsets in it may lead anywhere
            for start in range(0, len(some), ROWS):
                yield some.slice(start, ROWS), source.tell()


def _library_files(limit: int | None) -> list[Path]:
    """The files of the standard library, in order, until they hold `limit` bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, size = [], 0
    try:
        for path in _below(root):
            if limit is not None and size >= limit:
                break
            files.append(path)
            size += path.stat().st_size
    except OSError as error:
        raise _unreadable(root, error) from None
    return files


def _below(root: Path) -> Iterator[Path]:
    """Sources and texts of a folder, then of the folders below it, sorted."""
    entries = sorted(root.iterdir())
    yield from (path for path in entries if path.suffix in (".py", ".txt") and path.is_file())
    for folder in entries:
        if folder.name not in SKIPPED and folder.is_dir() and not folder.is_symlink():
            yield from _below(folder)
