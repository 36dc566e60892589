"""Renders untrusted chat templates; a stand-alone program started by `sandbox`.

It imports only the standard library and jinja2 and forks a child, which gives up everything that a
template does not need: memory beyond a limit, new files and sockets, new processes. A CPU timer
runs during each request; when it expires, the kernel kills the child, and a new one replaces it.
Requests and replies are JSON in UTF-8 (lone surrogates included), each preceded by its length and
its number, 8 bytes each, over the socket that is standard input. Inside, Jinja's sandbox keeps a
template away from Python's objects.
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

# Started with -S: use the directories in which the parent finds packages.
if not TYPE_CHECKING and __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[3])

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# PR_SET_PDEATHSIG of prctl(2).
PDEATHSIG = 1
SPENT_EXIT_CODE = 3
"""Exit code of a child that has replied but must not be reused."""


WARM_UP_TEMPLATES = (
    "{{ 'a\\n\\u00e4' | wordwrap(1) | pprint }}{{ [1] | tojson }}{{ strftime_now('%B') }}",
    "{{ '%d' % 'x' }}",
    "{{ raise_exception('x') }}",
    "{% if %}",
)
"""Templates that use lazily loaded modules; the last ones fail."""


class GenerationExtension(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: the text that the model is to generate."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block whose text is passed through `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """The text of a block, between marks if they are requested."""
        begin, close = getattr(self.environment, "marks", ("", ""))
        return f"{begin}{caller()}{close}"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment that chat templates are written for."""

    def __init__(self) -> None:
        extensions = [GenerationExtension, "jinja2.ext.loopcontrols"]
        # The same options as in Hugging Face's apply_chat_template.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.marks = ("", "")
        self.filters["tojson"] = to_json
        # lipsum generates random text.
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals |= {"dict": DictMaker(), "namespace": PublicNamespace}

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an unsafe attribute on access, not only when it is used."""
        raise SecurityError(f"it uses the attribute {attribute!r} of a {type(obj).__name__}")


class DictMaker:
    """`dict` for templates: not the class itself, whose attributes give access to more."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        """Make a dict."""
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Make a dict with the same value for all keys."""
        return dict.fromkeys(*arguments)


class PublicNamespace(Namespace):
    """A namespace that refuses names starting with an underscore."""

    # Without a named `self`, so that a template may use that name as a key.
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
    """Refuse a name that starts with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it uses the name {name!r} in a namespace")


def raise_exception(message: Any) -> NoReturn:
    """Called by templates to reject a conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """The current time, formatted for templates."""
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class CompiledTemplate:
    """A compiled template."""

    def __init__(self, text: str) -> None:
        self.environment = ChatEnvironment()
        tree = self.environment.parse(text)
        self.template = self.environment.from_string(text)
        self.has_generation_blocks = any(
            isinstance(call.call, nodes.Call)
            and isinstance(call.call.node, nodes.ExtensionAttribute)
            for call in tree.find_all(nodes.CallBlock)
        )
        """Whether the template has generation blocks."""

    def render(self, values: dict[str, Any], marks: tuple[str, str], largest: int) -> str:
        """Render values. marks: around generation blocks; largest: maximum characters."""
        self.environment.marks = marks
        text = self.template.render(**values)
        if len(text) > largest:
            raise OverflowError(f"it writes more than {largest:,} characters")
        return text


def answer_request(request: dict[str, Any], known: dict[str, CompiledTemplate]) -> dict[str, Any]:
    """Reply to a request: a text, or the reason for a failure."""
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
    # The process may be left in a bad state: it is replaced after the reply.
    except (MemoryError, RecursionError, OverflowError, SyntaxError) as error:
        return {"refused": str(error)[:200] or type(error).__name__, "spent": True}
    # A template can raise any exception of the operations it performs.
    except Exception as error:
        return {"failed": str(error)[:300] or type(error).__name__}


def warm_up() -> None:
    """Load lazily imported modules and codecs before the limits forbid opening files."""
    for text in WARM_UP_TEMPLATES:
        answer_request(
            {"key": text, "text": text, "values": {}, "marks": ["", ""], "largest": 9}, {}
        )
    for name in ("ascii", "latin-1", "utf-8", "unicode-escape"):
        codecs.lookup(name)
    time.tzset()


def apply_limits(memory: int) -> None:
    """Give up everything that templates do not need. memory: bytes of address space."""
    warnings.simplefilter("ignore")
    most = {"AS": memory, "NOFILE": 0, "NPROC": 0, "FSIZE": 0, "CORE": 0}
    for name, value in most.items():
        # A stricter limit is already in force.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def set_timer(seconds: float) -> None:
    """Have the kernel kill this process after `seconds` of CPU time; 0 disarms the timer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # RLIMIT_CPU is a second line, in whole seconds, which no code in this process can postpone for
    # long.
    if seconds:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(used + seconds) + 1
        if most != resource.RLIM_INFINITY:
            soft = min(soft, most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def receive_request(channel: socket.socket) -> tuple[int, bytes] | None:
    """Number and body of the next request; None at the end of the input."""
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
    """Send a reply. number: of its request; 0 for a message that is not a reply."""
    body = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    channel.sendall(len(body).to_bytes(8) + number.to_bytes(8) + body)


def serve_requests(channel: socket.socket) -> int:
    """Answer requests until the input ends or the process is spent; return the exit code."""
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
        # The memory it has used is released with this process.
        if "spent" in reply:
            return SPENT_EXIT_CODE
    return 0


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits; exit if that has happened."""
    # Linux only.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    # The parent may have exited before prctl took effect.
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Fork children that answer requests, one at a time, until the parent closes the socket."""
    memory = int(sys.argv[1])
    parent = int(sys.argv[2])
    end_with_parent(parent)
    channel = socket.socket(fileno=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # The parent decides when the worker ends.
        signal.signal(number, signal.SIG_IGN)
    # Before the fork, so that each new child starts with everything loaded.
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
                # The child must neither return into the parent's loop nor run its exit handlers.
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # The child ended without a reply: report its exit code instead.
        if code not in (0, SPENT_EXIT_CODE):
            send_reply(channel, 0, {"ended": code})
            code = SPENT_EXIT_CODE


if __name__ == "__main__":
    main()
