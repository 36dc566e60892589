"""Strict JSON of request bodies, and its conversion to dataclasses.

Numbers that are not finite, invalid UTF-8, unpaired surrogates and deep nesting are refused. Types
and bounds come from the annotations and `setting` of the dataclass; `openapi` reads the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from typing import Any, Literal, TypeVar, Union

from ranvier.infer.server.api_errors import ApiError, invalid_request
from ranvier.setting import setting_info

MAX_DEPTH = 64
"""Maximum nesting of objects and lists."""
SHOWN_CHARACTERS = 60
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
JsonValue = Any
"""Any value of JSON, for which no class is declared."""
Body = TypeVar("Body")


def parse_json(data: bytes) -> Any:
    """Returns the value of a JSON text; raises an error with status 400 if it is not valid."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _json_error(f"it is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise _depth_error() from None
    except json.JSONDecodeError as error:
        raise _json_error(
            f"{error.msg} at line {error.lineno}, column {error.colno}".replace(" at at", " at")
        ) from None
    # Python limits the digits of integers.
    except ValueError as error:
        raise _json_error(f"{error}") from None
    _check_values(value, look_at_texts=SURROGATE.search(data) is not None)
    return value


def _json_error(reason: str) -> ApiError:
    return invalid_request(
        f"The body is not valid JSON: {reason}. It must be one JSON object. Fix the body.",
        code="invalid_json",
    )


def _depth_error() -> ApiError:
    return invalid_request(
        f"The body has more than {MAX_DEPTH} nested objects and lists. Deeper nesting is not "
        "supported. Simplify it.",
        code="invalid_json",
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:SHOWN_CHARACTERS]} is too large for a number")
    return value


def _check_values(value: Any, *, look_at_texts: bool) -> None:
    """Checks depth and texts without recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                children.extend(one.values())
                children.extend(one)
            elif isinstance(one, list):
                children.extend(one)
        if look_at_texts:
            for one in (*level, *children):
                _check_text(one)
        level = [one for one in children if isinstance(one, (dict, list))]
        if not level:
            return
    raise _depth_error()


def _check_text(value: Any) -> None:
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise _json_error("a string contains an unpaired surrogate") from None


# ---- dataclasses -------------------------------------------------------------------------------


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass."""
    return typing.get_type_hints(cls)


def build_body(cls: type[Body], value: Any, path: str = "") -> tuple[Body, list[str]]:
    """Returns a dataclass from a JSON object, and the keys that it does not know.

    `null` stands for the default of a field that has one.
    """
    if not isinstance(value, dict):
        raise _type_error(path or "The body", value, "an object", path)
    assert dataclasses.is_dataclass(cls), cls
    hints = field_types(cls)
    found: dict[str, Any] = {}
    for one in dataclasses.fields(cls):
        is_required = (
            one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        )
        given = value.get(one.name)
        if given is None:
            if is_required:
                missing = f"{path}.{one.name}" if path else one.name
                raise invalid_request(
                    f"{missing} is missing. It is required. Add it to the body.",
                    param=missing,
                    code="missing_required_parameter",
                )
            continue
        where = f"{path}.{one.name}" if path else one.name
        found[one.name] = _build_value(hints[one.name], given, where)
        if isinstance(found[one.name], (int, float)) and not isinstance(found[one.name], bool):
            problem = setting_info(one).find_problem(where, found[one.name])
            if problem is not None:
                raise invalid_request(problem, param=where, code="invalid_value")
    return cls(**found), [key for key in value if key not in hints]


def _build_value(kind: Any, value: Any, path: str) -> Any:
    """Returns a JSON value as the annotated type of a field."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _build_union(typing.get_args(kind), value, path)
    if origin is Literal:
        known = typing.get_args(kind)
        if not any(type(value) is type(one) and value == one for one in known):
            raise _type_error(path, value, f"one of {', '.join(map(str, known))}", path)
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _type_error(path, value, "a list", path)
        (item,) = typing.get_args(kind)
        if item is int and all(type(one) is int for one in value):
            return value
        return [_build_value(item, one, f"{path}[{i}]") for i, one in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _type_error(path, value, "an object", path)
        item = typing.get_args(kind)[1]
        return {key: _build_value(item, one, f"{path}.{key}"[:200]) for key, one in value.items()}
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return build_body(kind, value, path)[0]
    return _build_scalar(kind, value, path)


def _build_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Returns the value as the first type that accepts it."""
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _build_value(kind, value, path)
        except ApiError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    wanted = " or ".join(describe_type(kind) for kind in kinds if kind is not type(None))
    raise _type_error(path, value, wanted, path)


def _build_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        # An integer may be too large for a float.
        try:
            return float(value)
        except OverflowError:
            raise _type_error(path, value, "a number", path) from None
    if kind is int and type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if type(value) is not kind:
        raise _type_error(path, value, describe_type(kind), path)
    return value


def describe_type(kind: Any) -> str:
    """Returns the name of a type in the words of JSON."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if typing.get_origin(kind) is list:
        return "a list"
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(one) for one in typing.get_args(kind))
    return names.get(kind, "an object")


def _type_error(name: str, value: Any, wanted: str, param: str) -> ApiError:
    # A long number or text is cut before it is shown.
    shown = repr(value) if not isinstance(value, (dict, list)) else json.dumps(value)
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return invalid_request(
        f"{name}={shown} has the wrong type. It must be {wanted}. Change the value.",
        param=param or None,
        code="invalid_type",
    )
