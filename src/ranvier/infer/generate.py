"""Generates text from a checkpoint of a run, on one device.

A simple implementation without a KV cache: each token takes one forward pass over all previous
tokens, up to the number of positions of the model. For several devices see `generate_distributed`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.checkpoint.directory import find_checkpoints, step_of
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.data.chat.template import BUILT_IN, load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.errors import DataError, PlanError
from ranvier.models import Decoder, build_decoder
from ranvier.system.terminal import print


@dataclass(frozen=True)
class SamplingParams:
    """Number of tokens to generate, and how each is sampled."""

    max_tokens: int
    temperature: float
    top_k: int
    seed: int


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
        config = run.decoder
        checkpoint = find_checkpoint(folder, step)
        words = folder / "tokenizer.json"
        if not words.exists():
            raise DataError(
                f"{folder} has no tokenizer.json, because its corpora were given as tokens. "
                "Generating text needs the tokenizer that was used. Copy its tokenizer.json to "
                f"{words}."
            )
        # The model is built without memory, so that the weights of the checkpoint are the only
        # copy.
        with torch.device("meta"):
            model = build_decoder(config, run.lora)
        fill_weights(model, load_full_tensors(checkpoint), checkpoint, device)
        known = load_tokenizer(str(words), folder)
        template = load_chat_template(known, folder)
        # The model was not trained on the built-in template, which is a fallback, so chat is off.
        if template.origin == BUILT_IN:
            chat = None
        else:
            chat = ChatEncoder(template, known)
        return cls(model.eval(), known, config.max_seq, chat)

    def complete_prompt(
        self, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int
    ) -> Iterator[str]:
        """Yield pieces of text that follow the prompt, until the end of the document."""
        # An empty prompt starts with the end-of-document token, so the model begins a new
        # document.
        known = self.tokenizer.encode([prompt])[0].tolist() or [self.tokenizer.eos_token_id]
        draw = SamplingParams(tokens, temperature, top_k, seed)
        yield from self._generate_pieces(known, frozenset([self.tokenizer.eos_token_id]), draw)

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
        draw = SamplingParams(tokens, temperature, top_k, seed)
        yield from self._generate_pieces(known, self.chat.end_token_ids, draw)

    @torch.inference_mode()
    def _generate_pieces(
        self, known: list[int], ends: frozenset[int], draw: SamplingParams
    ) -> Iterator[str]:
        """Yields pieces of text that follow the tokens `known`, until one of the tokens in `ends`.

        A text that exceeds the positions of the model continues with its last tokens as context,
        after a warning.
        """
        if len(known) > self.max_positions:
            raise DataError(
                f"The prompt has {len(known):,} tokens, but the model has {self.max_positions:,} "
                "positions (model.max_seq). A prompt must fit. Shorten the prompt."
            )
        generator = torch.Generator(self.device).manual_seed(draw.seed)
        said: list[int] = []
        told = self.tokenizer.decode(known)
        for _ in range(draw.max_tokens):
            # Warn once, at the first token whose context no longer fits.
            if len(known) + len(said) == self.max_positions + 1:
                print(
                    f"Warning: the text has {self.max_positions + 1:,} tokens, but the model has "
                    f"{self.max_positions:,} positions (model.max_seq). From here on it reads only "
                    f"the last {self.max_positions:,} tokens.",
                    file=sys.stderr,
                )
            ids = torch.tensor([[*known, *said][-self.max_positions :]], device=self.device)
            token = sample_token(
                self.model(ids)[0, -1].float(), draw.temperature, draw.top_k, generator
            )
            if token in ends:
                return
            said.append(token)
            # The whole text is decoded each time, because the text of a token can depend on the
            # tokens before it.
            text = self.tokenizer.decode([*known, *said])
            # A character of several bytes may be split over several tokens. Until it is complete,
            # the text ends with the replacement character and is held back.
            if not text.endswith("\ufffd"):
                yield text[len(told) :]
                told = text

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device


def fill_weights(
    model: nn.Module, whole: Mapping[str, Tensor], origin: Path, device: torch.device | str
) -> None:
    """Assigns weights and buffers to a model on the meta device; every tensor must be present.

    A tied weight is looked up by its first name and stays tied. Buffers, such as the expert bias of
    a router, keep the dtype in which they were saved.
    """
    # Group the names of each tensor: the names of a tied weight share one object.
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, module in model.named_modules():
        own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for key, tensor in chain(*own):
            owners.setdefault(id(tensor), []).append((module, key, f"{path}.{key}".lstrip(".")))
    dtype = _common_dtype(whole, device)
    for tied in owners.values():
        module, key, name = tied[0]
        empty = getattr(module, key)
        if name not in whole or whole[name].shape != empty.shape:
            raise DataError(
                f"{origin} has no {name} of shape {tuple(empty.shape)}. It must match the "
                "config it was trained with. Restore the config.toml of its run."
            )
        weight = isinstance(empty, nn.Parameter)
        value = whole[name].to(device, dtype if weight else None)
        if weight:
            value = nn.Parameter(value, requires_grad=False)
        for module, key, _ in tied:
            setattr(module, key, value)


def _common_dtype(whole: Mapping[str, Tensor], device: torch.device | str) -> torch.dtype:
    """Returns the dtype of most weights (adapters may have a wider one); at least fp32 on a CPU."""
    counts: dict[torch.dtype, int] = {}
    for value in whole.values():
        counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    most = max(counts, key=lambda one: counts[one], default=torch.float32)
    narrow = most in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"
    if narrow:
        return torch.float32
    return most


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Samples one token from the `top_k` most likely (0 means all); temperature 0 takes the most
    likely."""
    if temperature <= 0.0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    weights = (logits / temperature).softmax(0)
    return int(torch.multinomial(weights, 1, generator=generator))


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
    if not (temperature == 0.0 or 1e-3 <= temperature <= 1e3):
        problems.append(
            f"temperature={temperature} is out of range. It must be 0 or in [0.001, 1000]. Use 0.8."
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


def load_config_from_dir(folder: Path) -> RunConfig:
    """Loads the settings of a run from its directory."""
    runs.check_is_run(folder)
    run = runs.load_run_config(folder / "config.toml", in_run=True)
    extensible = "max_seq" in run.model.changeable_settings
    if extensible and run.data.seq_len > run.model.sequence_limit:
        # Runs that were trained before this combination was rejected have seen sequences of this
        # length, so their maximum is raised.
        longer: Any = {"max_seq": run.data.seq_len}
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, **longer))
    known = math.prod(size for size in run.plan.degrees.values() if size > 0)
    # The file may have been edited by hand since the run wrote it.
    run.check_and_resolve(known)
    return run


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """Returns the path of the checkpoint of a step, or of the latest one."""
    paths = find_checkpoints(folder / "checkpoints")
    if not paths:
        raise DataError(
            f"{folder} has no checkpoint. The weights are read from a checkpoint. Wait for the end "
            "of the run, or train with checkpoint.interval=100."
        )
    named = {step_of(path): path for path in paths}
    if step is not None and step not in named:
        raise PlanError(
            f"{folder} has no checkpoint of step {step}. Saved steps are "
            f"{', '.join(map(str, named))}. Use one of them."
        )
    if step is None:
        return paths[-1]
    return named[step]
