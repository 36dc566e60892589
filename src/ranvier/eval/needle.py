"""Needle in a haystack: which fraction of hidden facts a model recalls, by length and depth.

Each trial hides a needle (see `data.needles`) at a depth of a random part of a text, asks for its
value at the end, and generates the answer with the most likely tokens. An answer counts if it is
exactly the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config.arguments import EvalOptions
from ranvier.config.run import RunConfig
from ranvier.data.corpus import Corpus
from ranvier.data.needles import (
    NUM_KEYS,
    Haystack,
    NeedleBuilder,
    NeedlePrompt,
    NeedleTemplate,
    describe_short_length,
)
from ranvier.data.sources import check_sources_exist
from ranvier.data.tokenizer import load_tokenizer
from ranvier.errors import DataError, PlanError
from ranvier.eval.model_server import GenerationConfig, ModelServer
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.html.page import render_document
from ranvier.infer.load import load_config_from_dir
from ranvier.system.terminal import command_line
from ranvier.train import prepare_data
from ranvier.train.report.needle import render_needle_table

TASK_NAME = "needle"
"""Value of --tasks."""
OPTIONS = ("lengths", "depths", "trials", "haystack", "needle", "distractors")
"""Options that only this task uses."""


@dataclass(frozen=True)
class NeedleTrial:
    """A prompt and what the model answered."""

    prompt: NeedlePrompt
    answer: str
    is_exact: bool

    def to_record(self) -> dict[str, Any]:
        """Returns the facts of the trial, without the prompt."""
        needle = self.prompt.needle
        return {
            "length": self.prompt.length,
            "depth": self.prompt.depth,
            "tokens": len(self.prompt.tokens),
            "key": needle.key,
            "value": needle.value,
            "answer": self.answer,
            "exact": self.is_exact,
        }


def find_problems(wanted: EvalOptions, folder: Path) -> list[str]:
    """Returns what is wrong with the options of the task for the model of a run."""
    positions = load_config_from_dir(folder).decoder.max_seq
    problems = []
    for length in wanted.lengths:
        if length < 1:
            problems.append(
                f"lengths={length} is too short. A prompt has at least 1 token. Use --lengths "
                f"{positions}."
            )
        elif length > positions:
            longer = command_line("ranvier", "extend-context", folder, "--max-position", length)
            problems.append(
                f"lengths={length} is beyond the {positions} positions of the model "
                f"(model.max_seq). Prompt and answer must fit. Use --lengths {positions}, or "
                f"extend the model: {longer}"
            )
    for depth in wanted.depths:
        if not 0.0 <= depth <= 1.0:
            near = 1.0 if depth > 1.0 else 0.0
            problems.append(
                f"depths={depth:g} is out of range. A depth is the fraction of the text before the "
                f"needle, from 0 to 1. Use {near:g}."
            )
    if not wanted.depths or not wanted.haystack:
        problems.append(
            f"depths={list(wanted.depths)} and haystack={list(wanted.haystack)}. A needle needs a "
            "depth and a text. Use e.g. --depths 0 0.5 1 --haystack stdlib."
        )
    most = {"trials": (1, 10**6), "distractors": (0, NUM_KEYS - 1)}
    for name, (low, high) in most.items():
        value = getattr(wanted, name)
        if not low <= value <= high:
            problems.append(
                f"{name}={value} is out of range. It must be from {low} to {high}. Use "
                f"{min(max(value, low), high)}."
            )
    problem = NeedleTemplate(wanted.needle).find_problem()
    return [*problems, problem] if problem else problems


def check_options(wanted: EvalOptions, folder: Path) -> None:
    """Raises if the task cannot be run with these options; reads no weights."""
    check_sources_exist(wanted.haystack)
    problems = find_problems(wanted, folder)
    if not problems:
        # Only the tokenizer tells how long a needle is.
        words = EvalTokenizer.from_run(folder)
        builder = _make_builder(wanted, words, Haystack.empty())
        count = 1 + wanted.distractors
        least = builder.min_length(count, 1)
        problems = [
            describe_short_length(length, least, count)
            for length in list_lengths(wanted, folder)
            if length < least
        ]
    if problems:
        raise PlanError(problems)


def list_lengths(wanted: EvalOptions, folder: Path) -> tuple[int, ...]:
    """Returns the lengths of the prompts in tokens; by default the positions of the model."""
    return wanted.lengths or (load_config_from_dir(folder).decoder.max_seq,)


def evaluate_needles(
    served: ModelServer, run: RunConfig, folder: Path, wanted: EvalOptions
) -> list[NeedleTrial]:
    """Returns all trials, by length, depth and number. Communicates: as `ModelServer.generate`."""
    words = served.tokenizer
    haystack = Haystack.from_corpora(_open_haystack(run, folder, wanted), words.run_tokenizer)
    builder = _make_builder(wanted, words, haystack)
    prompts = [
        builder.build_prompt(
            length,
            depth,
            distractors=wanted.distractors,
            # A trial does not depend on which other lengths and depths are evaluated.
            draw=np.random.default_rng([wanted.seed, length, round(depth * 10**6), trial]),
        )
        for length in list_lengths(wanted, folder)
        for depth in wanted.depths
        for trial in range(wanted.trials)
    ]
    wish = GenerationConfig(max_new_tokens=builder.answer_tokens)
    answers = served.generate([prompt.tokens.tolist() for prompt in prompts], wish)
    return [
        NeedleTrial(prompt, text, builder.template.is_answer(text, prompt.needle.value))
        for prompt, text in zip(prompts, answers, strict=True)
    ]


def tabulate_accuracy(trials: Sequence[NeedleTrial]) -> dict[str, dict[str, float]]:
    """Returns the fraction of exact answers by length, then by depth; and their mean."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for trial in trials:
        place = (trial.prompt.length, trial.prompt.depth)
        cells.setdefault(place, []).append(trial.is_exact)
    table: dict[str, dict[str, float]] = {}
    for (length, depth), found in cells.items():
        table.setdefault(str(length), {})[f"{depth:g}"] = sum(found) / len(found)
    for row in table.values():
        row["mean"] = sum(row.values()) / len(row)
    for (length, _), found in cells.items():
        table[str(length)]["trials"] = len(found)
    return table


