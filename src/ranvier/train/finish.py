"""What a finished run shows of its model, whatever kind it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from ranvier.config.kinds import ModelKind
from ranvier.config.run import RunConfig
from ranvier.data.run_data import RunData


class RunFinish(Protocol):
    """The end of a run of a kind of model, on rank 0."""

    other_data_command: str
    """A command that trains on other data."""

    def show_sample(
        self, run: RunConfig, folder: Path, device: torch.device, parameters: int
    ) -> None:
        """Print what the latest checkpoint does with a sample, and record it, if that is cheap.

        parameters: of the whole model.
        """

    def next_commands(self, run: RunConfig, folder: Path, data: RunData) -> list[str]:
        """Commands to try next with the trained model."""


def run_finish(kind: ModelKind) -> RunFinish | None:
    """What finished runs of a kind of model show; None: nothing of their own."""
    if kind.finish is None:
        return None
    finish: RunFinish = kind.finish.load()()
    return finish
