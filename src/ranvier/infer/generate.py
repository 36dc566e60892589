"""Sample: text from the newest checkpoint of a run, on one device.

The simple way: each token is one pass over all tokens before it, as many as the model has positions
for. Not handled: a cache of keys and values, several devices.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ranvier.checkpoint.directory import found, step_of
from ranvier.checkpoint.load import wholes
from ranvier.config import run as runs
from ranvier.config.run import Run
from ranvier.data.chat.template import BUILT_IN, template_of
from ranvier.data.chat.tokenize import Chat
from ranvier.data.tokenizer import Tokenizer, tokenizer_of
from ranvier.errors import DataError, PlanError
from ranvier.models import Decoder, build
from ranvier.system.terminal import print


@dataclass(frozen=True)
class Draw:
    """How many tokens are said, and how each is chosen."""

    tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass
class Speaker:
    """A model with the words of its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer
    positions: int
    """Most tokens the model looks at."""
    chat: Chat | None = None
    """How conversations are written, if the run has a chat template."""

    @classmethod
    def of(cls, folder: Path, device: torch.device | str, *, step: int | None = None) -> Speaker:
        """From a checkpoint of a run, the newest if no step is named."""
        run = run_of(folder)
        checkpoint = checkpoint_of(folder, step)
        words = folder / "tokenizer.json"
        if not words.exists():
            raise DataError(
                f"{folder} has no tokenizer.json: its corpora came as tokens. Text needs the "
                f"tokenizer that made them. Copy its tokenizer.json to {words}."
            )
        with torch.device("meta"):
            model = build(run.model, run.lora)
        fill(model, wholes(checkpoint), checkpoint, device)
        known = tokenizer_of(str(words), folder)
        template = template_of(known, folder)
        chat = None if template.origin == BUILT_IN else Chat(template, known)
        return cls(model.eval(), known, run.model.max_seq, chat)

    def speak(
        self, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int
    ) -> Iterator[str]:
        """Pieces of text that follow the prompt, until the end of a document."""
        known = self.tokenizer.encode([prompt])[0].tolist() or [self.tokenizer.end]
        draw = Draw(tokens, temperature, top_k, seed)
        yield from self._follow(known, frozenset([self.tokenizer.end]), draw)

    def answer(
        self, question: str, *, tokens: int, temperature: float, top_k: int, seed: int
    ) -> Iterator[str]:
        """Pieces of the answer to a question, until the end of the turn."""
        if self.chat is None:
            raise DataError(
                "The run has no chat template. A question is written by the one it was trained "
                "with. Train on conversations, or use --prompt."
            )
        known = self.chat.prompt([{"role": "user", "content": question}])
        draw = Draw(tokens, temperature, top_k, seed)
        yield from self._follow(known, self.chat.ends, draw)

    @torch.inference_mode()
    def _follow(self, known: list[int], ends: frozenset[int], draw: Draw) -> Iterator[str]:
        """Pieces of text that follow tokens, until one of the ends.

        A text that outgrows the positions goes on with its last tokens, and that is said.
        """
        if len(known) > self.positions:
            raise DataError(
                f"The prompt has {len(known):,} tokens, but the model has {self.positions:,} "
                "positions (model.max_seq). It reads a whole prompt or none. Shorten the prompt."
            )
        generator = torch.Generator(self.device).manual_seed(draw.seed)
        said: list[int] = []
        told = self.tokenizer.decode(known)
        for _ in range(draw.tokens):
            if len(known) + len(said) == self.positions + 1:
                print(
                    f"Warning: the text has {self.positions + 1:,} tokens, but the model has "
                    f"{self.positions:,} positions (model.max_seq). From here on it reads the "
                    f"last {self.positions:,} tokens.",
                    file=sys.stderr,
                )
            ids = torch.tensor([[*known, *said][-self.positions :]], device=self.device)
            token = chosen(self.model(ids)[0, -1].float(), draw.temperature, draw.top_k, generator)
            if token in ends:
                return
            said.append(token)
            text = self.tokenizer.decode([*known, *said])
            if not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
                yield text[len(told) :]
                told = text

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