def render_trials(trials: Sequence[NeedleTrial]) -> str:
    """Returns the trials as JSON lines."""
    return "".join(json.dumps(trial.to_record()) + "\n" for trial in trials)


def render_page(title: str, table: Mapping[str, Mapping[str, float]], step: int) -> str:
    """Returns an HTML page with the heat map."""
    return render_document(title, render_needle_table(table, step))


def _make_builder(wanted: EvalOptions, words: EvalTokenizer, haystack: Haystack) -> NeedleBuilder:
    # What the tokenizer adds to any text, such as the begin-of-text token; not its end token.
    added = [token for token in words.encode("")[:1] if token == words.prefix_token_id]
    template = NeedleTemplate(wanted.needle)
    return NeedleBuilder(template, words.run_tokenizer, haystack, tuple(added))


def _open_haystack(run: RunConfig, folder: Path, wanted: EvalOptions) -> list[Corpus]:
    """Tokenizes the texts with the tokenizer of the run."""
    path = folder / "tokenizer.json"
    mine = load_tokenizer(path, folder).fingerprint
    data = replace(run.data, sources=wanted.haystack, tokenizer=str(path))
    corpora = [Corpus.open(one) for one in prepare_data.tokenize_corpora(replace(run, data=data))]
    for name, corpus in zip(wanted.haystack, corpora, strict=True):
        # A corpus without a fingerprint was given as tokens, and is trusted.
        if corpus.manifest.tokenizer not in (None, "", mine):
            raise DataError(
                f"{name} was tokenized by {corpus.manifest.tokenizer}, but the run uses {mine}. "
                "Both must use the same tokenizer. Pass the original texts instead."
            )
        corpus.check_vocab(run.decoder.vocab)
    return corpora
