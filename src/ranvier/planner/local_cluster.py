"""The cluster file of this machine, which `ranvier measure` writes and other commands read."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from ranvier import launch
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster


def measured_cluster_path(device: str) -> Path:
    """Path of the measurements of a device on this host."""
    return (
        launch.cache_dir()
        / f"cluster-{_slugify_name(platform.node())}-{_slugify_name(device)}.toml"
    )


def load_measured_cluster(device: str = "") -> Cluster | None:
    """The measurements of a device on this host, or the latest (empty); None if there are none."""
    if device:
        if measured_cluster_path(device).exists():
            return cluster.read_cluster(measured_cluster_path(device))
        return None
    own = launch.cache_dir().glob(f"cluster-{_slugify_name(platform.node())}-*.toml")
    newest = max(own, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    return cluster.read_cluster(newest)


def _slugify_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "none"
