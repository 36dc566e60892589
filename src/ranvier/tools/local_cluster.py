"""Describes this machine as a cluster of the planner, and predicts runs on it.

The description comes from the file of `ranvier measure`, else from the data sheet of its device,
else (on a CPU) from a quick measurement.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ranvier.config.run import RunConfig
from ranvier.planner import cluster
from ranvier.planner.algorithm_choice import restrict_algorithms
from ranvier.planner.cluster import Cluster
from ranvier.planner.predict import Candidate, Prediction, predict_step
from ranvier.planner.time.compute import FP8_SCALING
from ranvier.tools import benchmark_cluster
from ranvier.train import train
from ranvier.train.layout import build_workload, states_location


def detect_cluster(device: torch.device, ranks: int) -> Cluster:
    """Returns the best description of this machine: measured, from a data sheet, or estimated."""
    if device.type == "cuda":
        name = train.device_name(device)
    else:
        name = "cpu"
    found = cluster.load_measured_cluster(name)
    if found is not None:
        return found
    if device.type == "cpu":
        return benchmark_cluster.estimate_cluster(ranks)
    wanted = cluster.find_device(name).name
    built_in = (cluster.load_cluster(one) for one in cluster.cluster_names())
    return next(one for one in built_in if one.device.name == wanted)


def find_local_cluster(device: torch.device, world: int, nodes: int) -> Cluster:
    """Returns the cluster of `nodes` machines like this one, with `world` ranks."""
    return resize_cluster(detect_cluster(device, world), world, nodes)


def resize_cluster(machine: Cluster, world: int, nodes: int) -> Cluster:
    """Returns the machine with `world` ranks on `nodes` nodes; on a CPU they share its memory."""
    count = world // nodes
    device = machine.device
    if machine.cores:
        device = replace(device, memory=device.memory / count)
    return replace(machine, device=device, nodes=nodes, per_node=count)


def predict_run(run: RunConfig, machine: Cluster, nodes: int = 1) -> Prediction:
    """Predicts a resolved run on a machine, with any layout."""
    plan = run.plan.without_measuring
    states = states_location(run)
    layout = Candidate(
        plan=plan, axis_order=plan.axis_order, states=states, fp8=FP8_SCALING[run.train.float8]
    )
    placed = resize_cluster(machine, plan.world_size, nodes)
    return predict_step(
        build_workload(run), layout, restrict_algorithms(placed, run.comm.algorithm)
    )
