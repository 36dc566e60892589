"""Chat templates, from the files next to a `tokenizer.json`.

`chat_template.jinja` comes first, then the `chat_template` of `tokenizer_config.json` (a string, or
several with names; `tool_use` is for conversations with tools). Tokens such as `eos_token` come
from `tokenizer_config.read_special_tokens`. Nothing else in these files is read, and no code that
they name is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ranvier.data.chat.sandbox import SandboxedTemplate
from ranvier.data.checksums import digest_of
from ranvier.data.tokenizer import TOKENIZER_NAMES, Tokenizer
from ranvier.data.tokenizer_config import (
    TOKENIZER_CONFIG,
    read_special_tokens,
    read_tokenizer_config,
    read_tokenizer_file,
    save_tokenizer_config,
)
from ranvier.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
BUILT_IN = "(built in)"
"""Origin of `DEFAULT_TEMPLATE`."""
DEFAULT_TEMPLATE = """\
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
"""For tokenizers without a template: `role`, newline, content, EOS, newline."""


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja templates by name, and the special tokens they may use."""

    texts: Mapping[str, str]
    """`default`, and possibly `tool_use`."""
    tokens: Mapping[str, str]
    """Special tokens by their names in templates, such as eos_token."""
    origin: str
    """Where the template comes from, for error messages."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The rest of tokenizer_config.json, for other tools."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of templates and tokens."""
        content = json.dumps([dict(self.texts), dict(self.tokens)], sort_keys=True)
        return digest_of(content)

    @cached_property
    def compiled_templates(self) -> dict[str, SandboxedTemplate]:
        """The compiled templates by name."""
        return {name: SandboxedTemplate(text, self.origin) for name, text in self.texts.items()}

    def select_template(self, tools: Any = None) -> SandboxedTemplate:
        """The template for a conversation with or without tools."""
        if tools and "tool_use" in self.compiled_templates:
            named = "tool_use"
        else:
            named = "default"
        return self.compiled_templates[named]

    def save(self, folder: Path) -> None:
        """Atomically write the template into a tokenizer_config.json."""
        texts: Any = [{"name": n, "template": t} for n, t in self.texts.items()]
        named = {"chat_template": self.texts["default"] if len(self.texts) == 1 else texts}
        save_tokenizer_config(folder, {**self.config, **self.tokens, **named})


def load_chat_template(tokenizer: Tokenizer, name: str | Path, file: str = "") -> ChatTemplate:
    """The template in `file`, else of the named tokenizer, else `DEFAULT_TEMPLATE`.

    name: as for `load_tokenizer`; its files are in the directory of the tokenizer.json.
    """
    folder = _tokenizer_folder(name)
    config = read_tokenizer_config(folder)
    tokens = read_special_tokens(folder)
    end = {"eos_token": tokenizer.token_names[tokenizer.eos_token_id]}
    # If no special tokens are named, templates still get the end token of the tokenizer.
    tokens = tokens or end
    texts = _parse_templates(
        config.pop("chat_template", None), folder / TOKENIZER_CONFIG if folder else Path()
    )
    if folder:
        origin = str(folder / TOKENIZER_CONFIG)
    else:
        origin = ""
    # auto_map names untrusted code; it must not reach the files that we save.
    config.pop("auto_map", None)
    if folder:
        template_file = folder / TEMPLATE_FILE
    else:
        template_file = Path()
    if file:
        texts = {"default": read_tokenizer_file(Path(file))}
        origin = file
    elif folder is not None and os.path.lexists(template_file):
        # The file replaces the default only; a tool_use template of the config stays.
        texts = {**texts, "default": read_tokenizer_file(template_file)}
        origin = str(template_file)
    if "default" not in texts:
        texts = {"default": DEFAULT_TEMPLATE}
        origin = BUILT_IN
        # The default template needs eos_token.
        tokens = end | tokens
    return ChatTemplate(texts, tokens, origin, config)


def _tokenizer_folder(name: str | Path) -> Path | None:
    if name in (*TOKENIZER_NAMES, "train"):
        return None
    path = Path(name)
    if os.path.isdir(path):
        return path
    if path.name == "tokenizer.json":
        return path.parent
    return None


def _parse_templates(value: Any, path: Path) -> dict[str, str]:
    """Templates by name, from a string or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        if isinstance(value, dict):
            texts = value
        else:
            texts = {x["name"]: x["template"] for x in value}
        if all(isinstance(x, str) for pair in texts.items() for x in pair):
            return dict(texts)
    except (TypeError, KeyError):
        pass
    raise DataError(
        f"{path}: chat_template is {value!r:.80}. It must be a string, or a list of objects with "
        "name and template. Fix it, or set data.chat_template to another file."
    )
