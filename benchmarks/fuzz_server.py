"""Sends a million odd requests to a server and checks that it stays well.

Usage: python benchmarks/fuzz_server.py [--url URL --pid PID] [--engine fake] [--count N] [--seed S]
       [--state FILE]

Bodies are mutated: wrong types, numbers that are not finite, deep and huge JSON, invalid UTF-8, bad
HTTP and headers, hostile regular expressions and schemas, tokens out of range, clients that leave.
No answer may be a 5xx, and every refusal has the error object. After each 1,000 requests a probe
gets the same answer as in the beginning, all blocks are free, no engine was restarted, and the
memory of the front has not grown by more than 64 MiB.

Case i of a seed is always the same bytes. With --state the run continues where it was stopped. A
failure prints its seed and number; `--only NUMBER` sends that case alone. Without --url a server is
started, with the engine of a tiny model on the CPU, or with --engine fake without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from script_parser import ScriptParser

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1000
CONNECTIONS = 16
GROWTH_BYTES = 64 << 20
WARM_UP_CHUNKS = 3
"""Chunks after which the memory of the front is taken as its usual size."""
ANSWER_SECONDS = 60.0
PROBE = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0}

TEXTS = (
    *("", "a", "hello world", "é€😀", "\x00\x01", "<|end|>", "<|im_end|>", "\ufffd", "{{ 7 * 7 }}"),
    *("{% for x in y %}", "%s%n", "../../etc/passwd", "'; --", "a" * 300, "\u202e", "\ud800"),
)
NUMBERS = (
    *(0, -0.0, 1, -1, 2, 0.5, 1e-300, 1e308, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(256, 257, 258, 1000, 4096, 10**6),
)
REGEXES = (
    *("(a+)+$", "(x{1,1000}){1,1000}", "(?=a)", "(", "[", "\\", "a{9999999}", "(?P<n>a)(?P=n)"),
    *(".*" * 50, "(a|aa)+" * 20, "\\p{L}{1,500}", "(a?){200}a{200}", "^$", "[^\\x00-\\uffff]"),
)
SCHEMAS: tuple[Any, ...] = (
    {},
    True,
    {"type": "nothing"},
    {"$ref": "#"},
    {"$ref": "#/missing"},
    {"$ref": "http://127.0.0.1:1/x"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**6, "items": {}},
    {"enum": []},
    {"enum": list(range(2000))},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"anyOf": [{"type": "object"}] * 200},
    {"type": "object", "patternProperties": {"(": {}}},
)
NAMES = (
    *("model", "prompt", "messages", "max_tokens", "min_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("n", "stop", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words", "logprobs"),
    *("top_logprobs", "prompt_logprobs", "echo", "skip_special_tokens", "truncate_prompt_tokens"),
    *("priority", "cache_salt", "return_token_ids", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "stream", "user"),
    *("continue_final_message", "stream_options", "max_completion_tokens", "best_of", "suffix"),
    *("chat_template", "include_stop_str_in_output", "use_beam_search", "unknown", "tokens"),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template")


@dataclass(frozen=True)
class FuzzCase:
    """The bytes of a request."""

    kind: str
    data: bytes
    leaves: bool = False
    """Whether the client closes the connection without reading."""


# ---- cases -------------------------------------------------------------------------------------


def build_case(seed: int, number: int) -> FuzzCase:
    """Returns case `number` of a seed."""
    chance = random.Random(f"{seed}/{number}")
    kind = chance.choices(
        ("valid", "mutated", "garbled", "structure", "tokens", "headers", "http", "deep", "huge"),
        (15, 40, 12, 8, 8, 6, 6, 4, 0.05),
    )[0]
    path = chance.choice(PATHS)
    body = _valid_body(chance, path)
    if kind == "http":
        return FuzzCase(kind, _bad_http(chance, path, json.dumps(body).encode()))
    if kind == "mutated":
        for _ in range(chance.randint(1, 3)):
            _mutate(chance, body)
    elif kind == "structure":
        path, body = _structured(chance)
    elif kind == "tokens":
        _bad_tokens(chance, body)
    data = _encode(chance, body)
    if kind == "garbled":
        data = _garble(chance, data)
    elif kind == "deep":
        data = _deep(chance)
    elif kind == "huge":
        data = b'{"prompt": "' + b"x" * chance.choice((2**20, 9 * 2**20)) + b'"}'
    headers = _bad_headers(chance) if kind == "headers" else b""
    request = _http_request(path, data, headers)
    return FuzzCase(kind, request, leaves=kind == "valid" and chance.random() < 0.1)


def _http_request(path: str, body: bytes, headers: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: fuzz\r\n".encode()
    if b"content-type" not in headers:
        head += b"content-type: application/json\r\n"
    if b"content-length" not in headers and b"transfer-encoding" not in headers:
        head += f"content-length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def _valid_body(chance: random.Random, path: str) -> dict[str, Any]:
    text = chance.choice(("abc", "SAY:hi|", "The end", "x" * chance.randint(1, 80)))
    messages = [{"role": "user", "content": text}]
    if path in ("/tokenize", "/apply-template"):
        if path == "/apply-template" or chance.random() < 0.5:
            return {"messages": messages}
        return {"prompt": text}
    if path == "/detokenize":
        return {"tokens": [chance.randrange(256) for _ in range(chance.randint(1, 9))]}
    body: dict[str, Any] = {"max_tokens": chance.randint(1, 8), "stream": chance.random() < 0.3}
    if path.endswith("chat/completions"):
        body["messages"] = messages
    else:
        tokens = [*text.encode()]
        body["prompt"] = chance.choice((text, [text, text], tokens, [tokens, tokens]))
        if chance.random() < 0.2:
            body |= {"echo": True, "logprobs": chance.randint(0, 3)}
    for name, value in (
        ("temperature", chance.choice((0, 0.7, 2))),
        ("top_p", chance.random() or 1),
        ("top_k", chance.choice((-1, 0, 5))),
        ("n", chance.randint(1, 3)),
        ("seed", chance.randrange(-(2**63), 2**63)),
        ("stop", chance.choice(("q", ["a", "zz"]))),
        ("logit_bias", {"97": -100, "98": 5.5}),
        ("bad_words", ["dog"]),
        ("return_token_ids", True),
        ("min_tokens", 1),
    ):
        if chance.random() < 0.15:
            body[name] = value
    return body


def _odd_value(chance: random.Random, depth: int = 0) -> Any:
    pick = chance.randrange(9)
    if pick < 3:
        return chance.choice(NUMBERS)
    if pick < 5:
        return chance.choice(TEXTS)
    if pick == 5:
        return chance.choice((None, True, False))
    if pick == 6 or depth > 3:
        return chance.choice((float("nan"), float("inf"), -float("inf"), [], {}))
    if pick == 7:
        return [_odd_value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
    return {
        chance.choice((*TEXTS, *NAMES)): _odd_value(chance, depth + 1)
        for _ in range(chance.randint(0, 3))
    }


def _mutate(chance: random.Random, body: dict[str, Any]) -> None:
    """Changes a value somewhere in a body."""
    place: Any = body
    while True:
        inner = []
        if isinstance(place, dict):
            inner = [one for one in place.values() if isinstance(one, (dict, list)) and one]
        elif isinstance(place, list):
            inner = [one for one in place if isinstance(one, (dict, list)) and one]
        if not inner or chance.random() < 0.6:
            break
        place = chance.choice(inner)
    if isinstance(place, list):
        place[chance.randrange(len(place))] = _odd_value(chance)
    elif place and chance.random() < 0.15:
        del place[chance.choice(list(place))]
    else:
        names = NAMES if place is body else (*place, *NAMES[:4])
        place[chance.choice(names)] = _odd_value(chance)


def _structured(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Returns a request with a hostile language."""
    path = chance.choice(PATHS[:2])
    body = _valid_body(chance, path)
    pick = chance.randrange(5)
    if pick == 0:
        body["structured_outputs"] = {"regex": chance.choice(REGEXES)}
    elif pick == 1:
        body["structured_outputs"] = {"json": chance.choice(SCHEMAS)}
    elif pick == 2:
        schema = {"name": "x", "schema": chance.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif pick == 3:
        body["structured_outputs"] = {"choice": [chance.choice(TEXTS) for _ in range(3)]}
    else:
        grammar = chance.choice(("", "start: start", 'start: "a"+', "start: (((", "x" * 5000))
        body["structured_outputs"] = {"grammar": grammar}
    return path, body


def _bad_tokens(chance: random.Random, body: dict[str, Any]) -> None:
    token = chance.choice((-1, 257, 2**31, 2**32 + 65, 2**64, 10**30, 1.5, "65"))
    name = chance.choice(("prompt", "stop_token_ids", "allowed_token_ids", "logit_bias", "tokens"))
    if name == "logit_bias":
        body[name] = {str(token): 1}
    else:
        body[name] = [65, token]


def _encode(chance: random.Random, body: dict[str, Any]) -> bytes:
    # Lone surrogates are escaped; numbers that are not finite are written as Python does.
    text = json.dumps(body)
    if chance.random() < 0.02:
        text = text.replace("1", "1e999", 1)
    return text.encode()


def _garble(chance: random.Random, data: bytes) -> bytes:
    """Changes, inserts or removes some bytes."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found)) if found else 0
        pick = chance.randrange(4)
        if pick == 0 and found:
            found[place] = chance.randrange(256)
        elif pick == 1:
            found[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 5)))
        elif pick == 2:
            del found[place : place + chance.randint(1, 8)]
        else:
            del found[place:]
    return bytes(found)


def _deep(chance: random.Random) -> bytes:
    depth = chance.choice((60, 65, 500, 5000, 50_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = chance.choice(NAMES).encode()
    return b'{"prompt": "x", "' + name + b'": ' + opening * depth + b"1" + closing * depth + b"}"


def _bad_headers(chance: random.Random) -> bytes:
    return chance.choice(
        (
            b"content-type: text/html\r\n",
            b"content-type: application/json; charset=latin-1\r\n",
            b"content-type: \r\n",
            b"authorization: Bearer \xff\xfe\r\n",
            b"x-request-id: a\tb\r\n",
            b"x-request-id: " + b"y" * 5000 + b"\r\n",
            b"expect: 100-continue\r\n",
            b"accept-encoding: gzip, br\r\n",
            b"origin: null\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"content-encoding: gzip\r\n",
            b"host: other\r\n",
            b"range: bytes=0-1\r\n",
            b"cookie: " + b"a=b; " * 500 + b"\r\n",
        )
    )


def _bad_http(chance: random.Random, path: str, body: bytes) -> bytes:
    """Returns bytes that are not a valid request, or an unusual one."""
    whole = _http_request(path, body, b"")
    pick = chance.randrange(8)
    if pick == 0:
        return bytes(chance.randrange(256) for _ in range(chance.randint(1, 200)))
    if pick == 1:
        return _garble(chance, whole[: whole.index(b"\r\n\r\n")]) + b"\r\n\r\n" + body
    if pick == 2:
        method = chance.choice((b"GET", b"PUT", b"TRACE", b"\x00", b"POST POST", b"x" * 300))
        return whole.replace(b"POST", method, 1)
    if pick == 3:
        return whole.replace(b"HTTP/1.1", chance.choice((b"HTTP/0.9", b"HTTP/2.0", b"FTP/1", b"")))
    if pick == 4:
        target = chance.choice((b"*", b"http://evil/", b"/%00", b"/../..", b"/" + b"a" * 9000))
        return whole.replace(path.encode(), target, 1)
    if pick == 5:
        length = chance.choice((b"-1", b"99999999999999999999", b"0x10", b"1, 2", b"abc"))
        return (
            b"POST "
            + path.encode()
            + b" HTTP/1.1\r\nhost: x\r\ncontent-length: "
            + length
            + (b"\r\ncontent-type: application/json\r\n\r\n" + body)
        )
    if pick == 6:
        chunks = chance.choice((b"zz\r\nabc\r\n0\r\n\r\n", b"-1\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"))
        return (
            b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/json\r\n\r\n" + chunks
        )
    return whole + whole[: chance.randrange(len(whole))]


# ---- sending -----------------------------------------------------------------------------------


class FuzzRun:
    """Sends cases, and remembers what was wrong."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.seed = seed
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run_chunk(self, numbers: range) -> None:
        """Sends the cases with these numbers, some at a time."""
        waiting = iter(numbers)

        async def work() -> None:
            for number in waiting:
                await self._send_case(number)

        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))

    async def _send_case(self, number: int) -> None:
        case = build_case(self.seed, number)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._exchange(case)
                if not answer and not case.leaves:
                    # The server closes idle connections, and this process may have been slow.
                    answer = await self._exchange(case)
        except TimeoutError:
            self._fail(number, case, "no answer")
            return
        if case.leaves:
            return
        self._check(number, case, answer)

    async def _exchange(self, case: FuzzCase) -> bytes:
        """Returns everything that the server sends to a request."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        # The server closes the connection after the answer.
        data = case.data.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        found = b""
        try:
            writer.write(data if case.kind != "http" else case.data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if case.leaves:
                return b""
            if case.kind == "http" and writer.can_write_eof():
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                found = await reader.read(-1)
        finally:
            writer.close()
        return found

    def _check(self, number: int, case: FuzzCase, answer: bytes) -> None:
        status = answer.split(b" ", 2)[1].decode("latin-1") if b" " in answer else "none"
        self.statuses[f"{case.kind} {status}"] += 1
        if status == "none":
            # Bytes that are not HTTP, and large bodies, may end without an answer.
            if case.kind not in ("http", "huge"):
                self._fail(number, case, "connection closed without an answer")
            return
        if status.startswith("5"):
            self._fail(number, case, answer.decode("utf-8", "replace"))
        elif status.startswith("4") and b'{"error": {"message"' not in answer:
            self._fail(number, case, f"no error object: {answer[:300]!r}")
        elif b'data: {"error"' in answer and b'"type": "invalid_request_error"' not in answer:
            self._fail(number, case, f"error in a stream: {answer[-300:]!r}")

    def _fail(self, number: int, case: FuzzCase, why: str) -> None:
        text = f"seed {self.seed} case {number} ({case.kind}): {why[:500]}"
        self.failures.append(text)
        print(text, flush=True)

    # ---- state of the server ---------------------------------------------------------------

    async def get(self, path: str, body: Any = None) -> str:
        """Returns the body of an answer to a plain request."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: fuzz\r\nconnection: close\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        answer = await reader.read(-1)
        writer.close()
        return answer.partition(b"\r\n\r\n")[2].decode()

    async def probe(self) -> str:
        """Returns the text of a fixed request."""
        answer = json.loads(await self.get("/v1/completions", PROBE))
        text: str = answer["choices"][0]["text"]
        return text

    async def find_problem(self) -> str:
        """Returns what is wrong with the state of an idle server; empty if nothing is."""
        for _ in range(200):
            metrics = await self.get("/metrics")
            busy = [
                line
                for line in metrics.splitlines()
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
                if line.startswith(f"ranvier:{name}{{") and float(line.split()[-1]) > 0
            ]
            if not busy:
                break
            await asyncio.sleep(0.05)
        else:
            return f"requests or blocks are left: {busy}"
        health = json.loads(await self.get("/health"))
        if health["status"] != "ok" or any(one["restarts"] for one in health["replicas"]):
            return f"an engine has failed: {health}"
        return ""


