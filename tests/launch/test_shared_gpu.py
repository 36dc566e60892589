"""Several ranks on a GPU over NCCL: who may, and what is set for it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from ranvier.config.run import RunConfig
from ranvier.config.sections import LaunchConfig, TrainConfig
from ranvier.errors import PlanError
from ranvier.launch import ProcessInfo
from ranvier.launch.environment import prepare_nccl
from ranvier.train.resolve import resolve_backend

CUDA = torch.device("cuda", 0)


def run_over(backend: str, *, share_gpu: bool) -> RunConfig:
    return replace(
        RunConfig(),
        train=TrainConfig(backend=backend),  # type: ignore[arg-type]
        launch=LaunchConfig(share_gpu=share_gpu),
    )


@pytest.mark.parametrize(
    ("backend", "share_gpu", "local_world", "want"),
    [
        ("auto", False, 1, "nccl"),
        ("auto", False, 2, "gloo"),
        ("auto", True, 2, "nccl"),
        ("nccl", True, 8, "nccl"),
        ("nccl", False, 1, "nccl"),
        ("gloo", True, 2, "gloo"),
    ],
)
def test_ranks_share_a_gpu_over_nccl_when_told_so(
    monkeypatch: pytest.MonkeyPatch, backend: str, share_gpu: bool, local_world: int, want: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    me = ProcessInfo(world_size=local_world, local_world_size=local_world, launcher="torchrun")
    assert resolve_backend(run_over(backend, share_gpu=share_gpu), me, CUDA) == want


def test_a_shared_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    me = ProcessInfo(world_size=2, local_world_size=2)
    with pytest.raises(PlanError, match=r"2 ranks on 1 GPU.*launch\.share_gpu=True"):
        resolve_backend(run_over("nccl", share_gpu=False), me, CUDA)
    with pytest.raises(PlanError, match="nccl needs CUDA devices"):
        resolve_backend(run_over("nccl", share_gpu=True), me, torch.device("cpu"))


def test_what_nccl_reads_is_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    names = ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_RUNTIME_CONNECT")
    for name in (*names, overlap, "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    prepare_nccl(ProcessInfo(rank=3, world_size=8, local_world_size=8), share_gpu=False)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0" and "NCCL_HOSTID" not in os.environ
    assert overlap not in os.environ
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    prepare_nccl(ProcessInfo(rank=3, world_size=8, local_world_size=8), share_gpu=True)
    assert os.environ["NCCL_HOSTID"].endswith("-3") and os.environ["NCCL_IB_DISABLE"] == "0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo" and os.environ[overlap] == "1"
