"""Reads documents from text, JSON lines, parquet and arrow files, directories and the stdlib.

A text file is one document, and so is each line of JSON and each row of a table; empty documents
are skipped. Everything is read in a fixed order and streamed, except that a text file is read as a
whole.
"""

from __future__ import annotations

import difflib
import errno
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
"""Rows of a table that are held in memory at once."""
STDLIB = "stdlib"
"""Name of the Python standard library as a corpus."""
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
"""Directories of the standard library that are not part of the corpus."""


class DocumentReader:
    """Reads the documents of one input and tracks the progress."""

    def __init__(
        self, path: str | Path, *, field: str = "text", max_bytes: int | None = None
    ) -> None:
        """Find the files; max_bytes: limit for the standard library."""
        self.name = str(path)
        self.field = field
        self.is_stdlib = path == STDLIB
        if self.is_stdlib:
            self.max_bytes = max_bytes
            self.files = _library_files(self.max_bytes)
        else:
            self.max_bytes = None
            self.files = _list_files(Path(path))
        self.total_bytes = sum(_file_size(file) for file in self.files)
        """Bytes to read."""
        if self.max_bytes is not None:
            self.total_bytes = min(self.total_bytes, self.max_bytes)
        self.done_bytes = 0
        """Bytes read so far."""

    def __iter__(self) -> Iterator[str]:
        """Yield the non-empty documents; raises if there are none."""
        self.done_bytes = 0
        found = False
        for file in self.files:
            before = self.done_bytes
            for text, position in self._read_file(file):
                # Positions are approximate (compressed files, tables): never report more than the
                # total.
                self.done_bytes = min(before + position, self.total_bytes)
                if text:
                    found = True
                    yield text
            self.done_bytes = min(before + _file_size(file), self.total_bytes)
        if not found:
            raise DataError(
                f"{self.name} has no documents (files: {len(self.files)}, {self.total_bytes} "
                "bytes). A corpus needs at least one non-empty document. Choose another file or "
                "folder."
            )

    @property
    def is_tabular(self) -> bool:
        """Whether all files contain records."""
        return not self.is_stdlib and all(
            suffix_of(file) not in TEXT_SUFFIXES for file in self.files
        )

    def read_records(self) -> Generator[tuple[dict[str, Any], str]]:
        """Yield the records of all files with their locations; raises if there are none."""
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
                f"{self.name} has no records ({len(self.files)} files, {self.total_bytes} "
                "bytes). A corpus needs at least one. Choose another file or folder."
            )

    def _read_file(self, file: Path) -> Iterator[tuple[str, int]]:
        if self.is_stdlib:
            # The limit may cut the last file within a UTF-8 character, so errors are ignored below.
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
        """Digest of everything that is read: type and content of each file, in order."""
        if self.is_stdlib:
            # Only a part of the last file may be read, so a digest of the whole file would be
            # wrong.
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
    """The documents of a file, a directory or the standard library ("stdlib")."""
    return iter(DocumentReader(path, field=field, max_bytes=max_bytes))


def import_optional(name: str, use: str) -> Any:
    """Import an optional package when it is needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"The package {package} cannot be imported ({error}). It is needed for {use}. "
            f"Install it: pip install {package}"
        ) from None


def suffix_of(path: Path) -> str | None:
    """The suffix that determines how a file is read; None for an unknown one."""
    name = path.name.lower()
    # The longest suffix first: .jsonl.gz before .gz.
    return next((s for s in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(s)), None)


def _read_error(path: Path, error: OSError) -> DataError:
    name = str(path).replace("\0", "\\0")
    return DataError(
        f"{name} cannot be read: {error.strerror or error}. A corpus is {STDLIB!r}, a file "
        f"({', '.join(SUFFIXES)}), a folder of such files, a prepared corpus or a Megatron pair. "
        "Check the path and its permissions."
    )


def check_sources_exist(sources: Iterable[str]) -> None:
    """Raise if a corpus is missing; only looks for names, so it is fast."""
    for source in sources:
        # A pair may also be named by its prefix. Invalid names are reported with the other
        # settings.
        names = (source, f"{source}.bin")
        if source != STDLIB and "\0" not in source and not any(map(os.path.lexists, names)):
            missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            raise _read_error(Path(source), missing)


def _file_size(path: Path) -> int:
    try:
        return file_size(path)
    except OSError as error:
        raise _read_error(path, error) from None


def _list_files(path: Path) -> list[Path]:
    """The files of a path; in a directory, sorted by relative path."""
    # Unlike Path.is_dir, os.path.isdir does not raise for impossible names.
    if not os.path.isdir(path):
        _file_size(path)
        if suffix_of(path) is None:
            raise DataError(
                f"{path} has an unknown suffix. Supported suffixes are {', '.join(SUFFIXES)}. "
                "Rename or convert the file."
            )
        return [path]
    found = []
    try:
        for folder, below, names in os.walk(path, onerror=_raise_error):
            # Changing the list in place tells os.walk where to descend.
            below[:] = [name for name in below if not name.startswith(".")]
            split = only_split(Path(folder), names)
            if split is not None:
                below[:] = [name for name in below if name == split]
            saved = saved_files(Path(folder), names)
            # A directory written by save_to_disk: exactly the files that it lists are read.
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
            f"The folder {path} contains no file that can be read. Supported suffixes are "
            f"{', '.join(SUFFIXES)}; hidden files are skipped. Choose another folder."
        )
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _raise_error(error: OSError) -> None:
    raise error


@contextmanager
def _open_content(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file; yields the raw file, for its position, and the decompressed content."""
    try:
        with path.open("rb") as raw:
            if path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as content:
                    yield raw, cast(BinaryIO, content)
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({_file_size(path)} bytes): {error}. It must be "
            "readable to its end. Copy or create it again."
        ) from None
    except OSError as error:
        raise _read_error(path, error) from None


