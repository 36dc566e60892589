"""Runs on text: the data source of decoders, and the sample that a finished run prints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ranvier.config.run import RunConfig
from ranvier.data.cache import index_pairs
from ranvier.data.canaries import (
    CanaryDocuments,
    CanaryPlacement,
    random_canaries,
    read_canaries,
)
from ranvier.data.dataset import TextData, open_data
from ranvier.data.goldfish import GoldfishMask
from ranvier.data.indexed_dataset import IndexedDatasetBuilder
from ranvier.data.run_data import RunData
from ranvier.errors import DataError
from ranvier.infer.generate import TextGenerator
from ranvier.system.terminal import command_line, escape_controls, print
from ranvier.train import prepare_data
from ranvier.train.report import report
from ranvier.train.resume import run_directory

MAX_SAMPLED_PARAMETERS = 300_000_000
"""Largest model, in parameters, for which a finished run prints a sample of text."""
DOCUMENT_TOKENS = 40
"""Mean length of random documents, in tokens."""


class TextSource:
    """Tokenized corpora, and canaries if there are any."""

    def prepare(self, run: RunConfig) -> list[str]:
        """Tokenize the corpora of a run; returns their directories, and the file of canaries."""
        if not run.data.canaries:
            return prepare_data.tokenize_corpora(run)
        # Read first: problems of the file are reported before corpora are tokenized.
        canaries = read_canaries(Path(run.data.canaries))
        folders = prepare_data.tokenize_corpora(run)
        return [*folders, prepare_data.tokenize_canaries(canaries, folders)]

    def open(self, run: RunConfig, stored: list[str]) -> TextData:
        """Open tokenized corpora; raises if a token is outside the model's vocabulary."""
        canaries = None
        if run.data.canaries:
            *stored, file = stored
            canaries = place_canaries(run, CanaryDocuments.load(Path(file)))
        data = open_data(
            stored,
            weights=run.data.mixture_weights,
            seq=run.data.seq_len,
            seed=run.train.seed,
            held_out=run.data.validation_fraction,
            packed=run.data.document_mask,
            truncate=run.data.truncate,
            loss_on=run.data.loss_on,
            # Only runs that were saved before it could be chosen have not decided it.
            packing="balanced" if run.data.packing == "balanced" else "full",
            canaries=canaries,
            goldfish=goldfish_mask(run),
        )
        vocab = run.decoder.vocab
        # Corpora without a tokenizer have no vocabulary; `check_vocab` compares their largest token
        # id.
        words = max((c.manifest.vocab for c in data.corpora if c.manifest.tokenizer), default=0)
        if words > vocab:
            raise DataError(
                f"model.vocab={vocab} is smaller than the {words} tokens of the tokenizer. The "
                f"model needs an id for each of them. For a new model, use model.vocab={words} or "
                "more; for a pretrained model, prepare the data with its tokenizer (`ranvier data "
                "prepare --tokenizer MODEL`)."
            )
        data.check_vocab(vocab)
        return data

    def write_random(self, run: RunConfig, folder: Path, samples: int) -> list[str]:
        """Write documents of random tokens, and their index; returns its path, and that of random
        canaries if the run has canaries."""
        drawn = np.random.default_rng(run.train.seed + 1)
        writer = IndexedDatasetBuilder(folder / "tokens", "<i4")
        while writer.num_tokens < samples * (run.data.seq_len + 1):
            length = int(drawn.integers(2, 2 * DOCUMENT_TOKENS))
            writer.add_document(drawn.integers(0, run.decoder.vocab, length))
        writer.close()
        stored = [str(index_pairs([folder / "tokens"], folder))]
        if run.data.canaries:
            canaries = random_canaries(run.decoder.vocab, run.data.seq_len, samples, drawn)
            canaries.save(folder / "canaries.npz")
            stored.append(str(folder / "canaries.npz"))
        return stored


def goldfish_mask(run: RunConfig) -> GoldfishMask | None:
    """The mask of targets of a run; None if all are learned."""
    data = run.data
    if data.goldfish_k == 0:
        return None
    return GoldfishMask(
        data.goldfish_k, data.goldfish_context_width, data.goldfish_strategy, run.train.seed
    )


def place_canaries(run: RunConfig, canaries: CanaryDocuments) -> CanaryPlacement:
    """Places canaries in the samples of a run; raises if they do not fit."""
    canaries.check_lengths(run.data.seq_len)
    # Only a run that is not resolved has not decided it.
    samples = run.data.canary_samples or run.train.steps * run.plan.global_batch
    if run.train.canary_interval:
        # Raises if a canary is too short to be evaluated.
        list(canaries.split_suffixes(run.train.canary_suffix))
    return CanaryPlacement(canaries, samples, run.train.seed)


class TextFinish:
    """A sample of text, and the command that generates more."""

    other_data_command = "ranvier train --data.sources YOUR.txt --plan.row 2"

    def show_sample(
        self, run: RunConfig, folder: Path, device: torch.device, parameters: int
    ) -> None:
        """Print a sample of the latest checkpoint and add it to run.json and the report."""
        prompt = run.train.sample_prompt
        known = (folder / "tokenizer.json").exists()
        if not prompt or not known or parameters > MAX_SAMPLED_PARAMETERS:
            return
        text = sample_text(run, folder, device)
        print("\nA sample of text:\n")
        print("\n".join(f"  {line}" for line in escape_controls(prompt + text).splitlines()))
        run_directory.update_run_json(folder, sample={"prompt": prompt, "text": text})
        report.write_report(folder)

    def next_commands(self, run: RunConfig, folder: Path, data: RunData) -> list[str]:
        """The command that continues the prompt, or answers a question."""
        assert isinstance(data, TextData), type(data)
        prompt = f"{run.train.sample_prompt.strip() or 'Once upon a time'} "
        if data.chat_encoder:
            asks = ["--chat", "YOUR QUESTION"]
        elif prompt[0] == "-":
            # A prompt that starts with a dash would be parsed as an option.
            asks = [f"--prompt={prompt}"]
        else:
            asks = ["--prompt", prompt]
        return [command_line("ranvier", "generate", folder, *asks)]


def sample_text(run: RunConfig, folder: Path, device: torch.device) -> str:
    """Generate a continuation of the prompt with the run's latest checkpoint."""
    speaker = TextGenerator.from_run(folder, device)
    pieces = speaker.complete_prompt(
        run.train.sample_prompt, tokens=80, temperature=0.7, top_k=40, seed=run.train.seed
    )
    return "".join(pieces)
