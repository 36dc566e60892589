"""Renders untrusted Jinja templates in a worker process with resource limits.

A template runs in `template_worker`, which has limited memory and CPU time and can neither open a
file nor start a process. A template cannot use more than that, and this process only reads a reply
of bounded size. All templates of a process share one worker, so rendering takes one message each
way; when a template has used up its memory or time, a new process replaces the worker. Jinja's own
sandbox inside of it is the second line of defense.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.data.checksums import digest_of
from ranvier.errors import DataError, UnsafeInputError
from ranvier.launch import minimal_environment

RENDER_SECONDS = 5.0
"""CPU seconds that one rendering may take."""
REPLY_SECONDS = 60
"""Seconds that this process waits for a reply."""
MEMORY_BYTES = 512 << 20
"""Bytes of address space that the worker may use."""
MAX_CHARACTERS = 20_000_000
"""Maximum characters of a rendered text, and bytes of a request."""
MAX_TEMPLATES = 64
"""Templates that a worker caches before it is replaced."""
BEGIN_MARK = "\udff0"
END_MARK = "\udff1"
"""Marks around the text of a generation block, on request: lone surrogates, never in text."""
WORKER_PROGRAM = Path(__file__).with_name("template_worker.py")
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that end a worker for reasons unrelated to its template."""
TIMER_SIGNALS = (signal.SIGPROF, signal.SIGXCPU)
"""Signals of the worker's CPU timers."""


class WorkerEndedError(Exception):
    """A worker, or its child process, ended without a reply."""

    def __init__(self, code: int | None = None) -> None:
        super().__init__(code)
        self.code = code
        """Exit code of the child; None if the whole worker has exited."""


