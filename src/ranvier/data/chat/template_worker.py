"""Template worker: renders chat templates of strangers. A program of its own, started by `sandbox`.

It imports the standard library and jinja2 only and forks a child, which gives up what a template
never needs: memory beyond a limit, new files and sockets, new processes. A timer of the processor's
time runs during each request; where it ends, the kernel ends the child, and another one takes its
place. Requests and replies are JSON in UTF-8 (halves of surrogate pairs included), each behind its
length and its number, in 8 bytes each, over the socket that is standard input. Inside, Jinja's
sandbox keeps a template from Python's own objects.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import datetime
import json
import math
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if not TYPE_CHECKING and __name__ == "__main__":  # the folders that the parent finds packages in
    sys.path[:] = json.loads(sys.argv[3])

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

PDEATHSIG = 1
SPENT_EXIT_CODE = 3
"""Exit code of a child that has answered and is not to be used again."""


WARM_UP_TEMPLATES = (
    "{{ 'a\\n\\u00e4' | wordwrap(1) | pprint }}{{ [1] | tojson }}{{ strftime_now('%B') }}",
    "{{ '%d' % 'x' }}",
    "{{ raise_exception('x') }}",
    "{% if %}",
)
"""Templates that use what is loaded late; the last ones fail."""


class GenerationExtension(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the model is to say."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """A block whose text passes through `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """The text of a block, between the marks that are asked for."""
        begin, close = getattr(self.environment, "marks", ("", ""))
        return f"{begin}{caller()}{close}"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for."""

    def __init__(self) -> None:
        extensions = [GenerationExtension, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.marks = ("", "")
        self.filters["tojson"] = to_json
        del self.globals["lipsum"]  # words by chance
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals |= {"dict": DictMaker(), "namespace": PublicNamespace}

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute at once, not when it is used."""
        raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")


class DictMaker:
    """What templates call as `dict`: no class, whose attributes lead further."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        """A dict."""
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """A dict with one value for all keys."""
        return dict.fromkeys(*arguments)


class PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self = args[0]
        rest = args[1:]
        values = dict(*rest, **values)
        for name in values:
            refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        Namespace.__setitem__(self, name, value)


def refuse_private(name: Any) -> None:
    """Refuse a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace")


def raise_exception(message: Any) -> NoReturn:
    """What templates call where they do not take a conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """The time as templates want it."""
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates want it: nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class CompiledTemplate:
    """A template, compiled."""

    def __init__(self, text: str) -> None:
        self.environment = ChatEnvironment()
        tree = self.environment.parse(text)
        self.template = self.environment.from_string(text)
        self.has_generation_blocks = any(
            isinstance(call.call, nodes.Call)
            and isinstance(call.call.node, nodes.ExtensionAttribute)
            for call in tree.find_all(nodes.CallBlock)
        )
        """Whether it has generation blocks."""

    def render(self, values: dict[str, Any], marks: tuple[str, str], largest: int) -> str:
        """The text of values. marks: around generation blocks; largest: most characters."""
        self.environment.marks = marks
        text = self.template.render(**values)
        if len(text) > largest:
            raise OverflowError(f"a text of more than {largest:,} characters")
        return text


def answer_request(request: dict[str, Any], known: dict[str, CompiledTemplate]) -> dict[str, Any]:
    """What becomes of a request: a text, or why there is none."""
    key = request["key"]
    try:
        if request["text"] is not None:
            known[key] = CompiledTemplate(request["text"])
        if request["values"] is None:
            return {"generates": known[key].has_generation_blocks}
        marks = tuple(request["marks"])
        return {"text": known[key].render(request["values"], marks, request["largest"])}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": str(error.message), "line": error.lineno}
    except SecurityError as error:
        return {"refused": str(error)[:200]}
    except (MemoryError, RecursionError, OverflowError, SyntaxError) as error:
        return {"refused": str(error)[:200] or type(error).__name__, "spent": True}
    except Exception as error:  # a template raises whatever Python does with what it is given
        return {"failed": str(error)[:300] or type(error).__name__}


def warm_up() -> None:
    """Have jinja2 and Python load what they would look for when it is first used."""
    for text in WARM_UP_TEMPLATES:
        answer_request(
            {"key": text, "text": text, "values": {}, "marks": ["", ""], "largest": 9}, {}
        )
    for name in ("ascii", "latin-1", "utf-8", "unicode-escape"):
        codecs.lookup(name)
    time.tzset()


def apply_limits(memory: int) -> None:
    """Give up what no template needs. memory: bytes of addresses."""
    warnings.simplefilter("ignore")
    most = {"AS": memory, "NOFILE": 0, "NPROC": 0, "FSIZE": 0, "CORE": 0}
    for name, value in most.items():
        with contextlib.suppress(ValueError, OSError):  # a stricter limit holds already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def set_timer(seconds: float) -> None:
    """Have the kernel end this process after so much time of the processor; 0: no more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if seconds:  # the same in whole seconds, which no code in this process can put off for long
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(used + seconds) + 1
        if most != resource.RLIM_INFINITY:
            soft = min(soft, most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def receive_request(channel: socket.socket) -> tuple[int, bytes] | None:
    """The number and the body of the next request; None: there are no more."""
    head = _receive_bytes(channel, 16)
    if head is None:
        body = None
    else:
        body = _receive_bytes(channel, int.from_bytes(head[:8]))
    if head is None or body is None:
        return None
    return (int.from_bytes(head[8:]), body)


def _receive_bytes(channel: socket.socket, size: int) -> bytes | None:
    whole = bytearray()
    while len(whole) < size:
        piece = channel.recv(min(size - len(whole), 1 << 20))
        if not piece:
            return None
        whole += piece
    return bytes(whole)


def send_reply(channel: socket.socket, number: int, reply: dict[str, Any]) -> None:
    """Send a reply. number: of its request; 0: to none."""
    body = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    channel.sendall(len(body).to_bytes(8) + number.to_bytes(8) + body)


def serve_requests(channel: socket.socket) -> int:
    """Answer requests until there are no more, or one has filled the memory; the exit code."""
    known: dict[str, CompiledTemplate] = {}
    while (received := receive_request(channel)) is not None:
        number, raw = received
        try:
            request = json.loads(raw.decode("utf-8", "surrogatepass"))
        except (MemoryError, RecursionError, ValueError) as error:
            why = f"it is too large or nested too deeply ({type(error).__name__})"
            send_reply(channel, number, {"failed": why, "spent": True})
            return SPENT_EXIT_CODE
        set_timer(request["seconds"])
        reply = answer_request(request, known)
        set_timer(0.0)
        send_reply(channel, number, reply)
        if "spent" in reply:  # what it has left in memory goes with this process
            return SPENT_EXIT_CODE
    return 0


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent does, or end it if that has happened."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Have children answer requests, one after the other, until the parent has no more."""
    memory = int(sys.argv[1])
    parent = int(sys.argv[2])
    end_with_parent(parent)
    channel = socket.socket(fileno=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # its parent decides when it ends
    warm_up()
    code = SPENT_EXIT_CODE
    own = os.getpid()
    while code == SPENT_EXIT_CODE:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                end_with_parent(own)
                apply_limits(memory)
                code = serve_requests(channel)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, SPENT_EXIT_CODE):
            send_reply(channel, 0, {"ended": code})
            code = SPENT_EXIT_CODE


if __name__ == "__main__":
    main()
