"""The end of a run: a sample of its model and commands to try next, for any kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from ranvier.config.kinds import ModelKind
from ranvier.config.run import RunConfig
from ranvier.data.run_data import RunData


class RunFinish(Protocol):
    """What a finished run of one kind of model shows, on rank 0."""

    other_data_command: str
    """A command that trains on other data."""

    def show_sample(
        self, run: RunConfig, folder: Path, device: torch.device, parameters: int
    ) -> None:
        """Print and record a sample of what the latest checkpoint does, if that is cheap.

        parameters: number of parameters of the whole model.
        """

    def next_commands(self, run: RunConfig, folder: Path, data: RunData) -> list[str]:
        """Commands to try next with the trained model."""


def run_finish(kind: ModelKind) -> RunFinish | None:
    """What finished runs of a kind of model show; None if there is nothing."""
    if kind.finish is None:
        return None
    finish: RunFinish = kind.finish.load()()
    return finish
