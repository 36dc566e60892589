"""Connects the front with detokenization, tool calls and structured output.

Detokenization and tool calls belong to the package; grammars are an extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import PlanError, RanvierError
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.server.serve import ServerOptions
from ranvier.infer.server.served_model import (
    ServedModel,
    TextStream,
    ToolParserInterface,
    read_model_directory,
)


class FamilyToolFormat:
    """Tool calls in the syntax of a family of models."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self._calls: Any = importlib.import_module("ranvier.infer.tool_calls")
        if name not in self._calls.TOOL_PARSERS:
            known = ", ".join(self._calls.TOOL_PARSERS)
            raise PlanError(
                f"serve.tool_call_parser={name!r} is not known. It must be auto, none, or one of "
                f"{known}. Use auto."
            )
        self.name = name
        self._special = tokenizer.special_token_ids
        self.needs_special_tokens = self._calls.TOOL_PARSERS[name].opening in self._special

    def make_parser(self) -> ToolParserInterface:
        """Returns a parser for one answer."""
        parser: ToolParserInterface = self._calls.TOOL_PARSERS[self.name]()
        return parser

    def build_structure(self, tools: Sequence[dict[str, Any]], name: str) -> StructuredOutput:
        """Returns the language of answers that call a tool; name: of the tool, empty for any."""
        known = [
            self._calls.Tool(
                name=one["function"]["name"], parameters=one["function"].get("parameters") or {}
            )
            for one in tools
        ]
        structure: StructuredOutput = self._calls.tool_choice_output(
            self.name, known, self._special, name=name
        )
        return structure


class SimpleTextStream:
    """Decodes all tokens again for each new one; correct, and quadratic in the length."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self.stop_string: str | None = None
        self._decode = (
            tokenizer.decode if params.skip_special_tokens else tokenizer.decode_with_specials
        )
        self._prompt = list(prompt[-8:])
        self._start = len(self._decode(self._prompt))
        self._tokens: list[int] = []
        self._params = params
        self._sent = 0
        self._text = ""

    def append(self, token_ids: Sequence[int], *, stop_token: int | None = None) -> str:
        """Adds tokens. Returns new text, without what may become a stop string."""
        shown = list(token_ids)
        if stop_token is not None and not self._params.include_stop_str_in_output:
            shown.pop()
        for token in shown:
            if self.stop_string is not None:
                break
            self._tokens.append(token)
            text = self._decode([*self._prompt, *self._tokens])[self._start :]
            # A character whose bytes are incomplete is held back.
            if not text.endswith("\ufffd"):
                self._text = text
                self._find_stop()
        return self._take(hold=self.stop_string is None)

    def finish(self) -> str:
        """Returns the rest of the text."""
        if self.stop_string is not None:
            return ""
        self._text = self._decode([*self._prompt, *self._tokens])[self._start :]
        return self._take(hold=False)

    def _find_stop(self) -> None:
        if len(self._tokens) <= self._params.min_tokens:
            return
        found = [(self._text.find(one, max(0, self._sent)), one) for one in self._params.stop]
        places = [(place, one) for place, one in found if place >= 0]
        if places:
            place, stop = min(places)
            self.stop_string = stop
            end = place + len(stop) * self._params.include_stop_str_in_output
            self._text = self._text[:end]

    def _take(self, *, hold: bool) -> str:
        end = len(self._text)
        if hold:
            end -= max((_overlap(self._text, one) for one in self._params.stop), default=0)
        end = max(end, self._sent)
        found = self._text[self._sent : end]
        self._sent = end
        return found


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that begins a stop string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def find_tool_format(name: str, model: ServedModel) -> FamilyToolFormat | None:
    """Returns the format of tool calls of a model; None if it is not known."""
    if name == "none":
        return None
    if name != "auto":
        return FamilyToolFormat(name, model.tokenizer)
    if model.chat is None:
        return None
    try:
        calls = importlib.import_module("ranvier.infer.tool_calls")
    except ImportError:
        return None
    found = calls.detect_tool_parser("\n".join(model.chat.template.texts.values()))
    return None if found is None else FamilyToolFormat(found, model.tokenizer)


def find_structure_check(model: ServedModel) -> Callable[[StructuredOutput], None] | None:
    """Returns the check of structured outputs; None without the extra `grammar`."""
    try:
        structured: Any = importlib.import_module("ranvier.infer.structured_output")
        ends = {model.tokenizer.eos_token_id}
        if model.chat is not None:
            ends |= model.chat.end_token_ids
        compiler = structured.GrammarCompiler(model.tokenizer, model.tokenizer.vocab_size, ends)
    except (ImportError, RanvierError):
        return None
    check: Callable[[StructuredOutput], None] = compiler.check
    return check


def make_text_stream(
    tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
) -> TextStream:
    """Returns the text of an answer."""
    try:
        module: Any = importlib.import_module("ranvier.infer.detokenizer")
    except ImportError:
        return SimpleTextStream(tokenizer, prompt, params)
    stream: TextStream = module.IncrementalDetokenizer(tokenizer, prompt, params)
    return stream


def load_served_model(options: ServerOptions) -> ServedModel:
    """Loads what the front needs of a model."""
    config = options.config
    model = read_model_directory(
        options.folder,
        make_text_stream,
        name=config.served_model_name,
        chat_template=config.chat_template,
    )
    model.adapters = options.adapters
    model.tool_calls = find_tool_format(config.tool_call_parser, model)
    model.check_structure = find_structure_check(model)
    return model
