"""Tokenizers with chat templates for the tests: small, as files, read by us and by transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ranvier.data.chat.template import load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import load_tokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|bot|>", "<|eot|>"]
TEXTS = [
    "The capital of France is Paris. What is 17 plus 4? It is 21, a number.\nYes, no.",
    "user assistant system tool naïve — 漢字 🙂 def main():\n    return 0\n",
]
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{% endif %}"""
INST = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\\n' %}\
{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + (head if loop.first else '') + m.content | trim + \
' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
HEADERS = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'tool' %}{% set role = 'user' %}{% else %}{% set role = message.role %}\
{% endif %}
{{- '<|' + ('bot' if role == 'assistant' else 'user') + '|>' + role + ':\\n' }}
{%- if message.content %}{{- message.content.strip() }}{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{- '\\n{"name": "' + \
call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}' }}\
{% endfor %}{% endif %}
{{- '<|eot|>\\n' if role == 'assistant' else '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>assistant:\\n' }}{% endif %}"""
THINKING = """\
{%- for message in messages %}{% if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if not loop.last else \
message.content %}
{{- '<|im_start|>assistant\\n' }}{% if loop.last and not '</think>' in content %}\
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{- content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ '### Answer:\\n' + m.content + '\\n\\n' }}\
{% else %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endif %}{% endfor %}"""
GENERATION = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ENDLESS = """\
{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else 'user' }}|>{{ m.content }}\
{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"""
PICKY = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}\
{{- '!' if m.content.startswith('y') }}{{- '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "inst": INST,
    "headers": HEADERS,
    "thinking": THINKING,
    "plain": PLAIN,
    "generation": GENERATION,
    "picky": PICKY,
}


@cache
def tokenizer_json(kind: str) -> str:
    """A small tokenizer.json: bytes that are joined, or pieces with a mark for spaces."""
    if kind == "level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", *SPECIALS], show_progress=False
        )
    made.train_from_iterator(TEXTS * 4, trainer)
    text: str = made.to_str()
    return text


def folder_of(folder: Path, template: str | list[dict[str, str]], kind: str = "level") -> Path:
    """A folder with the files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chat_of(folder: Path, template: str = "") -> ChatEncoder:
    """The chat of a folder."""
    words = load_tokenizer(folder, folder)
    return ChatEncoder(load_chat_template(words, folder, template), words)
