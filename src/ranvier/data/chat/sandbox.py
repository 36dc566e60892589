"""Sandbox: Jinja templates of strangers, rendered in a worker process with limits.

A template runs in `template_worker`, which has little memory, little time of the processor, and no
way to open a file or to start a process; so whatever a template asks Python for, it costs no more
than that, and this process only reads a reply of bounded size. The worker is kept for all templates
of a process, so that a rendering takes a message there and one back; where a template has used up
its memory or time, a new process takes its place. Jinja's own sandbox inside it is the second line
of defence.
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
"""Time of the processor that a rendering may take."""
REPLY_SECONDS = 60
"""Seconds that this process waits for it."""
MEMORY_BYTES = 512 << 20
"""Bytes of addresses that the worker may use."""
MAX_CHARACTERS = 20_000_000
"""Characters of a rendered text, and bytes of a conversation, at most."""
MAX_TEMPLATES = 64
"""Templates that a worker holds before another one is started."""
BEGIN_MARK = "\udff0"
END_MARK = "\udff1"
"""Around what a generation block says, if it is asked for: no text has halves of pairs."""
WORKER_PROGRAM = Path(__file__).with_name("template_worker.py")
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""What ends a worker for reasons that are none of its template."""
TIMER_SIGNALS = (signal.SIGPROF, signal.SIGXCPU)
"""What its timers end it with."""


class WorkerEndedError(Exception):
    """A worker that ended without an answer, or the child of it that was to give one."""

    def __init__(self, code: int | None = None) -> None:
        super().__init__(code)
        self.code = code
        """Exit code of the child; None: the whole worker is gone."""


class TemplateWorker:
    """A process that renders templates; it starts when it is first asked."""

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
        """What the worker replies: `text` or, without values, `generates`; else why not."""
        if self._owner != os.getpid():
            self._lock = threading.Lock()  # another thread may have held it at the fork
        with self._lock:
            for _ in range(2):
                try:
                    return self._request_once(text, values, marks)
                except WorkerEndedError as error:
                    if error.code is None:
                        code = self._wait_for_exit()
                    else:
                        code = error.code
                    if -code in TIMER_SIGNALS:
                        return {"refused": f"{self.seconds:g} s of the processor were not enough"}
                    if -code not in OUTSIDE_SIGNALS:
                        break
            return {"refused": f"the process that rendered it ended with the code {code}"}

    def _request_once(
        self, text: str, values: Mapping[str, Any] | None, marks: bool
    ) -> dict[str, Any]:
        channel = self._open_channel()
        key = digest_of(text)
        self._request_count += 1
        request = {
            "key": key,
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
            return {"failed": f"it has {len(raw):,} bytes, above {MAX_CHARACTERS:,}"}
        try:
            channel.settimeout(REPLY_SECONDS)
            channel.sendall(len(raw).to_bytes(8) + self._request_count.to_bytes(8) + raw)
            channel.settimeout(1.0)
            number, reply = self._read_reply(channel)
            while number not in (0, self._request_count):  # to a question that was given up
                number, reply = self._read_reply(channel)
        except TimeoutError:
            self.stop()
            return {"refused": f"it took longer than {REPLY_SECONDS} s"}
        except OSError:
            raise WorkerEndedError from None
        if reply.keys() & {"text", "generates"}:
            self._known_templates.add(key)
        if reply.keys() & {"spent", "ended"}:
            self._known_templates.clear()  # another child answers from now on
        if isinstance(reply.get("ended"), int):
            raise WorkerEndedError(reply["ended"])
        return reply

    def _read_reply(self, channel: socket.socket) -> tuple[int, dict[str, Any]]:
        """The next reply, which is believed to be nothing but a table of bounded size.

        Before it the number of what it is the reply to; 0: a child has ended, or what came is none.
        """
        size = int.from_bytes(self._receive_bytes(channel, 8))
        number = int.from_bytes(self._receive_bytes(channel, 8))
        if size > 4 * MAX_CHARACTERS:
            self.stop()
            return 0, {"refused": f"a reply of {size:,} bytes"}
        try:
            reply = json.loads(self._receive_bytes(channel, size).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            reply = None
        if isinstance(reply, dict):
            return number, reply
        self.stop()
        return 0, {"refused": "a reply that is none"}

    def _receive_bytes(self, channel: socket.socket, size: int) -> bytearray:
        """So many bytes. Seconds in which this process was stopped itself do not count."""
        whole = bytearray()
        waited = 0
        while len(whole) < size:
            try:
                piece = channel.recv(min(size - len(whole), 1 << 20))
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
        """The way to the worker of this process; a process that was forked has its own."""
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
            theirs.close()
        self._channel = ours

    def _wait_for_exit(self) -> int:
        """The code of a worker that has ended or is ending."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        self.stop()
        if code is None:
            return -signal.SIGKILL
        return code

    def stop(self) -> None:
        """End the worker."""
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
        """Leave the worker to the process that this one was forked from."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # no child of this process
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
    """The worker of this process."""
    worker = TemplateWorker()
    atexit.register(worker.stop)
    return worker


class SandboxedTemplate:
    """A template, and what it makes of values."""

    def __init__(self, text: str, origin: str, worker: TemplateWorker | None = None) -> None:
        self.origin = origin
        self._text = text
        self._worker = worker or shared_worker()
        reply = self._worker.send_request(text, None, marks=False)
        if "failed" in reply:  # a constant that cannot be: said again where it is rendered
            reply = {"generates": False}
        if "syntax" in reply:
            raise DataError(
                f"{origin}:{reply.get('line')}: {reply['syntax']!s:.300}. A chat template is "
                "written in Jinja. Mend it, or name another one with data.template."
            )
        if "generates" not in reply:
            raise self._refused_error(reply)
        self.has_generation_blocks = bool(reply["generates"])
        """Whether it has generation blocks."""

    def __call__(self, values: Mapping[str, Any], *, at: str = "", marks: bool = False) -> str:
        """The text; at: where the values come from; marks: around generation blocks."""
        reply = self._worker.send_request(self._text, values, marks=marks)
        text = reply.get("text")
        if isinstance(text, str) and len(text) <= MAX_CHARACTERS:
            return text
        if "failed" not in reply:
            raise self._refused_error(reply)
        raise DataError(
            f"{at + ': ' if at else ''}the chat template {self.origin} does not take this "
            f"conversation: {reply['failed']!s:.300}. It decides which roles and turns there may "
            "be. Mend the record, or use another data.template."
        )

    def _refused_error(self, reply: Mapping[str, Any]) -> UnsafeInputError:
        reason = reply.get("refused", reply.get("failed", "an answer that is none"))
        return UnsafeInputError(
            f"The chat template {self.origin} was stopped: {reason!s:.200}. A template says how a "
            "conversation is written, and nothing else. Use another one (data.template)."
        )
