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
from typing import Any, TypeVar

import torch
from torch import nn

from ranvier.comm.consensus import broadcast_text
from ranvier.config.engine import EngineConfig
from ranvier.data.chat.template import BUILT_IN, load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.errors import DataError
from ranvier.grid import ORDERS_CHANNEL, Grid
from ranvier.infer.engine import Engine, count_cache_blocks, open_engine, run_with_engine
from ranvier.infer.load import (
    find_checkpoint,
    inference_dtype,
    load_config_from_dir,
    load_model,
    saved_dtype,
)
from ranvier.infer.logprobs import TokenLogprobs
from ranvier.infer.request import EngineStats, Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.scheduler import explain_length
from ranvier.infer.text_stream import AnswerStream
from ranvier.models import Decoder
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.system.terminal import print

T = TypeVar("T")


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
    on_stats: Callable[[EngineStats], None] = lambda stats: None,
) -> list[list[int]]:
    """Returns the tokens that follow each prompt, equal on all ranks.

    All ranks pass the same prompts. A token of `end_token_ids` ends its text and is included.

    streams: select the random numbers of each prompt, with the seed (default 0, 1, 2, ...).
    is_finished: whether generation stops after these tokens, of which the last is new; only called
    on rank 0, as are `on_progress` and, at the end, `on_stats`. Communicates: as the steps of an
    engine; the tokens over all axes.
    """
    config = config or EngineConfig()
    grid = get_parallel_model(model).grid
    model_config: Any = model.config
    longest = max((len(prompt) for prompt in prompts), default=1)
    problem = explain_length(longest, params.max_tokens, model_config.max_seq)
    if problem:
        raise DataError(problem)

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
        on_stats(engine.stats())
        return found

    lengths = [len(prompt) + (params.max_tokens or 0) for prompt in prompts]
    found = _run_in_eval_mode(model, config, generate, lengths, end_token_ids)
    text = broadcast_text(json.dumps(found), grid, "cpu", channel=ORDERS_CHANNEL)
    tokens: list[list[int]] = json.loads(text)
    return tokens


def score_in_engine(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    config: EngineConfig,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_stats: Callable[[EngineStats], None] = lambda stats: None,
) -> list[TokenLogprobs]:
    """Scores each sequence as `score_sequences` does, with the steps and early exits of an engine.

    All ranks pass the same sequences and get the same result. The callbacks run on rank 0.
    Communicates: as the steps of an engine; two numbers per token over all axes.
    """
    grid = get_parallel_model(model).grid

    def score(engine: Engine) -> list[list[tuple[float, int]]]:
        for i, tokens in enumerate(sequences):
            # The last token is the only one that may be sampled, which does not change its score.
            params = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0,
                allowed_token_ids=(tokens[-1],),
            )
            if len(tokens) > 1:
                prompt = tuple(tokens[:-1])
                engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        found: list[list[tuple[float, int]]] = [[] for _ in sequences]
        num_finished = 0
        while engine.has_unfinished:
            for output in engine.step():
                scores = (*(output.prompt_logprobs or ()), *output.logprobs)
                found[int(output.request_id)] = [(one.logprob, one.rank) for one in scores]
                num_finished += 1
            on_progress(num_finished, len(sequences))
        on_stats(engine.stats())
        return found

    found = _run_in_eval_mode(model, config, score, [len(one) for one in sequences])
    text = broadcast_text(json.dumps(found), grid, "cpu", channel=ORDERS_CHANNEL)
    rows = [torch.tensor(row, dtype=torch.float64).view(-1, 2) for row in json.loads(text)]
    return [TokenLogprobs(row[:, 0], row[:, 1] == 1.0) for row in rows]


def _run_in_eval_mode(
    model: nn.Module,
    config: EngineConfig,
    work: Callable[[Engine], T],
    lengths: Sequence[int],
    end_token_ids: Collection[int] = (),
) -> T | None:
    """Runs `work` with an engine for requests of known lengths, as `run_with_engine` does."""
    was_training = model.training
    model.eval()
    try:
        return run_with_engine(
            model,
            config,
            work,
            end_token_ids=end_token_ids,
            num_blocks=count_cache_blocks(model, config, lengths),
        )
    finally:
        model.train(was_training)
        get_parallel_model(model).bucket_scheduler.begin_step("")


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
        wanted = len(known) + (params.max_tokens or 0)
        num_blocks = count_cache_blocks(self.model, config, [wanted])
        with open_engine(self.model, config, end_token_ids=ends, num_blocks=num_blocks) as engine:
            answer = AnswerStream(engine, self.tokenizer, known, params)
            yield from answer.pieces()
        if answer.finish_reason == "length" and wanted > self.max_positions:
            print(
                f"Warning: the text has {self.max_positions:,} tokens, which are all positions of "
                "the model (model.max_seq). It ends here.",
                file=sys.stderr,
            )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device
