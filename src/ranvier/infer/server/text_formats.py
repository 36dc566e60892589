"""Connects the front with detokenization, tool calls and structured output."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import PlanError
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.grammar import GrammarLimits, StructuredOutputError, import_llguidance
from ranvier.infer.grammar_worker import GrammarWorker
from ranvier.infer.sampling_params import StructuredOutput
from ranvier.infer.server.serve import ServerOptions
from ranvier.infer.server.served_model import ServedModel, read_model_directory
from ranvier.infer.tool_calls import (
    TOOL_PARSERS,
    Tool,
    ToolCallParser,
    detect_tool_parser,
    tool_choice_output,
)

CHECKED_STRUCTURES = 1024
"""Number of results of checks that are kept."""


class FamilyToolFormat:
    """Tool calls in the syntax of a family of models."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        if name not in TOOL_PARSERS:
            raise PlanError(
                f"serve.tool_call_parser={name!r} is not known. It must be auto, none, or one of "
                f"{', '.join(TOOL_PARSERS)}. Use auto."
            )
        self.name = name
        self._special = tokenizer.special_token_ids
        self.needs_special_tokens = TOOL_PARSERS[name].opening in self._special

    def make_parser(self) -> ToolCallParser:
        """Returns a parser for one answer."""
        return TOOL_PARSERS[self.name]()

    def build_structure(
        self, tools: Sequence[dict[str, Any]], name: str, *, several: bool = True
    ) -> StructuredOutput:
        """Returns the language of answers that call a tool; see `tool_choice_output`."""
        known = [
            Tool(name=one["function"]["name"], parameters=one["function"].get("parameters") or {})
            for one in tools
        ]
        return tool_choice_output(self.name, known, self._special, name=name, several=several)


class StructureChecker:
    """Tries whether structured outputs compile, in a process with limits of time and memory.

    The front itself compiles nothing: that would delay all its requests.
    """

    def __init__(self, model: ServedModel) -> None:
        import_llguidance()
        tokenizer = model.tokenizer
        ends = {tokenizer.eos_token_id}
        if model.chat is not None:
            ends |= model.chat.end_token_ids
        self._worker = GrammarWorker(
            tokenizer.json_text, tokenizer.vocab_size, sorted(ends), GrammarLimits()
        )
        self._results: OrderedDict[StructuredOutput, str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, structure: StructuredOutput) -> None:
        """Raises a `StructuredOutputError` for one that does not compile."""
        with self._lock:
            problem = self._results.get(structure)
        if problem is None:
            problem = self._find_problem(structure)
            with self._lock:
                self._results[structure] = problem
                while len(self._results) > CHECKED_STRUCTURES:
                    self._results.popitem(last=False)
        if problem:
            raise StructuredOutputError(problem)

    def _find_problem(self, structure: StructuredOutput) -> str:
        try:
            self._worker.check(structure)
        except StructuredOutputError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()


def find_tool_format(name: str, model: ServedModel) -> FamilyToolFormat | None:
    """Returns the format of tool calls of a model; None if it is not known."""
    if name == "auto" and model.chat is not None:
        name = detect_tool_parser("\n".join(model.chat.template.texts.values())) or "none"
    if name in ("none", "auto"):
        return None
    return FamilyToolFormat(name, model.tokenizer)


def load_served_model(options: ServerOptions) -> ServedModel:
    """Loads what the front needs of a model."""
    config = options.config
    model = read_model_directory(
        options.folder,
        IncrementalDetokenizer,
        name=config.served_model_name,
        chat_template=config.chat_template,
    )
    model.adapters = options.adapters
    model.tool_calls = find_tool_format(config.tool_call_parser, model)
    try:
        model.structures = StructureChecker(model)
    except PlanError:
        # Without the extra `grammar`, requests with structured output are refused.
        model.structures = None
    return model