def fill(
    model: nn.Module, whole: Mapping[str, Tensor], origin: Path, device: torch.device | str
) -> None:
    """Give a model without values its weights and buffers: all of them, or none is usable.

    A tied one bears its first name and stays tied. Buffers, as the bias of a router, keep the type
    in which they were saved.
    """
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, module in model.named_modules():
        own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for key, tensor in chain(*own):
            owners.setdefault(id(tensor), []).append((module, key, f"{path}.{key}".lstrip(".")))
    dtype = _one_dtype(whole, device)
    for tied in owners.values():
        module, key, name = tied[0]
        empty = getattr(module, key)
        if name not in whole or whole[name].shape != empty.shape:
            raise DataError(
                f"{origin} has no {name} of shape {tuple(empty.shape)}. A checkpoint fits the "
                "config it was trained with. Restore the config.toml of its run."
            )
        weight = isinstance(empty, nn.Parameter)
        value = whole[name].to(device, dtype if weight else None)
        if weight:
            value = nn.Parameter(value, requires_grad=False)
        for module, key, _ in tied:
            setattr(module, key, value)


def _one_dtype(whole: Mapping[str, Tensor], device: torch.device | str) -> torch.dtype:
    """The type of most weights (adapters may have a wider one); on a CPU fp32 at least."""
    counts: dict[torch.dtype, int] = {}
    for value in whole.values():
        counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    most = max(counts, key=lambda one: counts[one], default=torch.float32)
    narrow = most in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"
    return torch.float32 if narrow else most


def chosen(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token: the likeliest at temperature 0, else drawn from the `top_k` likeliest (0: all)."""
    if temperature <= 0.0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    weights = (logits / temperature).softmax(0)
    return int(torch.multinomial(weights, 1, generator=generator))


def say(
    folder: Path,
    *,
    prompt: str,
    chat: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    step: int,
    device: str,
) -> int:
    """Print what a run says after a prompt or answers in a chat, as it comes; the exit code."""
    problems = []
    if prompt and chat:
        problems.append(f"prompt={prompt!r} and chat={chat!r}. One of them is said. Leave one out.")
    if tokens < 1 or top_k < 0:
        problems.append(f"tokens={tokens}, top_k={top_k}: too small. Use 1 and 0 or more.")
    if not (temperature == 0.0 or 1e-3 <= temperature <= 1e3):
        problems.append(
            f"temperature={temperature} is not 0, nor in [0.001, 1000]. Logits are divided by it. "
            "Use 0.8."
        )
    if not 0 <= seed < 2**63 or tokens > 10**6:
        problems.append(f"seed={seed}, tokens={tokens}: too large. Use 0 and 100.")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        problems.append(f"device={device!r} is not here. Use 'cpu'.")
    if problems:
        raise PlanError(problems)
    speaker = Speaker.of(folder, device, step=None if step < 0 else step)
    print(prompt, end="", flush=True)
    said = speaker.answer if chat else speaker.speak
    for piece in said(
        chat or prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        print(piece, end="", flush=True)
    print()
    return 0


def run_of(folder: Path) -> Run:
    """The settings of a run."""
    if not (folder / "config.toml").exists():
        near: Sequence[Path] = sorted(folder.parent.glob("*/config.toml"))
        others = ", ".join(str(path.parent) for path in near) or "none here"
        raise PlanError(
            f"{folder} is no run: it has no config.toml. A run is a directory that `ranvier train` "
            f"made. Runs nearby: {others}."
        )
    run = runs.load(folder / "config.toml", in_run=True)
    if run.model.positions == "rope" and run.data.seq > run.model.max_seq:
        # trained before that was refused: it has read texts of this length
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, max_seq=run.data.seq))
    known = math.prod(size for size in run.plan.degrees.values() if size > 0)
    run.check(known)  # it may have been edited
    return run


def checkpoint_of(folder: Path, step: int | None = None) -> Path:
    """A checkpoint of a run: of a step, or the newest."""
    paths = found(folder / "checkpoints")
    if not paths:
        raise DataError(
            f"{folder} has no checkpoint. Weights are read from one. Let the run end, or train "
            "with checkpoint.every=100."
        )
    named = {step_of(path): path for path in paths}
    if step is not None and step not in named:
        raise PlanError(
            f"{folder} has no checkpoint after step {step}. Kept are those after "
            f"{', '.join(map(str, named))}. Use one of these."
        )
    return paths[-1] if step is None else named[step]
