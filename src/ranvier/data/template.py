"""Template: how a tokenizer writes conversations, from the files beside its `tokenizer.json`.

`chat_template.jinja` comes first, then the `chat_template` of `tokenizer_config.json` (a text, or
several with names; `tool_use` is for conversations with tools). Tokens such as `eos_token` are
those of `tokenizer_config.json` or `special_tokens_map.json`. Nothing else in these files is read,
and no code they name is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ranvier.data.files import digest_of, size_of
from ranvier.data.sandbox import Rendering
from ranvier.data.tokenizer import NAMES, Tokenizer
from ranvier.errors import DataError

CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
MOST_BYTES = 1 << 22
BUILT_IN = "(built in)"
"""The origin of `DEFAULT`."""
DEFAULT = """\
{%- for message in messages -%}
{{ message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ message.content + eos_token }}{%- endgeneration -%}
{%- else -%}
{{ message.content + eos_token -}}
{%- endif -%}
{{ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant\\n' }}{%- endif -%}
"""
"""For tokenizers without one: `role`, a line break, the content, the end, a line break."""


@dataclass(frozen=True)
class Template:
    """Texts in Jinja by name, and the tokens they may speak of."""

    texts: Mapping[str, str]
    """`default`, perhaps `tool_use`."""
    tokens: Mapping[str, str]
    """Special tokens by the names templates have for them, such as eos_token."""
    origin: str
    """Where it comes from, for messages."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The rest of tokenizer_config.json, for other tools."""

    @cached_property
    def fingerprint(self) -> str:
        """The digest of texts and tokens."""
        content = json.dumps([dict(self.texts), dict(self.tokens)], sort_keys=True)
        return digest_of(content)

    @cached_property
    def renderings(self) -> dict[str, Rendering]:
        """The templates, compiled."""
        return {name: Rendering(text, self.origin) for name, text in self.texts.items()}

    def rendering(self, tools: Any = None) -> Rendering:
        """The template of a conversation, with tools or without."""
        named = "tool_use" if tools and "tool_use" in self.renderings else "default"
        return self.renderings[named]

    def save(self, folder: Path) -> None:
        """Write it as a tokenizer_config.json, at once or not at all."""
        texts: Any = [{"name": n, "template": t} for n, t in self.texts.items()]
        named = {"chat_template": self.texts["default"] if len(self.texts) == 1 else texts}
        content = json.dumps({**self.config, **self.tokens, **named}, indent=1, sort_keys=True)
        temporary = folder / f".{CONFIG}.{os.getpid()}"
        temporary.write_text(content + "\n", encoding="utf-8")
        os.replace(temporary, folder / CONFIG)


def template_of(tokenizer: Tokenizer, name: str | Path, file: str = "") -> Template:
    """The template in a file, else that of a tokenizer of this name, else `DEFAULT`.

    name: as for `tokenizer_of`; its files lie in the folder of the tokenizer.json.
    """
    folder = _folder(name)
    config = _content(folder, CONFIG)
    tokens = _tokens(_content(folder, SPECIAL)) | _tokens(config)
    end = {"eos_token": tokenizer.names[tokenizer.end]}
    tokens = tokens or end
    texts = _texts(config.pop("chat_template", None), folder / CONFIG if folder else Path())
    origin = str(folder / CONFIG) if folder else ""
    config.pop("auto_map", None)  # code of strangers
    beside = folder / FILE if folder else Path()
    if file:
        texts, origin = {"default": _read(Path(file))}, file
    elif folder is not None and os.path.lexists(beside):
        texts, origin = {**texts, "default": _read(beside)}, str(beside)
    if "default" not in texts:
        texts, origin, tokens = {"default": DEFAULT}, BUILT_IN, end | tokens
    return Template(texts, tokens, origin, config)


def _folder(name: str | Path) -> Path | None:
    if name in (*NAMES, "train"):
        return None
    path = Path(name)
    if os.path.isdir(path):
        return path
    return path.parent if path.name == "tokenizer.json" else None


def _read(path: Path) -> str:
    remedy = "Check data.template and the files beside the tokenizer.json."
    try:
        if size_of(path) > MOST_BYTES:
            raise OSError(f"it has more than {MOST_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} cannot be read: {reason}. It says how conversations are written. {remedy}"
        ) from None


def _content(folder: Path | None, name: str) -> dict[str, Any]:
    """The JSON object of a file of a tokenizer; empty if it is not there."""
    path = None if folder is None else folder / name
    if path is None or not os.path.lexists(path):
        return {}
    try:
        content = json.loads(_read(path))
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is no JSON object: {error}. It names the special tokens of a tokenizer. "
            "Copy it again."
        ) from None
    return content


def _tokens(content: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: texts, or objects with one."""
    extra = content.get("extra_special_tokens")
    values = {**content, **(extra if isinstance(extra, dict) else {})}
    found = {}
    for name, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str) and name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _texts(value: Any, path: Path) -> dict[str, str]:
    """Templates by name, from a text or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        texts = value if isinstance(value, dict) else {x["name"]: x["template"] for x in value}
        if all(isinstance(x, str) for pair in texts.items() for x in pair):
            return dict(texts)
    except (TypeError, KeyError):
        pass
    raise DataError(
        f"{path}: chat_template is {value!r:.80}. It is a text, or a list of objects with name and "
        "template. Mend it, or name another one with data.template."
    )
