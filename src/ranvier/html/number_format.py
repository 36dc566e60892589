"""Compact formatting of numbers."""

from __future__ import annotations

import re


def format_number(value: float, digits: int = 3) -> str:
    """A number in a few characters: 12.3k, 1.5M, 0.03, 3e-4."""
    # Four-digit numbers stay plain: 1234, not 1.23k.
    if 999.5 <= abs(value) < 9999.5:
        return f"{value:.0f}"
    # Round before choosing the unit, so that 999,999 becomes 1M and not 1000k.
    value = float(f"{value:.{digits}g}")
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{unit}"
    if 0.0 < abs(value) < 1e-3:
        form = "e"
    else:
        form = "g"
    text = f"{value:.{digits - (form == 'e')}{form}}"
    # 3.00e-04 becomes 3e-4.
    return re.sub(r"\.?0*e([+-])0*", lambda m: "e" + m[1].strip("+"), text)


def format_percent(share: float) -> str:
    """A fraction as a percentage, with one decimal below 10 %."""
    if share < 0.0995:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.0f} %"
