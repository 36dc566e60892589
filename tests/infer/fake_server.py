"""A server with fake engines in processes of their own, for tests and the fuzzer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from ranvier.data.tokenizer import ByteTokenizer
from ranvier.infer.server.config import ConnectionLimits, ServeConfig
from ranvier.infer.server.serve import ServerOptions, run_server
from ranvier.launch.lifetime import end_with_parent

ENGINE_PROGRAM = Path(__file__).with_name("fake_engine.py")
TEMPLATE = (
    "{#- Tool calls are written as <tool_call>. -#}"
    "{%- if tools -%}{%- for tool in tools -%}[tool {{ tool.function.name }}]{%- endfor -%}"
    "{%- endif -%}"
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
START_SECONDS = 240.0


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes a tokenizer of bytes and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    ByteTokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|end|>"})
    )
    return folder


class ServerProcess:
    """A server in a process of its own, and what it prints."""

    def __init__(
        self, command: list[str], environment: dict[str, str] | None = None, *, wait: bool = True
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self._line_added = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            found = self.wait_for_line("listens at http://127.0.0.1:")
            self.port = int(re.findall(r":(\d+)", found)[-1])
            self.http = httpx.Client(
                base_url=self.url,
                timeout=60,
                verify=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
            if wait:
                self.wait_for_line("Ready:")
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._line_added:
                self.lines.append(line.rstrip())
                self._line_added.notify_all()
        with self._line_added:
            self.lines.append("END")
            self._line_added.notify_all()

    def wait_for_line(self, part: str, start: int = 0) -> str:
        """Returns the first line with this text, from line `start` on."""
        limit = time.monotonic() + START_SECONDS
        with self._line_added:
            while True:
                for line in self.lines[start:]:
                    if part in line:
                        return line
                ended = "END" in self.lines
                if ended or not self._line_added.wait(max(0.0, limit - time.monotonic())):
                    raise AssertionError(f"no line with {part!r}: {self.lines}")

    def child_pids(self, part: bytes) -> list[int]:
        """Returns the children of the server with this text in their command."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = map(int, path.read_text().split())
        return [pid for pid in found if part in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self) -> int:
        """Stops the server with SIGTERM. Returns its exit code."""
        if hasattr(self, "http"):
            self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class FakeServer(ServerProcess):
    """A server process with its fake engines."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        replicas: int = 1,
        adapters: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        wait: bool = True,
        **settings: Any,
    ) -> None:
        options = {
            "config": {"port": 0, "served_model_name": "fake", **settings},
            "folder": str(folder),
            "num_replicas": replicas,
            "limits": limits or {},
            "adapters": [*adapters],
            "engine": engine or {},
        }
        command = [sys.executable, __file__, json.dumps(options)]
        super().__init__(command, environment, wait=wait)

    def engine_pids(self) -> list[int]:
        """Returns the engine processes of the server."""
        return self.child_pids(b"fake_engine")


def main() -> int:
    """Runs the server with options in JSON."""
    end_with_parent(os.getppid())
    values = json.loads(sys.argv[1])
    engine = json.dumps(values["engine"])

    def launch(socket_path: str, replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(ENGINE_PROGRAM), socket_path, str(replica), engine]
        )

    config = values["config"]
    if "allowed_origins" in config:
        config["allowed_origins"] = tuple(config["allowed_origins"])
    folder = values["folder"]
    with tempfile.TemporaryDirectory() as temporary:
        if not folder:
            folder = write_model(Path(temporary))
        options = ServerOptions(
            config=ServeConfig(**config),
            folder=Path(folder),
            num_replicas=values["num_replicas"],
            limits=ConnectionLimits(**values["limits"]),
            adapters=tuple(values["adapters"]),
        )
        return run_server(options, launch)


if __name__ == "__main__":
    sys.exit(main())
