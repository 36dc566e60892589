"""Tokenizers: text to ids and back, each identified by the digest of its `tokenizer.json`.

There are two kinds. `bytes` needs no library; its file is the equivalent byte-level BPE without
merges, so that other tools can read it. All others use the `tokenizers` library, imported when text
is first encoded: ids and fingerprint are read from the JSON alone. The end token is the `eos_token`
of the files next to it, otherwise a token with a common name. Special tokens that occur in a text
are plain text, so a document cannot end itself.
"""

from __future__ import annotations

import difflib
import json
import os
import platform
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.data.checksums import digest_of
from ranvier.data.sources import import_optional, read_documents
from ranvier.data.tokenizer_config import (
    read_special_tokens,
    read_tokenizer_config,
    save_tokenizer_config,
)
from ranvier.errors import DataError, PlanError
from ranvier.system import safe_files

STANDARD_VOCAB = 4096
"""Number of ids of the standard tokenizer."""
STANDARD_BYTES = 4_000_000
"""Bytes of the standard library that it is trained on."""
END_TOKEN = "<|end|>"
END_TOKENS = (END_TOKEN, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Common names of the end token, in order of precedence, used if no file names one."""
TOKENIZER_NAMES = ("bytes", "standard")
ID_LIMIT = 2**31
"""Upper limit of ids: tokens are stored as signed 32-bit integers."""
TRAINED_VOCAB_RANGE = (257, 2**20)
"""Range of ids of a trained tokenizer: at least all bytes and an end, at most 2^20."""


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizer.json`, and its properties that are known without the `tokenizers` library."""

    json_text: str
    vocab_size: int
    """Number of ids: the largest one plus 1."""
    eos_token_id: int
    """Id of the token that ends a document."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the canonical JSON."""
        return fingerprint_of(self.json_text)

    @cached_property
    def explicit_end_name(self) -> str:
        """Name of the end token if the JSON alone would not determine it; otherwise empty."""
        if _find_end(self._ids_by_token) == self.eos_token_id:
            return ""
        return self.token_names.get(self.eos_token_id, "")

    @cached_property
    def token_names(self) -> dict[int, str]:
        """Tokens by id, as the JSON writes them."""
        return {i: name for name, i in self._ids_by_token.items()}

    @cached_property
    def _ids_by_token(self) -> dict[str, int]:
        return _parse_token_ids(json.loads(self.json_text))

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """Ids of the special tokens, which only templates may write, not texts."""
        added = json.loads(self.json_text).get("added_tokens") or []
        return {one["content"]: one["id"] for one in added if one.get("special")}

    @cached_property
    def _text_library(self) -> Any:
        made = self._build_library()
        # In spite of its name, True makes the library encode special tokens as plain text.
        made.encode_special_tokens = True
        return made

    @cached_property
    def _template_library(self) -> Any:
        """The library's tokenizer for rendered templates: special tokens in them are special."""
        made = self._build_library()
        made.encode_special_tokens = False
        # A post-processor only adds tokens, which templates write themselves, and trims spaces from
        # offsets.
        made.post_processor = None
        return made

    def _build_library(self) -> Any:
        try:
            made = import_optional("tokenizers", "encoding and decoding text").Tokenizer.from_str(
                self.json_text
            )
        except DataError:
            raise
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise DataError(
                f"The tokenizer {self.fingerprint} is not accepted: {error!s:.300}. It must be a "
                "tokenizer.json of the tokenizers library. Save it again, or update the library."
            ) from None
        # A file may ask for truncation and padding; documents are never truncated or padded here.
        made.no_truncation()
        made.no_padding()
        return made

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without an end token."""
        clean = [repair_surrogates(text) for text in texts]
        with self._named_errors():
            rows = self._text_library.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(row.ids, dtype=np.uint32) for row in rows]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Make errors of the library name the tokenizer: loading may have accepted a broken one."""
        try:
            yield
        except DataError:
            raise
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise DataError(
                f"The tokenizer {self.fingerprint} cannot encode a text: {error!s:.300}. It must "
                "be able to encode any text. Use a tokenizer with a token for unknown words."
            ) from None

    def encode_with_offsets(
        self, text: str, *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text and their character spans; special: parse special tokens."""
        made = self._template_library
        made.encode_special_tokens = not special
        with self._named_errors():
            row = made.encode(text, add_special_tokens=False)
        return row.ids, row.offsets

    def decode_with_specials(self, ids: Iterable[int]) -> str:
        """Decode ids, including special tokens."""
        text: str = self._text_library.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; special tokens are skipped."""
        text: str = self._text_library.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def token_name(self, token: int) -> str:
        """A token as the tokenizer.json writes it."""
        found: str | None = self._text_library.id_to_token(token)
        return found or ""

    def save(self, path: Path) -> None:
        """Atomically write the tokenizer.json, and its end token next to it where needed."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(self.json_text, encoding="utf-8")
        os.replace(temporary, path)
        # tokenizer_config.json is only written if reading the file back would give another end.
        name = self.token_names.get(self.eos_token_id)
        if (
            name is not None
            and _find_end(self._ids_by_token, _read_eos_token(path)) != self.eos_token_id
        ):
            save_tokenizer_config(
                path.parent, {**read_tokenizer_config(path.parent), "eos_token": name}
            )


class ByteTokenizer(Tokenizer):
    """The tokenizer of UTF-8 bytes and an end token."""

    def __init__(self) -> None:
        super().__init__(_canonical_json(_bytes_json()), 257, 256)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text, without an end token."""
        raw = (repair_surrogates(text).encode() for text in texts)
        return [np.frombuffer(one, dtype=np.uint8).astype(np.uint32) for one in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode bytes; invalid UTF-8 is replaced, the end token is skipped."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")


def repair_surrogates(text: str) -> str:
    """Join or replace lone surrogates, which cannot be encoded as UTF-8."""
    try:
        # Cheap test first: nearly all texts are valid.
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def fingerprint_of(text: str) -> str:
    """Digest of the canonical form of a JSON text; ValueError or RecursionError if invalid."""
    return digest_of(_canonical_json(json.loads(text)))


def load_tokenizer(name: str | Path, cache: Path) -> Tokenizer:
    """Load a tokenizer: bytes, standard, or the path of a tokenizer.json or its directory."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "standard":
        return _standard_tokenizer(cache)
    if os.path.isdir(name):
        path = Path(name) / "tokenizer.json"
    else:
        path = Path(name)
    try:
        text = safe_files.read_text(path, limit=safe_files.size_limit("tokenizer.json"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        near = difflib.get_close_matches(str(name), TOKENIZER_NAMES, n=1)
        if near:
            remedy = f"Did you mean {near[0]!r}?"
        else:
            remedy = "Check the path."
        raise DataError(
            f"The tokenizer {str(name)!r} cannot be read: {str(path)!r}: {reason}. A tokenizer is "
            f"'bytes', 'standard', a tokenizer.json or a folder that contains one. {remedy}"
        ) from None
    return parse_tokenizer(text, str(path), end=_read_eos_token(path))


def parse_tokenizer(text: str, origin: str, *, end: str | int = "") -> Tokenizer:
    """Parse a tokenizer.json; `origin` names it in error messages.

    end: name or id of its end token, if it is known and among the tokens.
    """
    content, ids = _parse_json(text, origin)
    if _canonical_json(content) == ByteTokenizer().json_text:
        return ByteTokenizer()
    known = _find_end(ids, end)
    if known is None:
        raise DataError(
            f"{origin} has {len(ids)} tokens, but no end-of-document token. It is the eos_token of "
            f"the tokenizer_config.json next to it, otherwise one of {', '.join(END_TOKENS)}. Set "
            "eos_token in tokenizer_config.json."
        )
    return Tokenizer(text, max(ids.values()) + 1, known)


def check_tokenizer(path: Path, vocab: int) -> list[str]:
    """Refuse a tokenizer.json that cannot encode any text; return warnings about the rest.

    vocab: vocabulary size of the model.
    """
    try:
        text = safe_files.read_text(path)
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not UTF-8. A tokenizer.json must be UTF-8. Copy it again."
        ) from None
    _, ids = _parse_json(text, str(path))
    largest = max(ids.values(), default=-1)
    try:
        Tokenizer(text, largest + 1, 0)._text_library.encode("a b", add_special_tokens=False)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    # Not every tokenizer knows every word; this error does not concern the file.
    except Exception:
        pass
    except BaseException as error:
        if not _is_library_error(error):
            raise
        raise DataError(
            f"{path} makes the tokenizers library fail: {error!s:.200}. Use a file saved by it."
        ) from None
    lines = []
    if _find_end(ids, _read_eos_token(path)) is None:
        lines.append(f"{path.name} has no end-of-document token: see data.tokenizer")
    if largest >= vocab:
        lines.append(f"{path.name} has ids up to {largest}, but the model has {vocab} tokens")
    return lines


def _parse_json(text: str, origin: str) -> tuple[Any, dict[str, int]]:
    """Contents of a tokenizer.json, and the id of each token."""
    try:
        content = json.loads(text)
        return content, _parse_token_ids(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{origin} is not a valid tokenizer.json: {type(error).__name__}: {error!s:.200}. It "
            "must be JSON with model.vocab and added_tokens. Use a file that the tokenizers "
            "library saved."
        ) from None


def _is_library_error(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: plain exceptions, or a Rust panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_eos_token(path: Path) -> str:
    """The EOS named by the files next to a tokenizer.json; empty if there is none."""
    if path.name == "tokenizer.json":
        folder = path.parent
    else:
        folder = None
    return read_special_tokens(folder).get("eos_token", "")


def _find_end(ids: dict[str, int], end: str | int = "") -> int | None:
    """The token with a name or id, if it exists, otherwise the first of the common end tokens."""
    if isinstance(end, int):
        if end in ids.values():
            return end
        return _find_end(ids)
    return next((ids[name] for name in (end, *END_TOKENS) if name and name in ids), None)


def _parse_token_ids(content: Any) -> dict[str, int]:
    """Id of each token."""
    vocab = content["model"]["vocab"]
    # Unigram: a list of pieces with their scores.
    if isinstance(vocab, list):
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    added = {one["content"]: one["id"] for one in content.get("added_tokens") or []}
    ids: dict[str, int] = vocab | added
    for name, i in ids.items():
        if type(i) is not int or not 0 <= i < ID_LIMIT:
            raise ValueError(f"the id of {name!r:.80} is {i!r:.80}, not in the range 0 to 2^31 - 1")
    return ids


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab` ids; deterministic in the texts."""
    if not TRAINED_VOCAB_RANGE[0] <= vocab <= TRAINED_VOCAB_RANGE[1]:
        raise PlanError(
            f"A tokenizer of {vocab} ids cannot be trained. The 256 bytes and the end token need "
            "one id each, and more than 2^20 ids do not fit in memory. Use "
            f"{TRAINED_VOCAB_RANGE[0]} to {TRAINED_VOCAB_RANGE[1]}, for example {STANDARD_VOCAB}."
        )
    tokenizers = import_optional(
        "tokenizers", "training a tokenizer (the tokenizer 'bytes' does not need it)"
    )
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_TOKEN],
        # All bytes, so that any text can be encoded.
        initial_alphabet=sorted(level.alphabet()),
        show_progress=False,
    )
    _run_trainer(made, trainer, texts)
    return parse_tokenizer(made.to_str(), "The trained tokenizer")


