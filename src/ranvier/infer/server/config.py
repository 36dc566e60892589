"""Settings of the server, and time limits of its connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ranvier.errors import PlanError
from ranvier.infer.server.authentication import read_api_keys
from ranvier.setting import setting, setting_info


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Address, limits and logs of the server."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts connections from other machines; use API keys then."""
    port: int = setting(8000, minimum=0, maximum=65535)
    """Port to listen on. 0 chooses a free one."""
    api_key_file: str = ""
    """File with the accepted API keys, one per line. The keys in the environment variable
    RANVIER_API_KEY are accepted too. Without any key, requests need none."""
    served_model_name: str = ""
    """Name of the model in requests and answers. If empty, the name of its directory."""
    max_queued_requests: int = setting(1024, minimum=1, unit="requests")
    """Maximum number of waiting requests. Further ones are refused with status 429."""
    max_queued_tokens: int = setting(2**20, minimum=1, unit="tokens")
    """Maximum number of prompt tokens of waiting requests. Further ones are refused with status
    429."""
    queue_timeout_seconds: float = setting(60.0, minimum=0.1, usual=60.0, unit="seconds")
    """Maximum time that a request waits for the engine. After it the answer is status 429."""
    drain_seconds: float = setting(30.0, minimum=0.0, usual=30.0, unit="seconds")
    """Time that running requests have to finish after SIGTERM."""
    max_body_mib: float = setting(8.0, minimum=0.001, maximum=1024, usual=8.0, unit="MiB")
    """Maximum size of a request body."""
    strict_parameters: bool = False
    """Whether unknown parameters of a request are refused. Otherwise they are ignored, and a header
    of the answer names them."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may use the server (CORS), such as https://example.org."""
    log_prompts: bool = False
    """Whether prompts and answers are written to the usage log."""
    usage_log: str = ""
    """File to which the usage of each request is appended, as JSON lines."""
    chat_template: str = ""
    """File with the chat template. If empty, the template of the model."""
    tool_call_parser: str = "auto"
    """Format of tool calls in the text of the model: auto (by the chat template), none, or the name
    of a format."""

    def find_problems(self) -> Iterator[str]:
        """Yields invalid settings, each with value, rule and remedy."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                problem = setting_info(one).find_problem(f"serve.{one.name}", value)
                if problem is not None:
                    yield problem
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not text.isprintable():
                    yield (
                        f"serve.{one.name}={text!r} contains unprintable characters. Paths and "
                        "names must be printable. Remove them."
                    )
        for origin in self.allowed_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                yield (
                    f"serve.allowed_origins has {origin!r}. An origin is a scheme and a host. Use "
                    f"'https://{origin}'."
                )
        if self.chat_template and not Path(self.chat_template).is_file():
            yield (
                f"serve.chat_template={self.chat_template!r} is not a file. It must be a Jinja "
                "template. Check the path."
            )
        if self.api_key_file:
            try:
                read_api_keys(self.api_key_file, "")
            except PlanError as error:
                yield from error.problems

    @property
    def max_body_bytes(self) -> int:
        """Maximum number of bytes of a request body."""
        return int(self.max_body_mib * 2**20)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits that keep slow clients from using up the server."""

    header_seconds: float = 10.0
    """Time in which the headers of a request must arrive."""
    body_seconds: float = 30.0
    """Time in which a body must arrive; after it, only as long as it arrives fast enough."""
    body_bytes_per_second: float = 64 * 1024
    """Mean rate of a body that takes longer than `body_seconds`."""
    keep_alive_seconds: float = 5.0
    """Time that an idle connection stays open after an answer."""
    write_buffer_bytes: int = 256 * 1024
    """Maximum number of bytes that wait for a client to read them."""
    write_seconds: float = 10.0
    """Time in which a client must read some of a full buffer. Streams are ended at once."""
    linger_seconds: float = 2.0
    """Time in which a client may read an answer that was sent before its request was complete."""
    linger_bytes: int = 8 * 2**20
    """Bytes of an unfinished request that are still read, and ignored, after its answer."""
    max_header_bytes: int = 64 * 1024
    """Maximum size of the headers of a request."""
    max_connections: int = 2048
    """Maximum number of open connections. Further ones get status 503."""
