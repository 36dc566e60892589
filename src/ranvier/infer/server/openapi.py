"""The OpenAPI document, from the dataclasses that check the bodies."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

from ranvier import __version__
from ranvier.infer.server.json_body import field_types
from ranvier.infer.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
)
from ranvier.setting import MAX_INTEGER, SettingInfo, setting_info

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
INTEGER: dict[str, Any] = {"type": "integer"}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of lists."""
    return {"type": "array", "items": schema}


def record_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of objects that have all these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


ERROR = record_of(
    error=record_of(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT))
)
USAGE = record_of(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=record_of(cached_tokens=INTEGER),
)
HEAD = {
    "id": TEXT,
    "object": TEXT,
    "created": INTEGER,
    "model": TEXT,
    "system_fingerprint": TEXT,
}
FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
MODEL = record_of(
    id=TEXT, object=TEXT, created=INTEGER, owned_by=TEXT, root=TEXT, max_model_len=INTEGER
)
TOOL_CALL = record_of(id=TEXT, type=TEXT, function=record_of(name=TEXT, arguments=TEXT))
CHAT_MESSAGE = {
    **record_of(role=TEXT, content=nullable(TEXT)),
}
CHAT_MESSAGE["properties"] = {**CHAT_MESSAGE["properties"], "tool_calls": list_of(TOOL_CALL)}
CHAT_LOGPROBS = record_of(content=list_of(record_of(token=TEXT, logprob=NUMBER)))
CHAT = record_of(
    **HEAD,
    choices=list_of(
        record_of(
            index=INTEGER,
            message=CHAT_MESSAGE,
            logprobs=nullable(CHAT_LOGPROBS),
            finish_reason=FINISH,
        )
    ),
    usage=USAGE,
)
COMPLETION_LOGPROBS = record_of(
    tokens=list_of(TEXT),
    token_logprobs=list_of(nullable(NUMBER)),
    top_logprobs=list_of(nullable(ANY_OBJECT)),
    text_offset=list_of(INTEGER),
)
COMPLETION = record_of(
    **HEAD,
    choices=list_of(
        record_of(
            index=INTEGER,
            text=TEXT,
            logprobs=nullable(COMPLETION_LOGPROBS),
            finish_reason=FINISH,
        )
    ),
    usage=USAGE,
)
TOKENS = record_of(
    count=INTEGER,
    max_model_len=INTEGER,
    tokens=list_of(INTEGER),
    token_strs=nullable(list_of(TEXT)),
)
PROMPT = record_of(prompt=TEXT)
HEALTH = record_of(
    status={"type": "string", "enum": ["ok", "degraded", "loading", "down"]},
    draining={"type": "boolean"},
    replicas=list_of(record_of(replica=INTEGER, state=TEXT)),
)
POSTS: tuple[tuple[str, type, str, dict[str, Any], bool], ...] = (
    ("/v1/chat/completions", ChatBody, "Answers a conversation.", CHAT, True),
    ("/v1/completions", CompletionBody, "Continues one or several prompts.", COMPLETION, True),
    ("/tokenize", TokenizeBody, "Returns the tokens of a text or a conversation.", TOKENS, False),
    ("/detokenize", DetokenizeBody, "Returns the text of tokens.", PROMPT, False),
    ("/apply-template", TemplateBody, "Returns the text of a conversation.", PROMPT, False),
)
"""Path, body, description, answer, and whether the answer may be a stream."""
GETS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("/v1/models", "Lists the models.", record_of(object=TEXT, data=list_of(MODEL))),
    ("/health", "Reports whether the engines answer.", HEALTH),
    ("/ready", "Answers 200 if requests are accepted.", record_of(status=TEXT)),
    ("/version", "Returns the version.", record_of(version=TEXT)),
)


def build_openapi() -> dict[str, Any]:
    """Returns the OpenAPI document of the server."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for path, body, text, answer, streams in POSTS:
        content: dict[str, Any] = {"application/json": {"schema": answer}}
        if streams:
            # The schema of one event; its data is JSON, or [DONE].
            content["text/event-stream"] = {"schema": record_of(data=TEXT)}
        schema = schema_of(body, schemas)
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": _responses({"description": "The result.", "content": content}),
            }
        }
    for path, text, answer in GETS:
        paths[path] = {"get": {"summary": text, "responses": _responses(_json_answer(answer))}}
    # This one answers with its own object while the engines are down.
    paths["/health"]["get"]["responses"]["503"] = _json_answer({"anyOf": [HEALTH, ERROR]})
    paths["/v1/models/{name}"] = {
        "get": {
            "summary": "Returns one model.",
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT}],
            "responses": _responses(_json_answer(MODEL)),
        }
    }
    paths["/metrics"] = {
        "get": {
            "summary": "Returns the metrics of Prometheus.",
            "responses": _responses(
                {"description": "The metrics.", "content": {"text/plain": {"schema": TEXT}}}
            ),
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ranvier", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json_answer(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "The result.", "content": {"application/json": {"schema": schema}}}


def _responses(result: dict[str, Any]) -> dict[str, Any]:
    error = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    codes = ("400", "401", "404", "405", "408", "413", "415", "429", "500", "503")
    return {"200": result, **dict.fromkeys(codes, error)}


def schema_of(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a type; those of dataclasses are collected in `schemas`."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return {}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one, schemas) for one in typing.get_args(kind)]}
    if origin is Literal:
        return {"type": "string", "enum": list(typing.get_args(kind))}
    if origin is list:
        return list_of(schema_of(typing.get_args(kind)[0], schemas))
    if origin is dict:
        value = schema_of(typing.get_args(kind)[1], schemas)
        return {"type": "object", "additionalProperties": value or True}
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _schema_of_dataclass(kind, schemas)
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if kind is type(None):
        return {"type": "null"}
    return {"type": names[kind]}


def _schema_of_dataclass(cls: type, schemas: dict[str, Any]) -> dict[str, Any]:
    name = cls.__name__
    if name not in schemas:
        properties = {}
        required = []
        # Entered first: a class may contain itself.
        schemas[name] = {}
        for one in dataclasses.fields(cls):
            schema = schema_of(field_types(cls)[one.name], schemas)
            bounded = _add_bounds(schema, setting_info(one))
            is_required = (
                one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            )
            if is_required:
                required.append(one.name)
            elif {"type": "null"} not in bounded.get("anyOf", ()):
                # null stands for the default.
                bounded = nullable(bounded)
            properties[one.name] = bounded
        schemas[name] = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": True,
        }
    return {"$ref": f"#/components/schemas/{name}"}


def _add_bounds(schema: dict[str, Any], info: SettingInfo) -> dict[str, Any]:
    """Returns the schema with the bounds of a setting at its numbers."""
    if "anyOf" in schema:
        return {"anyOf": [_add_bounds(one, info) for one in schema["anyOf"]]}
    if schema.get("type") not in ("integer", "number"):
        return schema
    found = dict(schema)
    if info.minimum is not None:
        found["minimum"] = info.minimum
    if info.maximum is not None:
        found["maximum"] = info.maximum
    elif schema["type"] == "integer" and info != SettingInfo():
        found["maximum"] = MAX_INTEGER
    return found
