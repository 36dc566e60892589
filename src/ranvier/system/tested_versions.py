"""The newest versions of packages that Ranvier is tested with, and a warning beyond them.

Newer versions are not refused, as most of them work: `pyproject.toml` has no upper bounds. The
versions are those of `constraints.txt`, or newer ones with which all tests of compiled code passed
(`scripts/other_torch.sh --record newest`, `benchmarks/data/torch_versions.csv`); a test compares
them.
"""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from importlib import metadata

NEWEST_TESTED = {"torch": "2.15.0", "transformers": "5.23.0"}


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, as in `2.13.0+cpu`."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match:
        return tuple(map(int, match[0].split(".")))
    return ()


def describe_untested(package: str, version: str) -> str:
    """Returns what to know about a version that is newer than the tested ones; empty otherwise.

    A release that differs only in its third number counts as tested.
    """
    newest = NEWEST_TESTED.get(package)
    if newest is None or version_numbers(version)[:2] <= version_numbers(newest)[:2]:
        return ""
    return (
        f"{package} {version} is newer than {newest}, the newest version that Ranvier is tested "
        f"with. If something fails, install that one: pip install '{package}=={newest}'"
    )


def warn_if_untested() -> None:
    """Warns once per process about each imported package that is newer than the tested versions."""
    for package in NEWEST_TESTED:
        if package in sys.modules:
            _warn_once(package)


@cache
def _warn_once(package: str) -> None:
    """Warns if the installed version of a package is untested; later calls do nothing."""
    try:
        text = describe_untested(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return
    if text:
        # The caller of the function that calls `warn_if_untested`.
        warnings.warn(text, stacklevel=4)
