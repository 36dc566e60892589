"""Here: the cluster file of this machine, which `ranvier measure` writes and others find again."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from ranvier import launch
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster


def path(device: str) -> Path:
    """Where what was measured of a device on this host is kept."""
    return launch.cache() / f"cluster-{_plain(platform.node())}-{_plain(device)}.toml"


def measured(device: str = "") -> Cluster | None:
    """What was measured here, of a device or (empty) last; None if nothing was."""
    if device:
        return cluster.read(path(device)) if path(device).exists() else None
    own = launch.cache().glob(f"cluster-{_plain(platform.node())}-*.toml")
    newest = max(own, key=lambda file: file.stat().st_mtime, default=None)
    return None if newest is None else cluster.read(newest)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "none"