class TemplateWorker:
    """A process that renders templates; it is started by the first request."""

    def __init__(self, *, seconds: float = RENDER_SECONDS, memory: int = MEMORY_BYTES) -> None:
        self.seconds = seconds
        self.memory = memory
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._known_templates: set[str] = set()
        self._request_count = 0

    def send_request(
        self, text: str, values: Mapping[str, Any] | None, *, marks: bool
    ) -> dict[str, Any]:
        """The worker's reply: `text` or, without values, `generates`; otherwise the reason."""
        if self._owner != os.getpid():
            # Another thread may have held the lock at the fork and will never release it here.
            self._lock = threading.Lock()
        with self._lock:
            # One retry, if the worker was killed from outside, for example with its process group.
            for _ in range(2):
                try:
                    return self._request_once(text, values, marks)
                except WorkerEndedError as error:
                    if error.code is None:
                        code = self._wait_for_exit()
                    else:
                        code = error.code
                    # A process killed by signal n has the exit code -n.
                    if -code in TIMER_SIGNALS:
                        return {"refused": f"it used more than {self.seconds:g} s of CPU time"}
                    if -code not in OUTSIDE_SIGNALS:
                        break
            return {"refused": f"the process that rendered it exited with code {code}"}

    def _request_once(
        self, text: str, values: Mapping[str, Any] | None, marks: bool
    ) -> dict[str, Any]:
        channel = self._open_channel()
        key = digest_of(text)
        self._request_count += 1
        request = {
            "key": key,
            # The worker caches compiled templates; the text is sent only once.
            "text": None if key in self._known_templates else text,
            "values": values,
            "marks": [BEGIN_MARK, END_MARK] if marks else ["", ""],
            "seconds": self.seconds,
            "largest": MAX_CHARACTERS,
        }
        try:
            body = json.dumps(request, ensure_ascii=False, default=str)
        except (RecursionError, ValueError) as error:
            return {"failed": f"it is nested too deeply ({error})"}
        raw = body.encode("utf-8", "surrogatepass")
        if len(raw) > MAX_CHARACTERS:
            return {"failed": f"it has {len(raw):,} bytes, more than {MAX_CHARACTERS:,}"}
        try:
            channel.settimeout(REPLY_SECONDS)
            channel.sendall(len(raw).to_bytes(8) + self._request_count.to_bytes(8) + raw)
            # Short timeouts, counted in `_receive_bytes`.
            channel.settimeout(1.0)
            number, reply = self._read_reply(channel)
            # Skip replies to requests that were abandoned earlier.
            while number not in (0, self._request_count):
                number, reply = self._read_reply(channel)
        except TimeoutError:
            self.stop()
            return {"refused": f"it took longer than {REPLY_SECONDS} s"}
        except OSError:
            raise WorkerEndedError from None
        if reply.keys() & {"text", "generates"}:
            self._known_templates.add(key)
        if reply.keys() & {"spent", "ended"}:
            # A new child with an empty cache handles the next request.
            self._known_templates.clear()
        if isinstance(reply.get("ended"), int):
            raise WorkerEndedError(reply["ended"])
        return reply

    def _read_reply(self, channel: socket.socket) -> tuple[int, dict[str, Any]]:
        """The next reply. It is untrusted: only its size and type are relied upon.

        It is preceded by the number of its request: 0 if a child has exited or it is invalid.
        """
        size = int.from_bytes(self._receive_bytes(channel, 8))
        number = int.from_bytes(self._receive_bytes(channel, 8))
        # UTF-8 takes up to 4 bytes per character.
        if size > 4 * MAX_CHARACTERS:
            self.stop()
            return 0, {"refused": f"its reply has {size:,} bytes"}
        try:
            reply = json.loads(self._receive_bytes(channel, size).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            reply = None
        if isinstance(reply, dict):
            return number, reply
        self.stop()
        return 0, {"refused": "its reply is invalid"}

    def _receive_bytes(self, channel: socket.socket, size: int) -> bytearray:
        """Receive `size` bytes. Time during which this process was suspended does not count."""
        whole = bytearray()
        waited = 0
        while len(whole) < size:
            try:
                piece = channel.recv(min(size - len(whole), 1 << 20))
            # Counting one-second timeouts instead of reading a clock leaves out the time in which
            # this process was stopped.
            except TimeoutError:
                waited += 1
                if waited >= REPLY_SECONDS:
                    raise
                continue
            if not piece:
                raise WorkerEndedError
            whole += piece
        return whole

    def _open_channel(self) -> socket.socket:
        """The socket to the worker of this process; a forked process gets its own worker."""
        if self._owner != os.getpid():
            self._forget_worker()
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if len(self._known_templates) >= MAX_TEMPLATES:
            self.stop()
        if self._channel is None:
            self._start_process()
        assert self._channel is not None
        return self._channel

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        folders = json.dumps([os.path.abspath(folder) for folder in sys.path if folder])
        words = [str(self.memory), str(os.getpid()), folders]
        try:
            self._process = subprocess.Popen(
                # Isolated: neither the user's site-packages nor environment variables influence the
                # worker.
                [sys.executable, "-I", "-S", str(WORKER_PROGRAM), *words],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=minimal_environment(),
                cwd="/",
            )
        except BaseException:
            ours.close()
            raise
        finally:
            # The child has its own copy. If this one stayed open, the end of the child would not be
            # seen as end of file.
            theirs.close()
        self._channel = ours

    def _wait_for_exit(self) -> int:
        """Exit code of a worker that has ended or is about to."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        self.stop()
        if code is None:
            return -signal.SIGKILL
        return code

    def stop(self) -> None:
        """Kill the worker."""
        if self._owner != os.getpid():
            self._forget_worker()
            return
        process = self._process
        channel = self._channel
        self._process = self._channel = None
        self._known_templates.clear()
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()

    def _forget_worker(self) -> None:
        """Leave the worker to the process from which this one was forked."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            # Not a child of this process: Popen must neither wait for it nor warn about it.
            self._process.returncode = 0
        self._owner = os.getpid()
        self._process = None
        self._channel = None
        self._known_templates.clear()

    def __enter__(self) -> TemplateWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@functools.cache
def shared_worker() -> TemplateWorker:
    """The worker shared by all templates of this process."""
    worker = TemplateWorker()
    atexit.register(worker.stop)
    return worker


class SandboxedTemplate:
    """A chat template that is rendered in the sandbox."""

    def __init__(self, text: str, origin: str, worker: TemplateWorker | None = None) -> None:
        self.origin = origin
        self._text = text
        self._worker = worker or shared_worker()
        reply = self._worker.send_request(text, None, marks=False)
        # A constant expression that raises is reported where the template is rendered.
        if "failed" in reply:
            reply = {"generates": False}
        if "syntax" in reply:
            raise DataError(
                f"{origin}:{reply.get('line')}: {reply['syntax']!s:.300}. A chat template must be "
                "valid Jinja. Fix it, or set data.chat_template to another file."
            )
        if "generates" not in reply:
            raise self._refused_error(reply)
        self.has_generation_blocks = bool(reply["generates"])
        """Whether the template has generation blocks."""

    def __call__(self, values: Mapping[str, Any], *, at: str = "", marks: bool = False) -> str:
        """Render; at: origin of the values; marks: put marks around generation blocks."""
        reply = self._worker.send_request(self._text, values, marks=marks)
        text = reply.get("text")
        if isinstance(text, str) and len(text) <= MAX_CHARACTERS:
            return text
        if "failed" not in reply:
            raise self._refused_error(reply)
        raise DataError(
            f"{at + ': ' if at else ''}the chat template {self.origin} rejects this conversation: "
            f"{reply['failed']!s:.300}. A template defines which roles and turns are allowed. Fix "
            "the record, or use another data.chat_template."
        )

    def _refused_error(self, reply: Mapping[str, Any]) -> UnsafeInputError:
        reason = reply.get("refused", reply.get("failed", "its reply is invalid"))
        return UnsafeInputError(
            f"The chat template {self.origin} was stopped: {reason!s:.200}. A template may only "
            "format text, within limits on time, memory and output. Shorten the conversation if it "
            "is very long, or use another data.chat_template."
        )