def memory_bytes(pid: int) -> int:
    """Returns the resident memory of a process; 0 if it is not known."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):
        return 0
    return pages * 4096


async def fuzz(run: FuzzRun, *, count: int, pid: int, state: Path | None) -> bool:
    """Sends `count` cases. Returns whether all is well."""
    done = 0
    if state is not None and state.exists():
        done = json.loads(state.read_text())["done"]
        print(f"Continues at case {done} of seed {run.seed}.")
    expected = await run.probe()
    usual_bytes = 0
    start = time.monotonic()
    for chunk, first in enumerate(range(done, count, CHUNK)):
        numbers = range(first, min(first + CHUNK, count))
        await run.run_chunk(numbers)
        problem = await run.find_problem()
        if not problem and (text := await run.probe()) != expected:
            problem = f"the probe is {text!r}, not {expected!r}"
        used = memory_bytes(pid)
        if chunk < WARM_UP_CHUNKS:
            usual_bytes = used
        elif used - usual_bytes > GROWTH_BYTES:
            problem = problem or f"the front has grown by {(used - usual_bytes) >> 20} MiB"
        if problem:
            run.failures.append(problem)
            print(f"seed {run.seed} cases {numbers.start} to {numbers.stop - 1}: {problem}")
            break
        if state is not None:
            state.write_text(json.dumps({"seed": run.seed, "done": numbers.stop}))
        rate = (numbers.stop - done) / (time.monotonic() - start)
        if chunk % 10 == 0 or numbers.stop == count:
            print(
                f"{numbers.stop:,} of {count:,} requests, {rate:.0f} per second, "
                f"{used >> 20} MiB, {len(run.failures)} failures",
                flush=True,
            )
    return not run.failures


@contextlib.contextmanager
def start_server(engine: str) -> Iterator[Any]:
    """Context with a server of a tiny model, or with a fake engine."""
    sys.path.insert(0, str(ROOT / "tests"))
    servers: Any = importlib.import_module("infer.fake_server")
    with tempfile.TemporaryDirectory() as folder:
        if engine == "fake":
            server = servers.FakeServer(
                servers.write_model(Path(folder)),
                engine={"max_model_len": 256},
                limits={"header_seconds": 2.0, "body_seconds": 2.0},
            )
        else:
            models: Any = importlib.import_module("infer.tiny_model")
            model = models.write_tiny_model(Path(folder) / "tiny")
            command = [sys.executable, "-m", "ranvier", "serve", str(model), "--device", "cpu"]
            command += ["--serve.port", "0", "--engine.block-size", "16"]
            server = servers.ServerProcess(command, {"OMP_NUM_THREADS": "1"})
        with server:
            yield server


def main() -> int:
    """Runs the fuzzer; returns 1 if something was wrong."""
    parser = ScriptParser(__doc__, smoke="--engine fake --count 50 --state {folder}/state.json")
    parser.add_argument("--url", default="", help="server to test; empty starts one")
    parser.add_argument("--engine", choices=("real", "fake"), default="real", help="of that one")
    parser.add_argument("--pid", type=int, default=0, help="process of its front, for its memory")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=None, help="file to continue from")
    parser.add_argument("--only", type=int, default=None, help="number of a single case")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.url
        pid = options.pid
        if not url:
            server = stack.enter_context(start_server(options.engine))
            url = server.url
            pid = server.process.pid
        run = FuzzRun(url, options.seed)
        if options.only is not None:
            case = build_case(options.seed, options.only)
            print(case.kind, case.data[:2000])
            asyncio.run(run.run_chunk(range(options.only, options.only + 1)))
            good = not run.failures
        else:
            good = asyncio.run(fuzz(run, count=options.count, pid=pid, state=options.state))
        print(json.dumps(dict(sorted(run.statuses.items())), indent=2))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