def _decode_utf8(raw: bytes, path: Path, start: int) -> str:
    """Decode bytes of a file; `start`: their offset in the file."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {start + error.start}. "
            "Text files must be UTF-8. Convert the file (iconv -t UTF-8)."
        ) from None
    # A byte order mark at the start of a file is not part of the text.
    if start == 0:
        return text.removeprefix("\ufeff")
    return text


def _read_text(path: Path) -> str:
    with _open_content(path) as (_, content):
        return _decode_utf8(content.read(), path, 0)


def _read_line_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far, for each line of JSON."""
    for line, at, position in _number_lines(path):
        record = _parse_object(line, at, f'{{"{field}": "..."}}')
        if field not in record:
            raise _missing_field_error(field, record, at, "record")
        yield _check_string(record[field], field, at), position


def _number_lines(path: Path) -> Iterator[tuple[str, str, int]]:
    """Line, its location and bytes read so far; empty lines are skipped."""
    with _open_content(path) as (raw, content):
        start = 0
        for number, line in enumerate(content, 1):
            text = _decode_utf8(line, path, start)
            start += len(line)
            if text.strip():
                yield text, f"{path}:{number}", raw.tell()


def _read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, location and bytes read so far: per line, or per element of a .json array."""
    form = '{"messages": [...]}'
    if "json" in path.name.lower().split(".") and _first_character(path) == "[":
        try:
            records = json.loads(_read_text(path))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is not valid JSON: {error}. A file that starts with [ must be one array "
                "of objects. Fix the file, or write one object per line."
            ) from None
        for number, record in enumerate(records):
            at = f"{path}: record {number}"
            # The array is parsed at once: progress is estimated from the number of the record.
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
            f"{at}: invalid JSON: {error}. Every line must be one JSON object. Fix or remove the "
            "line."
        ) from None
    return _check_object(record, at, form)


def _check_object(record: Any, at: str, form: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(
            f"{at}: the record is a {type(record).__name__}, not an object. Every record must be "
            f"one JSON object, such as {form}. Convert the file."
        )
    return record


def _check_string(value: Any, field: str, at: str) -> str:
    if isinstance(value, str):
        return value
    raise DataError(
        f"{at}: the field {field!r} has type {type(value).__name__}, not str. A document must be "
        "a string. Fix the record, or choose another field."
    )


def _missing_field_error(field: str, names: Iterable[str], at: str, thing: str) -> DataError:
    known = list(names)
    # A cutoff of 0 always suggests one of the existing fields.
    near = difflib.get_close_matches(field, known, n=1, cutoff=0.0)
    shown = ", ".join(map(repr, known[:20])) or "none"
    if near:
        remedy = f"Use data.text_field={near[0]!r} (`--text-field` of `data prepare`)"
    else:
        remedy = "Choose another file"
    return DataError(
        f"{at}: the {thing} has no field {field!r}; its fields are {shown}. The text of a document "
        f"is read from one field. {remedy}."
    )


def _read_row_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Document and bytes read so far, for each row of a table."""
    for record, at, position in _read_rows(path, field):
        yield _check_string(record[field], field, at), position


def _read_rows(path: Path, field: str | None = None) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Record, location and bytes read so far, for each row; field: only this column."""
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
            f"{path} is not a complete {kind} file ({size} bytes, row {number + 1}): "
            f"{error!s:.300}. It must be readable to its end. Copy or create it again."
        ) from None


def _parquet_batches(path: Path, field: str | None) -> Iterator[tuple[Any, int]]:
    """Batches of rows of a parquet file, and bytes read so far, estimated from the rows."""
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
    """Batches of rows of an arrow file: a stream (as datasets writes it) or a file of batches."""
    arrow = import_optional("pyarrow", f"reading {path}")
    ipc = import_optional("pyarrow.ipc", f"reading {path}")
    with arrow.memory_map(str(path)) as source:
        # The random-access format starts with this magic; the streaming format has none.
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
            # Lazily, one batch at a time.
            whole = map(reader.get_batch, range(reader.num_record_batches))
        for batch in whole:
            if field is None:
                some = batch
            else:
                some = batch.select([field])
            # The file is untrusted: offsets in it may point anywhere in memory.
            some.validate(full=True)
            for start in range(0, len(some), BATCH_ROWS):
                yield some.slice(start, BATCH_ROWS), source.tell()


def _library_files(limit: int | None) -> list[Path]:
    """The files of the standard library, in order, up to `limit` bytes in total."""
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
    """Source and text files of a directory, then of its subdirectories, sorted."""
    entries = sorted(root.iterdir())
    yield from (path for path in entries if path.suffix in (".py", ".txt") and path.is_file())
    for folder in entries:
        if folder.name not in SKIPPED_FOLDERS and folder.is_dir() and not folder.is_symlink():
            yield from _walk_sources(folder)
