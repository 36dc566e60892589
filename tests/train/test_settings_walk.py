"""How many modules the settings of a run pass through, from the command line to the step."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from commands import SMALL_OPTIONS, call
from ranvier.config.run import RunConfig
from ranvier.config.sections import ModelConfig

MAX_MODULES = 44
"""It was 71 when settings were replaced in eleven places."""
SECTIONS = tuple(type(getattr(RunConfig(), one.name)) for one in dataclasses.fields(RunConfig))


class SettingsWalk:
    """Records the modules whose functions are given a run or one of its sections."""

    def __init__(self) -> None:
        self.modules = set[str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("ranvier."):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = (frame.f_locals.get(name) for name in names)
        if any(isinstance(value, (RunConfig, ModelConfig, *SECTIONS)) for value in values):
            self.modules.add(module)


def test_settings_pass_through_few_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    walk = SettingsWalk()
    sys.setprofile(walk)
    threading.setprofile(walk)
    try:
        few = ("--train.steps", "2", "--train.output-dir", "run", "--nproc", "1")
        code = call("train", *SMALL_OPTIONS, *few)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert code == 0
    assert "ranvier.train.trainer" in walk.modules, "the walk reaches the trainer"
    assert len(walk.modules) <= MAX_MODULES, sorted(walk.modules)
