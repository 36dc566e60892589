"""Setting: a field of a config with its bounds, its unit and a usual value.

The one place that says what a setting may be. Validation, the command line and the reference page
read it from the metadata of the field; choices are the `Literal` of its type.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

MAX_INTEGER = 2**40
"""The largest value of a whole number that has no other bound."""


@dataclass(frozen=True)
class SettingInfo:
    """What the value of a setting may be."""

    minimum: float | None = None
    maximum: float | None = None
    is_fraction: bool = False
    """Whether it lies in [0, 1)."""
    usual: float | None = None
    """A value that an error message proposes; None: the minimum."""
    unit: str = ""
    """What is counted, such as tokens or GiB."""
    is_free_text: bool = False
    """Whether a text may have any character; else it is a path or a name."""

    def find_problem(self, name: str, value: float) -> str | None:
        """What is wrong with a number, with rule and remedy; None: nothing."""
        most = self.maximum
        if most is None and isinstance(value, int):
            most = MAX_INTEGER
        if isinstance(value, float) and not math.isfinite(value):
            usual = self.usual if self.usual is not None else (self.minimum or 1.0)
            return f"{name}={value} is no finite number. It must be one. Use {usual}."
        if self.is_fraction and not 0.0 <= value < 1.0:
            return f"{name}={value} is no share. It lies in [0, 1). Use {self.usual}."
        if self.minimum is not None and value < self.minimum:
            least = self.minimum
            return f"{name}={value} is too small. It is at least {least}. Use {least} or more."
        if most is not None and value > most:
            # TOML allows integers of any length; show only the first digits.
            shown = str(value)
            if len(shown) >= 30:
                shown = f"{shown[:30]}..."
            return f"{name}={shown} is too large. It is at most {most}. Use {most} or less."
        return None

    def describe_bounds(self) -> str:
        """Bounds and unit in words, such as `from 1, tokens`; empty if there are none."""
        words = []
        if self.is_fraction:
            words.append("in [0, 1)")
        elif self.minimum is not None and self.maximum is not None:
            words.append(f"{_format_bound(self.minimum)} to {_format_bound(self.maximum)}")
        elif self.minimum is not None:
            words.append(f"from {_format_bound(self.minimum)}")
        elif self.maximum is not None:
            words.append(f"up to {_format_bound(self.maximum)}")
        if self.unit:
            words.append(self.unit)
        return ", ".join(words)


def _format_bound(bound: float) -> str:
    if bound == int(bound):
        return f"{int(bound):,}"
    return f"{bound:g}"


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    fraction: bool = False,
    usual: float | None = None,
    unit: str = "",
    free_text: bool = False,
) -> Any:
    """A field of a config with its default value and what else it may be."""
    info = SettingInfo(minimum, maximum, fraction, usual, unit, free_text)
    return dataclasses.field(default=default, metadata={SettingInfo: info})


def setting_info(field: dataclasses.Field[Any]) -> SettingInfo:
    """What the value of a field may be; anything, if nothing is said about it."""
    info: SettingInfo = field.metadata.get(SettingInfo, SettingInfo())
    return info
