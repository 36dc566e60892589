"""Setting: a config field with its bounds, its unit and a usual value.

This is the only place that defines the valid values of a setting. Validation, the command line and
the reference page read it from the metadata of the field; choices are the `Literal` of its type.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

MAX_INTEGER = 2**40
"""Maximum of integers that have no other bound."""


@dataclass(frozen=True)
class SettingInfo:
    """Valid values of a setting."""

    minimum: float | None = None
    maximum: float | None = None
    is_fraction: bool = False
    """Whether the value must be in [0, 1)."""
    usual: float | None = None
    """Value that an error message suggests; None suggests the minimum."""
    unit: str = ""
    """Unit of the value, such as tokens or GiB."""
    is_free_text: bool = False
    """Whether a string may contain any character; otherwise it is a path or a name."""

    def find_problem(self, name: str, value: float) -> str | None:
        """Returns the problem with a number, with rule and remedy; None if it is valid."""
        most = self.maximum
        if most is None and isinstance(value, int):
            most = MAX_INTEGER
        if isinstance(value, float) and not math.isfinite(value):
            usual = self.usual if self.usual is not None else (self.minimum or 1.0)
            return f"{name}={value} is not finite. It must be a finite number. Use {usual}."
        if self.is_fraction and not 0.0 <= value < 1.0:
            return f"{name}={value} is not a fraction. It must be in [0, 1). Use {self.usual}."
        if self.minimum is not None and value < self.minimum:
            least = self.minimum
            return f"{name}={value} is too small. It must be at least {least}. Use {least} or more."
        if most is not None and value > most:
            # TOML allows integers of any length; show only the first digits.
            shown = str(value)
            if len(shown) >= 30:
                shown = f"{shown[:30]}..."
            return f"{name}={shown} is too large. It must be at most {most}. Use {most} or less."
        return None

    def describe_bounds(self) -> str:
        """Returns bounds and unit as text, such as `at least 1, tokens`; empty if there are
        none."""
        words = []
        if self.is_fraction:
            words.append("in [0, 1)")
        elif self.minimum is not None and self.maximum is not None:
            words.append(f"{_format_bound(self.minimum)} to {_format_bound(self.maximum)}")
        elif self.minimum is not None:
            words.append(f"at least {_format_bound(self.minimum)}")
        elif self.maximum is not None:
            words.append(f"at most {_format_bound(self.maximum)}")
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
    """Returns a config field with its default value and its valid values."""
    info = SettingInfo(minimum, maximum, fraction, usual, unit, free_text)
    return dataclasses.field(default=default, metadata={SettingInfo: info})


def setting_info(field: dataclasses.Field[Any]) -> SettingInfo:
    """Returns the valid values of a field; without metadata any value is valid."""
    info: SettingInfo = field.metadata.get(SettingInfo, SettingInfo())
    return info
