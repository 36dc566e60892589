"""Fastest: of several ways to compute the same, the one that takes the least time on this device.

Which way is fastest depends on the device, the versions and the shape, so it is measured: once, and
then kept in a file of its own for each device and torch. The choice must not flicker from run to
run, as ways may round differently; the default therefore stays unless another way saves a
share `gain` of its time. Not handled: ranks that must choose alike; the caller tells them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import torch
from torch import Tensor

from ranvier import launch

Way = Callable[[], object]


class Measured(TypedDict):
    """What was found for one shape."""

    choice: str
    """The way to take."""
    milliseconds: dict[str, float]
    """Of one call of each way that ran."""
    failed: dict[str, str]
    """First line of the error of each way that did not."""


Table = dict[str, dict[str, Measured]]
"""By kind of computation, then by shape."""


class Fastest:
    """Measured choices on one device, kept in a file if it can be written.

    Example:
        >>> fastest = Fastest("cpu")
        >>> fastest.choose("sum", "3", {"plain": lambda: sum([1, 2, 3])}, "plain")
        'plain'
    """

    gain = 0.02
    """Share of the default's time that another way must save to be chosen."""
    warm = 3
    """Calls that do not count."""
    rounds = 10
    """Samples of each way; their median counts."""
    seconds = 0.2
    """Time for the samples of one way; slow ways have fewer of them."""
    sample = 1.0
    """Milliseconds of a sample; short ways are called several times for it."""
    repeats = 10
    """Most calls in a sample."""

    def __init__(self, device: torch.device | str, path: Path | None = None) -> None:
        self.device = torch.device(device)
        self.path = path
        """Where choices are kept; None: nowhere but here."""
        self.table: Table = {} if path is None else read(path)

    @classmethod
    def of(cls, device: torch.device | str) -> Fastest:
        """The choices of this device in the user's cache."""
        return cls(device, launch.cache() / filename(torch.device(device)))

    def found(self, kind: str, key: str) -> Measured | None:
        """What is known of a shape."""
        return self.table.get(kind, {}).get(key)

    def choose(self, kind: str, key: str, ways: Mapping[str, Way], default: str) -> str:
        """The name of the way to take, measured if this shape is not known with these ways."""
        known = self.found(kind, key)
        if known is None or {*known["milliseconds"], *known["failed"]} != {*ways}:
            known, passing = self.measure(ways, default)
            self.table.setdefault(kind, {})[key] = known
            if known["milliseconds"] and not passing:
                self.keep(kind, key, known)
        return known["choice"]

    def measure(self, ways: Mapping[str, Way], default: str) -> tuple[Measured, bool]:
        """Time all ways, and whether one failed for a reason that may pass: too little memory.

        Ways take turns, so that a clock that slows down slows them all.
        """
        taken: dict[str, list[float]] = {name: [] for name in ways}
        failed: dict[str, str] = {}
        passing, begun = False, time.perf_counter()
        for turn in range(self.warm + self.rounds):
            for name, way in ways.items():
                if name in failed:
                    continue
                try:
                    taken[name].append(self.timed(way, taken[name]))
                except Exception as error:
                    failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
                    passing = passing or isinstance(error, torch.OutOfMemoryError)
            if turn == 0:  # libraries make their plans in the first calls
                begun = time.perf_counter()
            elif time.perf_counter() - begun > self.seconds * len(ways):
                break
        times = {
            name: round(median(samples[min(self.warm, len(samples) - 1) :]), 5)
            for name, samples in taken.items()
            if name not in failed
        }
        choice = self.decide(times, default)
        return {"choice": choice, "milliseconds": times, "failed": failed}, passing

    def decide(self, times: Mapping[str, float], default: str) -> str:
        """The fastest; the default if nothing ran, or if it loses by less than `gain`."""
        best = min(times, key=times.__getitem__, default=default)
        if default in times and times[best] > times[default] * (1.0 - self.gain):
            return default
        return best

    def timed(self, way: Way, before: Sequence[float]) -> float:
        """Milliseconds of one call, given those of the earlier samples."""
        count = 1
        if len(before) > 1:  # the first is cold
            count = max(1, min(self.repeats, int(self.sample / max(before[-1], 1e-6))))
        if self.device.type != "cuda":
            begun = time.perf_counter()
            for _ in range(count):
                way()
            return (time.perf_counter() - begun) * 1e3 / count
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                way()
            end.record()
            end.synchronize()
            taken: float = start.elapsed_time(end)
            return taken / count

    def keep(self, kind: str, key: str, measured: Measured) -> None:
        """Add one choice to the file, next to those that other processes have put there meanwhile.

        Two that write at the same moment can lose a choice, which is then measured again. A file
        that cannot be written is left as it is.
        """
        if self.path is None:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            table = read(self.path)
            table.setdefault(kind, {})[key] = measured
            try:
                temporary.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)


def noise(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Random tensors that leave the state of torch's own generators as it is.

    Not zeros: a device computes those with less power, hence faster.
    """
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(n, dtype=dtype, device=device, generator=generator) for n in sizes]


def filename(device: torch.device) -> str:
    """Where the choices of a device are kept: its name and that of torch decide."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()} {torch.get_num_threads()} threads"
    words = f"fastest {name} torch{torch.__version__}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words) + ".json"


def read(path: Path) -> Table:
    """The table in a file; what is missing, half-written or of another form is left out."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    table: Table = {}
    for kind, shapes in _pairs(stored):
        for key, value in _pairs(shapes):
            fields = dict(_pairs(value))
            choice = fields.get("choice")
            times = {n: t for n, t in _pairs(fields.get("milliseconds")) if isinstance(t, float)}
            failed = {n: str(why) for n, why in _pairs(fields.get("failed"))}
            if isinstance(choice, str) and choice in times:
                measured: Measured = {"choice": choice, "milliseconds": times, "failed": failed}
                table.setdefault(kind, {})[key] = measured
    return table


def _pairs(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
