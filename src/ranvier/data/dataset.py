"""The data of a run: its corpora, checked against each other and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ranvier.data.cache import DataFormat, cache_corpus
from ranvier.data.canaries import CanaryDocuments, CanaryPlacement
from ranvier.data.chat.tokenize import ChatEncoder, LossOn
from ranvier.data.checksums import digest_of
from ranvier.data.corpus import Corpus, DocumentStream
from ranvier.data.goldfish import GoldfishMask
from ranvier.data.mixture import PERIOD_SAMPLES, CorpusMixture, check_weights
from ranvier.data.packing import ConversationStream, Packing, Truncate
from ranvier.data.prepare import PrepareProgress
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, PlanError


@dataclass
class TextData:
    """Corpora of a run, for training and validation."""

    train: CorpusMixture
    validation: CorpusMixture | None
    """None if no document is held out."""
    corpora: list[Corpus]

    @property
    def fingerprint(self) -> str:
        """Digest of all corpora and their quotas, of canaries, and of the mask of targets."""
        # Quotas, not weights: equal quotas give the same order of samples.
        prints = [corpus.manifest.fingerprint for corpus in self.corpora]
        prints += map(str, self.train.quotas)
        if self.train.canaries is not None:
            prints.append(self.train.canaries.fingerprint)
        if self.train.goldfish is not None:
            prints.append(self.train.goldfish.summary)
        return digest_of(*prints)

    @property
    def canaries(self) -> CanaryDocuments | None:
        """The documents whose memorization is measured; None if there are none."""
        if self.train.canaries is None:
            return None
        return self.train.canaries.canaries

    @property
    def vocab(self) -> int:
        """The smallest vocabulary that covers all tokens of corpora and tokenizer."""
        return max(max(c.manifest.vocab, c.manifest.largest + 1) for c in self.corpora)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the corpora; None if it is unknown."""
        return next((corpus.tokenizer for corpus in self.corpora if corpus.tokenizer), None)

    @property
    def chat_encoder(self) -> ChatEncoder | None:
        """The chat template of the corpora with their tokenizer; None if all hold plain text."""
        return next((corpus.chat_encoder for corpus in self.corpora if corpus.chat_encoder), None)

    @property
    def summary_lines(self) -> list[str]:
        """One line per corpus, a second one for conversations; canaries, and the mask of
        targets."""
        lines = []
        for number, corpus in enumerate(self.corpora):
            known = corpus.manifest
            stream = self.train.streams[number]
            aside = known.documents - stream.num_documents
            if isinstance(stream, ConversationStream):
                # Conversations that are left out are not held out.
                aside -= stream.num_left_out
            lines.append(
                f"{known.source}: {known.documents:,} documents ({aside:,} held out), "
                f"{known.tokens:,} tokens, {self.train.quotas[number] / PERIOD_SAMPLES:.2%} of the "
                f"samples, corpus {known.fingerprint}, tokenizer {known.tokenizer or 'unknown'}, "
                f"in {corpus.folder}"
            )
            if isinstance(stream, ConversationStream):
                lines.append(f"{known.source}: {stream.summary_line}; template {known.template}")
        if self.train.canaries is not None:
            lines.append(self.train.canaries.summary_line)
        if self.train.goldfish is not None:
            lines.append(self.train.goldfish.summary)
        return lines

    def save_files(self, folder: Path) -> None:
        """Write tokenizer and chat template into the directory of a run."""
        if self.tokenizer is not None:
            self.tokenizer.save(folder / "tokenizer.json")
        if self.chat_encoder is not None:
            self.chat_encoder.template.save(folder)

    def check_vocab(self, vocab: int) -> None:
        """Refuse tokens outside of a model's vocabulary."""
        for corpus in self.corpora:
            corpus.check_vocab(vocab)


def cache_corpora(
    inputs: Sequence[str],
    *,
    cache: Path,
    tokenizer: str = "standard",
    form: DataFormat = "auto",
    template: str = "",
    loss_on: LossOn = "assistant",
    field: str = "text",
    max_bytes: int | None = None,
    verify: bool = False,
    progress: PrepareProgress | None = None,
) -> list[Path]:
    """The prepared directory of each input, created if missing; called on one process of a run."""
    return [
        cache_corpus(
            one,
            cache=cache,
            tokenizer=tokenizer,
            form=form,
            template=template,
            loss_on=loss_on,
            field=field,
            max_bytes=max_bytes,
            verify=verify,
            progress=progress,
        )
        for one in inputs
    ]


