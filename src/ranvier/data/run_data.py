"""The interface between a run and its data, for any kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from ranvier.config.kinds import find_kind
from ranvier.config.run import RunConfig
from ranvier.config.sections import ModelConfig
from ranvier.data.batch import SampleBatch, SampleSource
from ranvier.data.canaries import CanaryDocuments


class RunData(Protocol):
    """Training and validation data of a run."""

    @property
    def train(self) -> SampleSource[SampleBatch]:
        """Samples to train on."""

    @property
    def validation(self) -> SampleSource[SampleBatch] | None:
        """Samples that are held out; None if there are none."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that determines the samples."""

    @property
    def summary_lines(self) -> list[str]:
        """Lines that describe the data."""

    def save_files(self, folder: Path) -> None:
        """Write the files that are needed to use the model into the directory of its run."""


@runtime_checkable
class CanaryData(Protocol):
    """Data with documents whose memorization is measured."""

    @property
    def canaries(self) -> CanaryDocuments | None:
        """The documents; None if there are none."""


class DataSource(Protocol):
    """Where the samples of a kind of model come from."""

    def prepare(self, run: RunConfig) -> list[str]:
        """Prepare the data of a run on this machine; returns strings that `open` needs."""

    def open(self, run: RunConfig, stored: list[str]) -> RunData:
        """Open prepared data; called on every rank."""

    def write_random(self, run: RunConfig, folder: Path, samples: int) -> list[str]:
        """Write random data of at least `samples` samples; returns strings that `open` needs."""


def data_source(model: ModelConfig) -> DataSource:
    """The data source of a model's kind."""
    source: DataSource = find_kind(model.kind).data_source.load()()
    return source
