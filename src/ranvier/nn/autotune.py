"""Autotuner: finds the fastest of several implementations of a computation on this device.

The fastest implementation depends on device, versions and shape, so it is measured once and cached
in a file per device and torch version. The choice should be the same in every run, as
implementations may round differently; the default is therefore used unless another implementation
saves at least a fraction `min_gain` of its time. Not handled: agreement between ranks, which is up
to the caller.
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

TimedCall = Callable[[], object]


class TuningResult(TypedDict):
    """The measurement of one shape."""

    choice: str
    """The implementation to use."""
    milliseconds: dict[str, float]
    """Time per call of each implementation that ran."""
    failed: dict[str, str]
    """First line of the error of each implementation that failed."""


TuningTable = dict[str, dict[str, TuningResult]]
"""Measurements by kind of computation, then by shape."""


class Autotuner:
    """Measures implementations on one device and caches the choices in a file.

    Example:
        >>> tuner = Autotuner("cpu")
        >>> tuner.choose_fastest("sum", "3", {"plain": lambda: sum([1, 2, 3])}, "plain")
        'plain'
    """

    min_gain = 0.02
    """Fraction of the default's time that another implementation must save to be chosen."""
    warmup_samples = 3
    """Number of samples that are discarded."""
    max_samples = 10
    """Maximum number of samples per implementation; their median is used."""
    sampling_seconds = 0.2
    """Time budget for the samples of one implementation; slow ones get fewer samples."""
    sample_milliseconds = 1.0
    """Target duration of a sample; short implementations are called several times per sample."""
    max_calls_per_sample = 10
    """Maximum number of calls in a sample."""

    def __init__(self, device: torch.device | str, path: Path | None = None) -> None:
        self.device = torch.device(device)
        self.cache_path = path
        """File of the cache; if None, results are kept in memory only."""
        if path is None:
            self.results: TuningTable = {}
        else:
            self.results = read_cache(path)

    @classmethod
    def for_device(cls, device: torch.device | str) -> Autotuner:
        """Returns the autotuner of a device, with its file in the user's cache directory."""
        return cls(device, launch.cache_dir() / cache_filename(torch.device(device)))

    def find_result(self, kind: str, key: str) -> TuningResult | None:
        """Returns the cached result of a shape, or None."""
        return self.results.get(kind, {}).get(key)

    def choose_fastest(
        self, kind: str, key: str, ways: Mapping[str, TimedCall], default: str
    ) -> str:
        """Returns the implementation to use; measures unless this shape and set are cached."""
        known = self.find_result(kind, key)
        # If the set of implementations has changed, e.g. in a new version, measure again.
        if known is None or {*known["milliseconds"], *known["failed"]} != {*ways}:
            known, passing = self.measure_all(ways, default)
            self.results.setdefault(kind, {})[key] = known
            # An out-of-memory error may not occur again, so such a result is not written to the
            # file.
            if known["milliseconds"] and not passing:
                self.save_result(kind, key, known)
        return known["choice"]

    def measure_all(self, ways: Mapping[str, TimedCall], default: str) -> tuple[TuningResult, bool]:
        """Times all implementations; also returns whether one ran out of memory.

        Samples of the implementations alternate, so that a change of the clock rate affects all.
        """
        taken: dict[str, list[float]] = {name: [] for name in ways}
        failed: dict[str, str] = {}
        passing = False
        begun = time.perf_counter()
        for turn in range(self.warmup_samples + self.max_samples):
            for name, way in ways.items():
                if name in failed:
                    continue
                try:
                    taken[name].append(self.time_call(way, taken[name]))
                except Exception as error:
                    failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
                    passing = passing or isinstance(error, torch.OutOfMemoryError)
            # Libraries plan and compile in the first call: the time budget starts after it.
            if turn == 0:
                begun = time.perf_counter()
            elif time.perf_counter() - begun > self.sampling_seconds * len(ways):
                break
        times = {
            # A very slow implementation may have only warm-up samples: then the last one counts.
            name: round(median(samples[min(self.warmup_samples, len(samples) - 1) :]), 5)
            for name, samples in taken.items()
            if name not in failed
        }
        choice = self.pick_fastest(times, default)
        return {"choice": choice, "milliseconds": times, "failed": failed}, passing

    def pick_fastest(self, times: Mapping[str, float], default: str) -> str:
        """Returns the fastest name, or the default if it is slower by less than `min_gain`."""
        best = min(times, key=times.__getitem__, default=default)
        if default in times and times[best] > times[default] * (1.0 - self.min_gain):
            return default
        return best

    def time_call(self, way: TimedCall, before: Sequence[float]) -> float:
        """Returns the milliseconds per call of a new sample. before: times of earlier samples."""
        count = 1
        # The first sample is cold, so the number of calls is not derived from it.
        if len(before) > 1:
            count = max(
                1,
                min(
                    self.max_calls_per_sample, int(self.sample_milliseconds / max(before[-1], 1e-6))
                ),
            )
        if self.device.type != "cuda":
            begun = time.perf_counter()
            for _ in range(count):
                way()
            return (time.perf_counter() - begun) * 1e3 / count
        with torch.cuda.device(self.device):
            # Device time: the host may return long before the work is done.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                way()
            end.record()
            end.synchronize()
            taken: float = start.elapsed_time(end)
            return taken / count

    def save_result(self, kind: str, key: str, measured: TuningResult) -> None:
        """Adds one choice to the file, which other processes may have extended in the meantime.

        If two processes write at the same time, a choice can be lost and is measured again later.
        A file that cannot be written is left unchanged.
        """
        if self.cache_path is None:
            return
        # Written to a temporary file and renamed, so that readers never see an incomplete file.
        temporary = self.cache_path.with_name(f"{self.cache_path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self.cache_path.parent.mkdir(parents=True, exist_ok=True)
            table = read_cache(self.cache_path)
            table.setdefault(kind, {})[key] = measured
            try:
                temporary.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
                os.replace(temporary, self.cache_path)
            finally:
                temporary.unlink(missing_ok=True)


def random_tensors(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Returns random tensors without changing the state of torch's generators.

    Zeros would not do: a device computes with them at less power and thus faster.
    """
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(n, dtype=dtype, device=device, generator=generator) for n in sizes]


def cache_filename(device: torch.device) -> str:
    """Returns the name of the cache file of a device, from its name and torch's version."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()} {torch.get_num_threads()} threads"
    # Any change of the device, the number of threads or torch invalidates the measurements.
    words = f"fastest {name} torch{torch.__version__}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words) + ".json"


def read_cache(path: Path) -> TuningTable:
    """Returns the table in a file; skips a missing file and malformed entries."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    table: TuningTable = {}
    for kind, shapes in _dict_items(stored):
        for key, value in _dict_items(shapes):
            fields = dict(_dict_items(value))
            choice = fields.get("choice")
            times = {
                n: t for n, t in _dict_items(fields.get("milliseconds")) if isinstance(t, float)
            }
            failed = {n: str(why) for n, why in _dict_items(fields.get("failed"))}
            # Skip a choice that was not measured, e.g. in an edited file.
            if isinstance(choice, str) and choice in times:
                measured: TuningResult = {"choice": choice, "milliseconds": times, "failed": failed}
                table.setdefault(kind, {})[key] = measured
    return table


def _dict_items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return []