def open_data(
    folders: Sequence[str | Path],
    *,
    seq: int,
    seed: int,
    weights: Sequence[float] | None = None,
    held_out: float = 0.0,
    packed: bool = True,
    truncate: Truncate = "right",
    loss_on: LossOn = "assistant",
    packing: Packing = "full",
    canaries: CanaryPlacement | None = None,
    goldfish: GoldfishMask | None = None,
) -> TextData:
    """Open prepared corpora; called on every rank of a run.

    weights: of the corpora; None weights them by their tokens. held_out: fraction of the documents.
    truncate, loss_on: for conversations. packing: of conversations to train on. canaries, goldfish:
    only for samples to train on.
    """
    _check_options(len(folders), seq, held_out)
    if weights:
        check_weights(weights, len(folders))
    corpora = [Corpus.open(folder) for folder in folders]
    _check_tokenizers(corpora)
    _check_loss_on(corpora, loss_on)
    options: StreamOptions = {"packed": packed, "truncate": truncate, "loss_on": loss_on}
    streams = [_open_train_stream(corpus, seq, held_out, options, packing) for corpus in corpora]
    if weights:
        shares = list(weights)
    else:
        shares = [float(stream.num_tokens) for stream in streams]
    # Always packed alike, so that runs with either packing are compared on the same samples.
    asides = [corpus.open_stream(seq, held_out, "held_out", **options) for corpus in corpora]
    # Corpora without held-out documents or with weight 0 do not take part in validation.
    kept = [(s, w) for s, w in zip(asides, shares, strict=True) if s is not None and w > 0]
    # Seed 0, regardless of the seed of the run: runs are compared on the same validation samples.
    if kept:
        aside = CorpusMixture([s for s, _ in kept], [w for _, w in kept], 0)
    else:
        aside = None
    train = CorpusMixture(streams, shares, seed, canaries=canaries, goldfish=goldfish)
    return TextData(train, aside, corpora)


def _check_options(count: int, seq: int, held_out: float) -> None:
    problems = []
    if count == 0:
        problems.append(
            "No corpus was given. A run needs at least one. Use, for example, 'stdlib'."
        )
    if seq < 1:
        problems.append(
            f"seq_len={seq} is too small. A sample must have at least 1 token. Use a larger "
            "seq_len."
        )
    if not 0 <= held_out < 1:
        problems.append(
            f"validation_fraction={held_out} is not a valid fraction of the documents. It must be "
            "at least 0 and below 1. Use a small one, such as 0.01."
        )
    if problems:
        raise PlanError(problems)


class StreamOptions(TypedDict):
    """How documents become samples."""

    packed: bool
    truncate: Truncate
    loss_on: LossOn


def _open_train_stream(
    corpus: Corpus, seq: int, held_out: float, options: StreamOptions, packing: Packing
) -> DocumentStream | ConversationStream:
    stream = corpus.open_stream(seq, held_out, "train", packing=packing, **options)
    name = f"{corpus.manifest.source} (tokenized in {corpus.folder})"
    if stream is None and corpus.manifest.template:
        raise DataError(
            f"{name} has nothing to learn: no tokens of answers are left in its "
            f"{corpus.manifest.documents} conversations with data.seq_len={seq} and "
            f"data.truncate={options['truncate']}. Use a larger data.seq_len, another "
            "data.truncate, or data.loss_on=all."
        )
    if stream is None:
        raise DataError(
            f"{name} has {corpus.manifest.documents} documents, all empty. A corpus needs "
            "at least one token. Choose another one."
        )
    # With one token per document no token has a predecessor within its document.
    if options["packed"] and stream.num_tokens == stream.num_documents:
        raise DataError(
            f"{name} has nothing to learn: each of its {stream.num_documents} training documents "
            "has 1 token. With data.document_mask a token is predicted only from earlier tokens of "
            "its document. Use longer documents, or data.document_mask=False."
        )
    return stream


def _check_loss_on(corpora: Sequence[Corpus], loss_on: LossOn) -> None:
    for corpus in corpora:
        known = corpus.manifest
        if known.template and known.learn == "all" and loss_on == "assistant":
            raise DataError(
                f"{corpus.folder} was prepared with loss_on=all, without a mask of the answers. "
                "data.loss_on=assistant needs this mask. Prepare the corpus again, or use "
                "data.loss_on=all."
            )


def _check_tokenizers(corpora: Sequence[Corpus]) -> None:
    # Read and compared on every rank, even if a run never encodes text.
    known = [corpus for corpus in corpora if corpus.tokenizer is not None]
    if len({corpus.manifest.tokenizer for corpus in known}) > 1:
        found = ", ".join(f"{c.manifest.source}: {c.manifest.tokenizer}" for c in known)
        raise DataError(
            f"The corpora have different tokenizers: {found}. All corpora of a run must have the "
            "same tokenizer. Prepare them again with one tokenizer."
        )
    chats = [corpus for corpus in known if corpus.chat_encoder is not None]
    if len({corpus.manifest.template for corpus in chats}) > 1:
        found = ", ".join(f"{c.manifest.source}: {c.manifest.template}" for c in chats)
        raise DataError(
            f"The corpora have different chat templates: {found}. All conversations of a run must "
            "have the same template. Prepare them again with one template."
        )
