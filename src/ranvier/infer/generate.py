"""Generates tokens and text with the inference engine.

`generate_tokens` continues prompts with a model on any grid. `TextGenerator` streams the text of a
run's checkpoint on one device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ranvier.comm.consensus import broadcast_text
from ranvier.config.engine import EngineConfig
from ranvier.data.chat.template import BUILT_IN, load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.errors import DataError, PlanError
from ranvier.grid import ORDERS_CHANNEL, Grid
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.engine import Engine, count_cache_blocks, open_engine, run_with_engine
from ranvier.infer.load import (
    find_checkpoint,
    inference_dtype,
    load_config_from_dir,
    load_model,
    saved_dtype,
)
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.system.terminal import print

ONE_REQUEST = "0"
"""Id of the request of a `TextGenerator`, which has one at a time."""


def generate_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    streams: Sequence[int] | None = None,
    end_token_ids: Collection[int] = (),
    is_finished: Callable[[Sequence[int]], bool] = lambda tokens: False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    config: EngineConfig | None = None,
) -> list[list[int]]:
    """Returns the tokens that follow each prompt, equal on all ranks.

    All ranks pass the same prompts. A token of `end_token_ids` ends its text and is included.

    streams: select the random numbers of each prompt, with the seed (default 0, 1, 2, ...).
    is_finished: whether generation stops after these tokens, of which the last is new; only called
    on rank 0, as is `on_progress`. Communicates: as the steps of an engine; the tokens over all
    axes.
    """
    config = config or EngineConfig()
    grid = get_parallel_model(model).grid
    was_training = model.training

    def generate(engine: Engine) -> list[list[int]]:
        for i, prompt in enumerate(prompts):
            stream = i if streams is None else streams[i]
            engine.add(
                Request(
                    request_id=str(i), prompt_token_ids=tuple(prompt), params=params, stream=stream
                )
            )
        found: list[list[int]] = [[] for _ in prompts]
        num_finished = 0
        while engine.has_unfinished:
            for output in engine.step():
                tokens = found[int(output.request_id)]
                tokens += output.token_ids
                is_ended = output.finish_reason is not None
                if output.finish_reason == "error":
                    raise DataError(f"Prompt {output.request_id}: {output.error}")
                if not is_ended and is_finished(tokens):
                    engine.abort(output.request_id)
                    is_ended = True
                num_finished += is_ended
            on_progress(num_finished, len(prompts))
        return found

    model.eval()
    try:
        lengths = [len(prompt) + (params.max_tokens or 0) for prompt in prompts]
        found = run_with_engine(
            model,
            config,
            generate,
            end_token_ids=end_token_ids,
            num_blocks=count_cache_blocks(model, config, lengths),
        )
    finally:
        model.train(was_training)
        get_parallel_model(model).bucket_scheduler.begin_step("")
    text = broadcast_text(json.dumps(found), grid, "cpu", channel=ORDERS_CHANNEL)
    tokens: list[list[int]] = json.loads(text)
    return tokens


@dataclass
class TextGenerator:
    """A model together with its tokenizer and, if the run has one, its chat template."""

    model: Decoder
    tokenizer: Tokenizer
    max_positions: int
    """Maximum number of tokens in the context of the model."""
    chat: ChatEncoder | None = None
    """Encoder of conversations; None if the run does not have its own chat template."""

    @classmethod
    def from_run(
        cls, folder: Path, device: torch.device | str, *, step: int | None = None
    ) -> TextGenerator:
        """Loads a checkpoint of a run; the latest one if `step` is None."""
        run = load_config_from_dir(folder)
        checkpoint = find_checkpoint(folder, step)
        words = folder / "tokenizer.json"
        if not words.exists():
            raise DataError(
                f"{folder} has no tokenizer.json, because its corpora were given as tokens. "
                "Generating text needs the tokenizer that was used. Copy its tokenizer.json to "
                f"{words}."
            )
        dtype = inference_dtype(saved_dtype(checkpoint), device)
        model = load_model(folder, Grid({}), device, step=step, dtype=dtype)
        known = load_tokenizer(str(words), folder)
        template = load_chat_template(known, folder)
        # The model was not trained on the built-in template, which is a fallback, so chat is off.
        if template.origin == BUILT_IN:
            chat = None
        else:
            chat = ChatEncoder(template, known)
        return cls(model, known, run.decoder.max_seq, chat)

    def complete_prompt(
        self, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int
    ) -> Iterator[str]:
        """Yield pieces of text that follow the prompt, until the end of the document."""
        # An empty prompt starts with the end-of-document token, so the model begins a new
        # document.
        known = self.tokenizer.encode([prompt])[0].tolist() or [self.tokenizer.eos_token_id]
        params = SamplingParams(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
        yield from self._generate_pieces(known, frozenset([self.tokenizer.eos_token_id]), params)

    def answer_question(
        self, question: str, *, tokens: int, temperature: float, top_k: int, seed: int
    ) -> Iterator[str]:
        """Yield pieces of the answer to a question, until the end of the turn."""
        if self.chat is None:
            raise DataError(
                "The run has no chat template. --chat needs the template that the model was "
                "trained with. Train on conversations, or use --prompt."
            )
        known = self.chat.encode_prompt([{"role": "user", "content": question}])
        params = SamplingParams(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
        yield from self._generate_pieces(known, self.chat.end_token_ids, params)

    def _generate_pieces(
        self, known: list[int], ends: frozenset[int], params: SamplingParams
    ) -> Iterator[str]:
        """Yields pieces of text that follow the tokens `known`, until one of the tokens in `ends`.

        A text that reaches the last position of the model ends there, with a warning.
        """
        if len(known) >= self.max_positions:
            raise DataError(
                f"The prompt has {len(known):,} tokens, but the model has {self.max_positions:,} "
                "positions (model.max_seq). Prompt and answer must fit. Shorten the prompt."
            )
        config = EngineConfig()
        text = IncrementalDetokenizer(self.tokenizer, known, params)
        wanted = len(known) + (params.max_tokens or 0)
        num_blocks = count_cache_blocks(self.model, config, [wanted])
        with open_engine(self.model, config, end_token_ids=ends, num_blocks=num_blocks) as engine:
            engine.add(
                Request(request_id=ONE_REQUEST, prompt_token_ids=tuple(known), params=params)
            )
            while engine.has_unfinished:
                for output in engine.step():
                    piece = text.append(output.token_ids, stop_token=output.stop_token)
                    if output.finish_reason is not None:
                        piece += text.finish()
                    if piece:
                        yield piece
        if output.finish_reason == "length" and wanted > self.max_positions:
            print(
                f"Warning: the text has {self.max_positions:,} tokens, which are all positions of "
                "the model (model.max_seq). It ends here.",
                file=sys.stderr,
            )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device


def print_generated(
    folder: Path,
    *,
    prompt: str,
    chat: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    step: int,
    device: str,
) -> int:
    """Prints the completion of a prompt or the answer in a chat while it is generated.

    Returns the exit code.
    """
    # All problems are collected, so that one error lists them together.
    problems = []
    if prompt and chat:
        problems.append(
            f"prompt={prompt!r} and chat={chat!r} are both given. Only one of them can be used. "
            "Remove one."
        )
    if max_new_tokens < 1 or top_k < 0:
        problems.append(
            f"max_new_tokens={max_new_tokens} or top_k={top_k} is too small. They must be at least "
            "1 and 0. Use 100 and 50."
        )
    if not 0.0 <= temperature <= 2.0:
        problems.append(
            f"temperature={temperature} is out of range. It must be in [0, 2]. Use 0.8."
        )
    if not 0 <= seed < 2**63 or max_new_tokens > 10**6:
        problems.append(
            f"seed={seed} or max_new_tokens={max_new_tokens} is out of range. The seed must be in "
            "[0, 2^63), and max_new_tokens at most 1000000. Use 0 and 100."
        )
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        problems.append(
            f"device={device!r} is not available. It must be cpu, or cuda on a machine with a GPU. "
            "Use 'cpu'."
        )
    if problems:
        raise PlanError(problems)
    speaker = TextGenerator.from_run(folder, device, step=None if step < 0 else step)
    print(prompt, end="", flush=True)
    said = speaker.answer_question if chat else speaker.complete_prompt
    for piece in said(
        chat or prompt, tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        print(piece, end="", flush=True)
    print()
    return 0
