"""Held-out documents of a benchmark that compares held-out losses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig
from ranvier.data.run_data import RunData, data_source


@dataclass(frozen=True)
class HeldOut:
    """What is held out, and how much of it is evaluated."""

    fraction: float
    """Of the documents."""
    samples: int

    @staticmethod
    def add_options(
        parser: argparse.ArgumentParser,
        *,
        samples: int,
        fraction: float = DataConfig().validation_fraction,
    ) -> None:
        """Adds `--held-out` and `--samples` with these defaults."""
        parser.add_argument(
            "--held-out", type=float, default=fraction, help="fraction of held-out documents"
        )
        parser.add_argument(
            "--samples", type=int, default=samples, help="held-out samples to evaluate"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> HeldOut:
        """Returns what the options say."""
        return cls(options.held_out, options.samples)

    def open(self, run: RunConfig, stored: list[str]) -> RunData:
        """Opens the prepared data of a run, and ends the script if nothing is held out.

        Documents are held out by a hash of their text, and the default corpus, the standard library
        of Python, differs between versions: a small fraction may hold out none of its documents.
        """
        data = data_source(run.model).open(run, stored)
        if data.validation is None:
            raise SystemExit(
                f"--held-out {self.fraction} holds out no document of this corpus. Losses of "
                "held-out documents are compared. Use a larger fraction, such as 0.1."
            )
        return data
