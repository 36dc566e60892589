"""Templates are rendered in a worker, which keeps what they need and ends with its parent.

What attacks end with is in tests/hostile.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranvier.data.chat import sandbox
from ranvier.data.chat.sandbox import SandboxedTemplate, TemplateWorker
from ranvier.errors import DataError, UnsafeInputError

LARGE = [
    "{{ '%6000000000d' % 1 }}",
    "{{ '{:>6000000000}'.format('') }}",
    "{{ ('\\t' * 9).expandtabs(2000000000) }}",
    "{{ 'a\\nb'|indent(6000000000) }}",
    "{{ [1]|tojson(indent=6000000000) }}",
    "{{ ('a' * 1000000)|wordwrap(1, wrapstring='b' * 9000) }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 9000}) }}",
]
"""Templates that took gigabytes before they were refused."""


@pytest.fixture
def worker() -> Iterator[TemplateWorker]:
    with TemplateWorker(seconds=1.0) as made:
        yield made


def pid_of(worker: TemplateWorker) -> int:
    assert worker._process is not None
    return worker._process.pid


def test_no_process_grows_by_gigabytes() -> None:
    before = [resource.getrusage(who).ru_maxrss for who in (0, -1)]
    with TemplateWorker(seconds=0.3) as worker:
        for text in LARGE:
            with pytest.raises(UnsafeInputError, match="The chat template mine was stopped"):
                SandboxedTemplate(text, "mine", worker)({})
    after = [resource.getrusage(who).ru_maxrss for who in (0, -1)]
    assert after[0] - before[0] < 64 << 10, "this process"
    # a process that is about to be replaced counts as large as the one that it was forked from
    assert after[1] <= max(before[1], after[0], sandbox.MEMORY_BYTES >> 10), (
        "the worker and its children"
    )


def test_what_templates_need_is_there() -> None:
    cases = {
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "{{ {'ä': '<b>'} | tojson }}": '{"ä": "<b>"}',
        "{{ [1, 2] | tojson(indent=1) }}": "[\n 1,\n 2\n]",
        "{{ 'a' ~ 1 ~ none }}": "a1None",
        "{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}": "2",
        "{{ dict(a=1)['a'] }}{{ 'ab'[::-1] }}{{ 'a,b'.split(',') | join('-') }}": "1baa-b",
        "  {% if true %}\n  x\n  {% endif %}\n": "  x\n",
        "{{ undefined_name }}{{ bos_token is defined }}": "False",
        "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(3) }}": "[3]",
        "{{ '%s and %d' % ('a', 3) }}": "a and 3",
        "{% generation %}a{% endgeneration %}b": "ab",
        "{{ 'a b' | wordwrap(1) | pprint }}": "'a\\nb'",  # what is loaded when it is first used
        "{{ '\\u00e4\\t' | upper | urlize }}": "Ä\t",
    }
    for text, wanted in cases.items():
        assert SandboxedTemplate(text, "mine")({}) == wanted, text
    assert len(SandboxedTemplate("{{ strftime_now('%Y') }}", "mine")({})) == 4
    marked = SandboxedTemplate("x{% generation %}a{% endgeneration %}b", "mine")
    assert marked.has_generation_blocks and marked({}, marks=True) == "x\udff0a\udff1b"
    assert not SandboxedTemplate("{% call dict() %}{% endcall %}", "mine").has_generation_blocks


def test_texts_arrive_as_they_are() -> None:
    """Also halves of pairs side by side, which JSON would join; and what JSON has no word for."""
    echo = SandboxedTemplate("{{ x }}", "mine")
    for text in ("\ud800\udc00 \udfff", "\0\x1b[1m\r\n\u2028", "🙂" * 1000, ""):
        assert echo({"x": text}) == text
    assert echo({"x": Path("a")}) == "a" and echo({"x": float("inf")}) == "inf"


def test_what_is_too_large_or_deep_is_named() -> None:
    echo = SandboxedTemplate("{{ x }}", "mine")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * (sandbox.MAX_CHARACTERS + 1), deep):
        with pytest.raises(
            DataError, match=r"talks:3: the chat template mine rejects this conversation"
        ):
            echo({"x": value}, at="talks:3")
    assert echo({"x": 1}) == "1"


def test_one_worker_renders_all(worker: TemplateWorker) -> None:
    one, two = (SandboxedTemplate(f"{{{{ x }}}}{i}", "mine", worker) for i in range(2))
    pid = pid_of(worker)
    assert [one({"x": i}) + two({"x": i}) for i in range(3)] == ["0001", "1011", "2021"]
    for text in ("{{ ''.__class__ }}", "{{ 'a' * 10**10 }}"):  # others are not told of it
        with pytest.raises(UnsafeInputError):
            SandboxedTemplate(text, "mine", worker)({})
    assert one({"x": 5}) == "50" and pid_of(worker) == pid


def test_a_worker_that_was_killed_is_started_again(worker: TemplateWorker) -> None:
    echo = SandboxedTemplate("{{ x }}", "mine", worker)
    first = pid_of(worker)
    os.kill(first, signal.SIGKILL)
    assert worker._process is not None and worker._process.wait() == -signal.SIGKILL
    assert echo({"x": 1}) == "1" and pid_of(worker) != first
    children = Path(f"/proc/{pid_of(worker)}/task/{pid_of(worker)}/children").read_text()
    os.kill(int(children), signal.SIGKILL)  # as the kernel does where memory is short
    assert echo({"x": 2}) == "2"


def test_a_forked_process_has_a_worker_of_its_own(worker: TemplateWorker) -> None:
    echo = SandboxedTemplate("{{ x }}", "mine", worker)
    process, channel = worker._process, worker._channel
    assert process is not None and channel is not None
    kept = channel.dup()  # the socket is closed in the new process only
    worker._owner = -1
    assert echo({"x": 1}) == "1" and pid_of(worker) != process.pid
    kept.close()
    assert os.waitpid(process.pid, 0)[1] == 0, "it ends when nobody can ask it"


PARENT = """
import os, sys, time
from ranvier.data.chat.sandbox import SandboxedTemplate, TemplateWorker
worker = TemplateWorker(seconds=60.0)
SandboxedTemplate("{{ 1 }}", "mine", worker)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(worker._process.pid, flush=True)
endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SandboxedTemplate(endless, "mine", worker)({})
"""


def test_a_busy_worker_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        parent.kill()
    limit = time.monotonic() + 20.0
    gone = [Path(f"/proc/{one}") for one in (pid, *children)]
    while any(path.exists() for path in gone) and time.monotonic() < limit:
        time.sleep(0.02)
    assert children and not any(path.exists() for path in gone)
