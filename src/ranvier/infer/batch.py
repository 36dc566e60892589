"""Offline batches: answers a file of prompts, and continues after an interruption.

Each line of the input is a JSON object with a prompt, messages or tokens, and parameters. The
output gets a line for each as soon as it is finished. What was written is never lost: a line is
written at once and as a whole, an incomplete last line of an earlier run is removed, and answered
lines are skipped. The random numbers of a line depend on its seed and its index, so answers do not
depend on interruptions.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranvier.errors import DataError, PlanError, RanvierError, WriteError
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.request import EngineInterface, Request, TokenOutput
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.scheduler import explain_length
from ranvier.infer.server.api_errors import ApiError
from ranvier.infer.server.json_body import build_body, parse_json
from ranvier.infer.server.parameters import RequestSeeds, build_params
from ranvier.infer.server.protocol import GenerationBody, TokenizeBody
from ranvier.infer.server.served_model import ServedModel

FIRST_KEY = '{"index": '
"""How each line of an output begins, by which a file of something else is recognized."""
DIGEST_CHARACTERS = 16
QUEUE_FACTOR = 2
"""Number of requests in the engine, relative to those that can run at the same time."""
UNSUPPORTED_FIELDS = ("prompt_logprobs", "stream", "tools", "return_token_strs")


@dataclass(frozen=True, kw_only=True)
class BatchBody(TokenizeBody, GenerationBody):
    """A line of the input: prompt, messages or tokens, and parameters."""

    tokens: list[int] | None = None
    """Tokens of the prompt."""
    id: str | int | None = None
    """Repeated in the answer."""


@dataclass
class BatchProgress:
    """How far a batch is."""

    num_lines: int = 0
    num_done: int = 0
    """Lines with an answer or an error, including those of earlier runs."""
    num_skipped: int = 0
    """Lines that earlier runs have answered."""
    num_failed: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True)
class BatchLine:
    """A line of the input that has no answer yet."""

    index: int
    """Number of the line from 0; empty lines do not count."""
    values: dict[str, Any]
    """Parameters of the line, or defaults; only `error` if the line is not valid."""
    digest: str
    """Of the values. An answer belongs to the line only if its digest is the same."""


@dataclass
class OpenAnswer:
    """The answer to a line that is being generated."""

    line: BatchLine
    request: Request
    text: IncrementalDetokenizer
    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


def read_batch(path: Path, defaults: Mapping[str, Any]) -> Iterator[BatchLine]:
    """Yields the lines of an input, with defaults for parameters that they do not have."""
    try:
        with path.open("rb") as file:
            index = 0
            for text in file:
                if text.strip():
                    yield _read_line(index, text, defaults)
                    index += 1
    except OSError as error:
        raise DataError(
            f"--input {path} cannot be read: {error.strerror}. It must be a file in JSON Lines "
            "format. Check the path."
        ) from None


def _read_line(index: int, text: bytes, defaults: Mapping[str, Any]) -> BatchLine:
    try:
        given = parse_json(text)
        if not isinstance(given, dict):
            raise DataError("The line is not a JSON object. It must be {...}. Change it.")
        values = {**defaults, **{name: one for name, one in given.items() if one is not None}}
    except (ApiError, RanvierError) as error:
        values = {
            "error": str(error).replace(" body", " line"),
            "line": text.decode("latin-1"),
        }
    canonical = json.dumps(values, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()
    return BatchLine(index, values, digest[:DIGEST_CHARACTERS])


# ---- output ------------------------------------------------------------------------------------


class AnswerFile:
    """The output of a batch; only one process writes to it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[int, str] = {}
        """Digests of the answered lines, by index."""
        self.failed: set[int] = set()
        """Indices of lines whose answer is an error."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._write_error(error) from None
        try:
            self._lock()
            self._size = self._read_answers()
            self._truncate()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlanError(
                f"--output {self.path} is being written by another process. Only one may write to "
                "it. Wait for its end, or use another --output."
            ) from None

    def _read_answers(self) -> int:
        """Reads the answers of earlier runs, and returns the number of bytes of complete lines."""
        size = 0
        with open(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    # Cut off by a crash or a full disk; its line is answered again.
                    if not line.startswith(FIRST_KEY.encode()[: len(line)]):
                        raise self._foreign_error(number)
                    break
                self._read_answer(number, line)
                size += len(line)
        return size

    def _read_answer(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            index, digest = record["index"], record["digest"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign_error(number) from None
        self.digests[index] = digest
        if "error" in record:
            self.failed.add(index)

    def _foreign_error(self, number: int) -> DataError:
        return DataError(
            f"--output {self.path} exists, and its line {number} is not an answer of `ranvier "
            "generate`. A batch only continues its own output. Use another --output."
        )

    def is_answered(self, line: BatchLine) -> bool:
        """Whether an earlier run has answered a line. Raises if it was another line."""
        digest = self.digests.get(line.index)
        if digest is not None and digest != line.digest:
            raise DataError(
                f"--output {self.path} answers line {line.index} of another input, or with other "
                "parameters. A batch continues only with the same lines and parameters. Use "
                "another --output."
            )
        return digest is not None

    def write(self, line: BatchLine, record: Mapping[str, Any]) -> None:
        """Appends the answer to a line, as a whole or not at all."""
        known = {"index": line.index}
        if line.values.get("id") is not None and "line" not in line.values:
            known["id"] = line.values["id"]
        text = json.dumps({**known, **record, "digest": line.digest}, ensure_ascii=False)
        data = text.encode(errors="replace") + b"\n"
        try:
            rest = data
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._truncate()
            raise self._write_error(error) from None
        self._size += len(data)
        self.digests[line.index] = line.digest
        if "error" in record:
            self.failed.add(line.index)

    def _truncate(self) -> None:
        """Removes what follows the last complete line."""
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)

    def close(self) -> None:
        """Writes the answers to the disk and ends the lock."""
        try:
            os.fsync(self._file)
        except OSError as error:
            # Pipes and some devices cannot be synchronized.
            if error.errno != errno.EINVAL:
                raise self._write_error(error) from None
        finally:
            os.close(self._file)

    def _write_error(self, error: OSError) -> WriteError:
        return WriteError(
            f"--output {self.path} cannot be written: {error.strerror}. Answers are appended to "
            "it. Free space or check the path, and run the same command to continue."
        )


# ---- answers -----------------------------------------------------------------------------------


class BatchRunner:
    """Answers the lines of an input with an engine."""

    def __init__(
        self,
        engine: EngineInterface,
        model: ServedModel,
        answers: AnswerFile,
        *,
        max_num_seqs: int,
        progress: BatchProgress,
    ) -> None:
        self.engine = engine
        self.model = model
        self.answers = answers
        self.progress = progress
        self._max_open = QUEUE_FACTOR * max_num_seqs
        self._open: dict[str, OpenAnswer] = {}

    def run(
        self,
        lines: Iterator[BatchLine],
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        on_progress: Callable[[BatchProgress], None] = lambda progress: None,
    ) -> bool:
        """Answers all lines that have no answer; returns whether it reached the end.

        is_stopped: whether to end after the current step.
        """
        waiting = (line for line in lines if not self.answers.is_answered(line))
        is_at_end = False
        while not is_stopped():
            while not is_at_end and len(self._open) < self._max_open:
                line = next(waiting, None)
                if line is None:
                    is_at_end = True
                else:
                    self._add(line)
            if not self._open:
                return True
            for output in self.engine.step():
                self._handle(output)
            on_progress(self.progress)
        return False

    def _add(self, line: BatchLine) -> None:
        try:
            if "error" in line.values:
                raise DataError(line.values["error"])
            answer = self._make_answer(line)
            self.engine.add(answer.request)
        except (ApiError, RanvierError) as error:
            self._fail(line, str(error))
            return
        self._open[answer.request.request_id] = answer

    def _make_answer(self, line: BatchLine) -> OpenAnswer:
        """Returns the request of a line; raises for an invalid one."""
        body, unknown = build_body(BatchBody, line.values)
        given = [name for name in ("prompt", "messages", "tokens") if name in line.values]
        if len(given) != 1:
            raise DataError(
                f"The line has {' and '.join(given) or 'no prompt'}. It needs exactly one of "
                "prompt, messages and tokens. Change it."
            )
        for name in (*unknown, *(one for one in UNSUPPORTED_FIELDS if line.values.get(one))):
            raise DataError(
                f"{name[:80]!r} is not supported here. A line has a prompt, an id and parameters "
                "of sampling. Remove it."
            )
        if body.n != 1:
            raise DataError(f"n={body.n} is not supported here. A line has one answer. Repeat it.")
        params = build_params(
            body,
            self.model,
            self.engine.vocab_size,
            # Seeds of lines without one must not depend on how many were answered before.
            RequestSeeds(),
            structure=body.read_structure(),
        )
        tokens = self._encode(body)[-(body.truncate_prompt_tokens or 0) :]
        return self._open_answer(line, tokens, params, body)

    def _open_answer(
        self, line: BatchLine, tokens: list[int], params: SamplingParams, body: BatchBody
    ) -> OpenAnswer:
        params = dataclasses.replace(params, max_tokens=body.max_tokens or None)
        problem = explain_length(len(tokens), params.max_tokens, self.engine.max_model_len)
        if problem:
            raise DataError(problem)
        request = Request(
            request_id=str(line.index),
            prompt_token_ids=tuple(tokens),
            params=params,
            stream=line.index,
            priority=body.priority,
        )
        text = IncrementalDetokenizer(self.model.tokenizer, tokens, params)
        return OpenAnswer(line, request, text)

    def _encode(self, body: BatchBody) -> list[int]:
        if body.tokens is not None:
            wrong = [one for one in body.tokens if not 0 <= one < self.engine.vocab_size]
            if wrong or not body.tokens:
                shown = f"the token {wrong[0]}" if wrong else "no token"
                raise DataError(
                    f"tokens has {shown}. It needs at least one, in [0, {self.engine.vocab_size}). "
                    "Change it."
                )
            return body.tokens
        if body.prompt is not None:
            return self.model.encode_text(body.prompt, self.engine.max_model_len)
        check_has_chat(self.model)
        return self.model.encode_chat(body, self.engine.max_model_len)

    def _handle(self, output: TokenOutput) -> None:
        answer = self._open[output.request_id]
        if output.finish_reason == "error":
            del self._open[output.request_id]
            self._fail(answer.line, output.error)
            return
        answer.tokens += output.token_ids
        answer.num_cached_tokens += output.num_cached_tokens
        answer.text.append(output.token_ids, stop_token=output.stop_token)
        reason = output.finish_reason
        if reason is not None:
            answer.text.finish()
        if answer.text.stop_string is not None:
            if reason is None:
                self.engine.abort(output.request_id)
            reason = "stop"
        if reason is None:
            return
        del self._open[output.request_id]
        tokens = answer.tokens[: answer.text.num_tokens]
        usage = {
            "prompt_tokens": len(answer.request.prompt_token_ids),
            "completion_tokens": len(tokens),
            "cached_tokens": answer.num_cached_tokens,
        }
        self.answers.write(
            answer.line,
            {
                "text": answer.text.text,
                "tokens": tokens,
                "finish_reason": reason,
                "usage": usage,
            },
        )
        self.progress.num_done += 1
        self.progress.num_generated_tokens += len(tokens)

    def _fail(self, line: BatchLine, error: str) -> None:
        self.answers.write(line, {"error": error})
        self.progress.num_done += 1
        self.progress.num_failed += 1


def check_has_chat(model: ServedModel) -> None:
    """Raises if a model has no chat template."""
    if model.chat is None:
        raise DataError(
            "The model has no chat template. A conversation needs the template that the model was "
            "trained with. Train on conversations, or use a prompt."
        )


def check_batch(lines: Iterator[BatchLine], answers: AnswerFile) -> BatchProgress:
    """Returns how far an earlier run came. Raises if the output belongs to another input."""
    progress = BatchProgress()
    for line in lines:
        progress.num_lines += 1
        progress.num_skipped += answers.is_answered(line)
    progress.num_done = progress.num_skipped
    progress.num_failed = len(answers.failed)
    return progress