def _run_trainer(made: Any, trainer: Any, texts: Iterable[str]) -> None:
    """Run the library's trainer in another thread: it does not handle signals before it ends."""
    stopped = threading.Event()
    done = threading.Event()
    failed: list[BaseException] = []

    def fed() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise InterruptedError("the training was stopped")
            yield repair_surrogates(text)

    def work() -> None:
        try:
            made.train_from_iterator(fed(), trainer)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="trained tokenizer", daemon=True)
    try:
        thread.start()
        # Not join: an interrupted join considers the thread ended (Python 3.11).
        while not done.wait(0.2):
            pass
    except BaseException:
        stopped.set()
        # While the trainer reads, it stops at the next text; later it cannot be stopped.
        done.wait(1.0)
        raise
    if failed:
        raise failed[0]


def _standard_tokenizer(cache: Path) -> Tokenizer:
    """The tokenizer trained on the standard library, cached."""
    texts = list(read_documents("stdlib", max_bytes=STANDARD_BYTES))
    # The standard library differs between versions and distributions of Python.
    digest = digest_of(str(STANDARD_VOCAB), *texts)
    path = cache / f"tokenizer-{platform.python_version()}-{digest[:16]}.json"
    try:
        found = load_tokenizer(path, cache)
        if found.vocab_size == STANDARD_VOCAB:
            return found
    except DataError:
        # Missing or damaged: train it.
        pass
    made = train_tokenizer(texts, STANDARD_VOCAB)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made.save(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. The standard tokenizer is stored in the "
            "cache. Set RANVIER_CACHE to a writable directory."
        ) from None
    return made


def _canonical_json(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _bytes_json() -> dict[str, Any]:
    """The byte-level BPE without merges whose ids are the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # Byte-level BPE maps bytes that are not printable to characters from 256 on (as GPT-2).
    others = [b for b in range(256) if b not in printable]
    letters = {b: b for b in printable} | {b: 256 + i for i, b in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": 256, "content": END_TOKEN, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {chr(letters[b]): b for b in range(256)} | {END_TOKEN: 256},
            "merges": [],
        },
    }
