"""Sandbox: Jinja templates of strangers, rendered without harm and in bounded time.

The environment is the one chat templates are written for (blocks trimmed, loop controls, `tojson`,
`raise_exception`, `strftime_now`, generation blocks). Jinja's sandbox keeps a template from
Python's inside: an attribute that leads there is refused where it is asked for. A budget bounds its
work: each turn of a loop and each macro is counted, and what operators, calls, filters and the text
take is weighed before they take it, so that nothing grows beyond all bounds. Not handled: a
template that works hard within the budget; it ends after `SECONDS`.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ranvier.errors import DataError, RefusedError

TURNS = 500_000
"""Turns of loops, macros and pieces of values that a rendering may take."""
SECONDS = 5.0
"""How long it may take."""
LARGEST = 20_000_000
"""Characters of a text, elements of a list and size of a number, at most."""
BEGIN, CLOSE = "\udff0", "\udff1"
"""Around what a generation block says, if it is asked for: no text has halves of pairs."""
WEIGHED = [
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "list",
    "pprint",
    "replace",
    "slice",
    "string",
    "sum",
    "tojson",
]
"""Filters that make much of little."""
REPEATING = ("join", "do_join", "replace", "do_replace")
"""Functions whose result may be as long as the product of what they are given."""


class BudgetError(Exception):
    """A template that took more than its budget."""


class Budget:
    """What a rendering may still do."""

    def __init__(self) -> None:
        self.left = 0
        self.until = 0.0

    def fill(self) -> None:
        """Begin a rendering."""
        self.left, self.until = TURNS, time.monotonic() + SECONDS

    def spend(self, turns: int = 1) -> str:
        """Take some; no text."""
        self.left -= turns
        if self.left < 0 or time.monotonic() > self.until:
            raise BudgetError(f"{TURNS:,} turns or {SECONDS:g} s were not enough")
        return ""

    def weigh(self, *values: Any) -> None:
        """Refuse what is too large, however it is nested."""
        size, stack = 0, list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, (int, float)):
                size += 1
                if abs(value) > LARGEST and isinstance(value, int):
                    raise BudgetError(f"a number above {LARGEST:,}")
            elif isinstance(value, (list, tuple, Mapping)):
                self.spend(len(value) + 1)
                size += len(value)
                stack += [*value, *value.values()] if isinstance(value, Mapping) else value
            if size > LARGEST:
                raise BudgetError(f"a text or list above {LARGEST:,} characters or elements")


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the model is to say."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """A block whose text passes through `said`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    def said(self, caller: Callable[[], str]) -> str:
        """The text of a block, between marks if they are asked for."""
        text = str(caller())
        marked = getattr(self.environment, "marks", False)
        return f"{BEGIN}{text}{CLOSE}" if marked else text


class Counted(NodeTransformer):
    """The template with a count in each loop and macro, and each `~` a call that is weighed."""

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None).set_lineno(node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            finalize=self._said,
        )
        self.marks = False
        self.budget = Budget()
        self.count = self.budget.spend
        self.filters["tojson"] = _tojson
        for name in WEIGHED:
            self.filters[name] = self._weighed(self.filters[name])
        del self.globals["lipsum"]  # words by chance
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.globals |= {"dict": Dicts(), "namespace": Names}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        counted: nodes.Template = Counted().visit(tree)
        return counted

    def _said(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    def joined(self, *values: Any) -> str:
        """Values as one text, the operator `~`."""
        self.budget.weigh(*values)
        return "".join(map(str, values))

    def _weighed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also how it wants to be called
        def call(*arguments: Any, **options: Any) -> Any:
            given = [list(x) if isinstance(x, Iterator) else x for x in arguments]
            values = [*given, *options.values()]
            self.budget.weigh(*values)
            if function.__name__ in REPEATING:
                _check_product(values)
            return function(*given, **options)

        return call

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute at once, not when it is used."""
        raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operate on what is small enough."""
        self.budget.weigh(left, right)
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and numbers and abs(right) > 64:
            raise BudgetError("a power above 64")
        if operator == "*" and not numbers:
            times, thing = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and hasattr(thing, "__len__"):
                self.budget.weigh(len(thing) * times)
        made = super().call_binop(context, operator, left, right)
        self.budget.weigh(made)
        return made

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call with what is small enough."""
        numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, (int, str))]
        __self.budget.weigh(*numbers)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and getattr(__obj, "__name__", "") in REPEATING:
            _check_product([owner, *args])
        made = super().call(__context, __obj, *args, **kwargs)
        __self.budget.weigh(made)
        return made


class Dicts:
    """What templates call as `dict`: no class, whose attributes lead further."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        """A dict."""
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """A dict with one value for all keys."""
        return dict.fromkeys(*arguments)


class Names(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **values)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        Namespace.__setitem__(self, name, value)


def _check_product(values: Sequence[Any]) -> None:
    """Refuse two lengths that may be multiplied."""
    sizes = sorted(len(x) for x in values if hasattr(x, "__len__"))
    if len(sizes) > 1 and sizes[-1] * sizes[-2] > 50 * LARGEST:
        raise BudgetError(f"{sizes[-1]:,} times {sizes[-2]:,} characters")


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace")


def _raise(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
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


class Rendering:
    """A template, compiled, and what it makes of values."""

    def __init__(self, text: str, origin: str) -> None:
        self.origin = origin
        self._sandbox = Sandbox()
        try:
            tree = self._sandbox.parse(text)
            self._template = self._sandbox.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{origin}:{error.lineno}: {error.message}. A chat template is written in Jinja. "
                "Mend it, or name another one with data.template."
            ) from None
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise RefusedError(f"{self._what(error)} Remove it.") from None
        self.generates = any(
            isinstance(call.call, nodes.Call)
            and isinstance(call.call.node, nodes.ExtensionAttribute)
            for call in tree.find_all(nodes.CallBlock)
        )
        """Whether it has generation blocks."""

    def __call__(self, values: Mapping[str, Any], *, at: str = "", marks: bool = False) -> str:
        """The text; at: where the values come from; marks: around generation blocks."""
        self._sandbox.marks = marks
        self._sandbox.budget.fill()
        try:
            text = self._template.render(**values)
            self._sandbox.budget.weigh(text)
            return text
        except (SecurityError, BudgetError, RecursionError, MemoryError, OverflowError) as error:
            raise RefusedError(
                f"{self._what(error)} A template says how a conversation is written, and nothing "
                "else. Use another one (data.template)."
            ) from None
        except RefusedError:
            raise
        except Exception as error:
            # a template raises whatever Python does with what it is given
            raise DataError(
                f"{at + ': ' if at else ''}the chat template {self.origin} does not take this "
                f"conversation: {str(error)[:300] or type(error).__name__}. It decides which "
                "roles and turns there may be. Mend the record, or use another data.template."
            ) from None

    def _what(self, error: BaseException) -> str:
        reason = str(error)[:200] or type(error).__name__
        return f"The chat template {self.origin} was stopped: {reason}."
