"""Start-up and shutdown of a server: the front in this process, and its engine processes.

The front listens at once and answers 503 until an engine is ready, so that probes work while a
model loads. An engine process that fails is started again; the other replicas are not affected.
This module imports no HTTP library, so that a missing one is reported in one line.
"""

from __future__ import annotations

import importlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ranvier.errors import (
    CheckpointError,
    DataError,
    PlanError,
    UnsafeInputError,
    VersionError,
)
from ranvier.infer.server.config import ConnectionLimits, ServeConfig
from ranvier.launch import read_environment
from ranvier.system import file_handles
from ranvier.system.terminal import print

REQUIRED_PACKAGES = ("uvicorn", "starlette", "prometheus_client")
RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Time before an engine is started again, by the number of failures without an answer between."""
STABLE_SECONDS = 60.0
"""Time after which an engine that has failed before counts as stable."""
REFUSAL_CODES = {
    error.exit_code
    for error in (PlanError, DataError, CheckpointError, VersionError, UnsafeInputError)
}
"""Exit codes of engines that would fail again in the same way."""
STOP_SECONDS = 5.0
"""Time that an engine has to end before it is killed."""
END_SECONDS = 15.0
"""Time that an engine has to end after its connection has ended, before it is killed."""
EngineLauncher = Callable[[str, int], "subprocess.Popen[bytes]"]
"""Starts the process of a replica; takes the path of the front's socket and the replica's index.
The process calls `engine_worker.run_engine_worker`."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a front needs to start."""

    config: ServeConfig
    folder: Path
    """Directory of the model, with its tokenizer and chat template."""
    num_replicas: int = 1
    """Size of the data axis."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters of the model."""
    seed: int = 0
    """Source of the seeds of requests that have none."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    socket_path: str = ""
    """Unix socket for the engines; empty for one in a temporary directory."""
    quiet: bool = False
    """Whether requests are not logged to the terminal."""


class EngineProcesses:
    """The engine processes of a server on this machine."""

    def __init__(self, launch: EngineLauncher | None, socket_path: str, num_replicas: int) -> None:
        self._launch = launch
        self._socket_path = socket_path
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._start_times = dict.fromkeys(range(num_replicas), 0.0)
        self._num_failures = dict.fromkeys(range(num_replicas), 0)
        self._failure_times: dict[int, float] = {}
        """When the running process of a replica has failed."""
        self._is_stopping = False
        self.has_been_ready = False
        """Whether an engine has started before, so that another one can start as well."""
        self.refusal_code = 0
        """Exit code of an engine that can never start; 0 if there is none."""

    def start_missing(self) -> None:
        """Starts engines that do not run, those that have failed after a while."""
        if self._launch is None or self._is_stopping:
            return
        now = time.monotonic()
        for index, start_time in self._start_times.items():
            process = self._processes.get(index)
            if process is not None:
                code = process.poll()
                if code is None:
                    if now - self._failure_times.get(index, now) > END_SECONDS:
                        # It has lost its connection, but does not end by itself.
                        process.kill()
                    continue
                del self._processes[index]
                self._failure_times.pop(index, None)
                if code in REFUSAL_CODES and not self.has_been_ready:
                    self.refusal_code = code
                    return
                if now - start_time > STABLE_SECONDS:
                    self._num_failures[index] = 0
                self._start_later(index, f"has ended with code {code}")
            elif now >= start_time:
                self._start_times[index] = now
                try:
                    self._processes[index] = self._launch(self._socket_path, index)
                except OSError as error:
                    # Too little memory now; the other replicas continue.
                    self._start_later(index, f"cannot be started: {error.strerror}")

    def _start_later(self, index: int, why: str) -> None:
        """Notes a failure, after which an engine is started again."""
        self._num_failures[index] += 1
        delay = RESTART_SECONDS[min(self._num_failures[index], len(RESTART_SECONDS)) - 1]
        self._start_times[index] = time.monotonic() + delay
        print(f"The engine of replica {index} {why}. It is started again in {delay:g} s.")

    def note_failure(self, index: int) -> None:
        """Notes that the connection of a replica has ended, so that its process should end."""
        if index in self._processes:
            self._failure_times.setdefault(index, time.monotonic())

    def stop(self, *, at_once: bool = False) -> None:
        """Waits for the end of all engines, and kills those that do not end."""
        self._is_stopping = True
        limit = time.monotonic() + (0.0 if at_once else STOP_SECONDS)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def check_serve_extra() -> None:
    """Raises an error that says what to install if a package of the extra is missing."""
    for name in REQUIRED_PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            raise PlanError(
                f"The package {name} is not installed. `ranvier serve` needs the extra `serve`. "
                "Install it: pip install 'ranvier[serve]'"
            ) from None


def run_server(options: ServerOptions, launch: EngineLauncher | None) -> int:
    """Serves a model until a signal ends the server. Returns the exit code.

    launch: starts an engine process; None if engines are started by another program, which connects
    them to `socket_path`.
    """
    check_serve_extra()
    problems = list(options.config.find_problems())
    if problems:
        raise PlanError(problems)
    from ranvier.infer.server.authentication import API_KEY_VARIABLE, ApiKeys, read_api_keys
    from ranvier.infer.server.front_process import FrontProcess

    file_handles.raise_limit()
    variable = read_environment(API_KEY_VARIABLE).get(API_KEY_VARIABLE, "")
    keys = ApiKeys.from_texts(read_api_keys(options.config.api_key_file, variable))
    if not keys.digests and options.config.host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"Warning: the server listens on {options.config.host} without an API key. Everyone "
            "who reaches it can use it. Set serve.api_key_file."
        )
    # The directory of a Unix socket decides who may connect; this one is private.
    with tempfile.TemporaryDirectory(prefix="ranvier-") as folder:
        path = options.socket_path or str(Path(folder) / "engine.sock")
        engines = EngineProcesses(launch, path, options.num_replicas)
        front = FrontProcess(options, keys, engines, path)
        try:
            return front.run()
        finally:
            engines.stop(at_once=front.was_killed)
