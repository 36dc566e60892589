"""Templates that attack end early, without harm; those that do not keep what they need."""

from __future__ import annotations

import pytest

from ranvier.data import sandbox
from ranvier.data.sandbox import Rendering
from ranvier.errors import DataError, RefusedError

TWICE = (
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s OP n.s %}{% endfor %}"
)
ATTACKS = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ messages['__class__'] }}",
    "filter": "{{ ''|attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "init": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "dict": "{{ dict.__call__.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "change": "{{ messages.append(1) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "lists": "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "tree": "{% macro m(n) %}{% if n %}{{ m(n-1) ~ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "times": "{{ 'a' * 10**10 }}",
    "power": "{{ 9**9**9 }}",
    "plus": TWICE.replace("OP", "+"),
    "tilde": TWICE.replace("OP", "~"),
    "nested": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}"
    "{% endfor %}{{ n.s }}",
    "width": "{{ 'x'.ljust(10**12) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "join": "{{ range(99999)|map('string')|join('x' * 99999)|length }}",
    "replace": "{{ ('x' * 99999).replace('x', 'y' * 99999)|length }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "TURNS", 20_000)
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    with pytest.raises(RefusedError, match="The chat template mine was stopped"):
        Rendering(ATTACKS[name], "mine")({"messages": []})


def test_a_template_cannot_read_files() -> None:
    for text in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}"):
        with pytest.raises(DataError, match="no loader"):
            Rendering(text, "mine")({})


def test_time_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.0)
    with pytest.raises(RefusedError, match="not enough"):
        Rendering("{% for i in range(9) %}{% endfor %}", "mine")({})


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
    }
    for text, wanted in cases.items():
        assert Rendering(text, "mine")({}) == wanted, text
    assert len(Rendering("{{ strftime_now('%Y') }}", "mine")({})) == 4
    marked = Rendering("x{% generation %}a{% endgeneration %}b", "mine")
    assert marked.generates and marked({}, marks=True) == "x\udff0a\udff1b"
    assert not Rendering("{% call dict() %}{% endcall %}", "mine").generates
