"""A conversation with a model in the terminal.

The engine stays open, so that the prefix cache has the keys and values of earlier turns.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any

from ranvier.errors import CommunicationError, RanvierError
from ranvier.infer.batch import check_has_chat
from ranvier.infer.request import EngineInterface
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.server.served_model import ServedModel
from ranvier.infer.text_stream import AnswerStream
from ranvier.launch import GracefulStop
from ranvier.system.terminal import print

HELP = """\
/reset  forget the conversation
/exit   end, as Ctrl-D
/help   show this
Ctrl-C stops an answer."""
INPUT_PROMPT = "> "


class TerminalChat:
    """The questions and answers of a conversation."""

    def __init__(self, engine: EngineInterface, model: ServedModel, params: SamplingParams) -> None:
        check_has_chat(model)
        assert model.chat is not None
        self.engine = engine
        self.model = model
        self.params = params
        self.messages: list[dict[str, Any]] = []
        self._chat = model.chat

    def run(self) -> int:
        """Answers questions until the end of the input. Returns the exit code."""
        with contextlib.suppress(ImportError):
            # Line editing and history of `input`.
            import readline  # noqa: F401
        print(f"Conversation with {self.model.name}. /help lists the commands.", flush=True)
        was_interrupted = False
        while True:
            try:
                text = input(INPUT_PROMPT).strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt as stop:
                if was_interrupted or (stop.args and stop.args[0] != signal.SIGINT):
                    raise
                was_interrupted = True
                print("\nPress Ctrl-C again, or Ctrl-D, to end.", flush=True)
                continue
            was_interrupted = False
            if text.startswith("/"):
                if not self._run_command(text):
                    return 0
            elif text:
                self._answer(text)

    def _run_command(self, text: str) -> bool:
        """Runs a command, and returns whether the conversation continues."""
        if text == "/exit":
            return False
        if text == "/reset":
            self.messages.clear()
            print("The conversation starts again.", flush=True)
        elif text == "/help":
            print(HELP, flush=True)
        else:
            print(f"{text!r} is not a command.\n{HELP}", flush=True)
        return True

    def _answer(self, question: str) -> None:
        """Prints the answer to a question. One that fails is not part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": question}]
        with GracefulStop(quiet=True) as stop:
            try:
                tokens = self._chat.encode_prompt(messages)
                answer = AnswerStream(self.engine, self.model.tokenizer, tokens, self.params)
                for piece in answer.pieces(is_stopped=lambda: stop.signal != 0):
                    print(piece, end="", flush=True)
            except RanvierError as error:
                # An engine that has failed cannot answer anything else.
                if isinstance(error, CommunicationError):
                    raise
                print(f"\n{error}", file=sys.stderr, flush=True)
                return
        print(flush=True)
        if stop.signal not in (0, signal.SIGINT):
            raise KeyboardInterrupt(stop.signal)
        if answer.finish_reason == "length":
            reason = "see --max-new-tokens"
            if self.params.max_tokens is None or answer.num_tokens < self.params.max_tokens:
                reason = "the conversation has as many tokens as fit, and /reset starts another"
            print(
                f"(The answer ends after {answer.num_tokens} tokens; {reason}.)",
                file=sys.stderr,
                flush=True,
            )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
