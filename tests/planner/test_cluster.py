"""Clusters: data sheets, files, names."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.planner.cluster import (
    AttentionRate,
    CollectiveTiming,
    MatmulRate,
    MeasuredCollective,
    MeasuredRate,
)

SHEET = Path(__file__).parents[2] / "benchmarks" / "data" / "hardware.csv"


@pytest.mark.parametrize("name", cluster.cluster_names())
def test_a_cluster_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    found = cluster.load_cluster(name)
    device = replace(
        found.device,
        products=(MatmulRate(1, 2, 3, "bf16", 1e12, ranks=2, kind="dw"),),
        attention=(AttentionRate(2048, 64, "bf16", 1e13, 2e13),),
        rates=(MeasuredRate("memory", 1.5e12, 4),),
    )
    collectives = (
        MeasuredCollective("send", 2, 1e-5, 1e9),
        MeasuredCollective("all_reduce", 2, 1e-5, 1e9, algorithm="shared_memory"),
    )
    made = replace(found, device=device, collectives=collectives, timings=TIMINGS)
    cluster.write_cluster(made, tmp_path / "made.toml")
    assert cluster.read_cluster(tmp_path / "made.toml") == made


TIMINGS = (
    CollectiveTiming("all_gather", "ring", 4, 2, 4096, 1.5e-4, groups=2),
    CollectiveTiming("all_gather", "ring", 4, 2, 65536, 0.0125, groups=2),
    CollectiveTiming("all_gather", "native", 4, 2, 4096, 3e-4, groups=2),
    CollectiveTiming("all_gather", "ring", 4, 2, 2**20, 1.0, groups=1),
)


def test_sizes_of_one_algorithm_share_a_table(tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    cluster.write_cluster(replace(cluster.load_cluster("dgx-a100"), timings=TIMINGS), path)
    text = path.read_text()
    assert text.count("[[timings]]") == 3
    assert "bytes = [4096, 65536]\nseconds = [0.00015, 0.0125]\n" in text


@pytest.mark.parametrize(
    "points",
    [
        "bytes = [1, 2]\nseconds = [0.1]",
        "bytes = [1]\nseconds = [0.0]",
        "bytes = [0]\nseconds = [0.1]",
        "bytes = [1]\nseconds = [nan]",
        "seconds = [0.1]",
    ],
)
def test_damaged_timings_are_refused(points: str, tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    cluster.write_cluster(cluster.load_cluster("dgx-a100"), path)
    row = 'op = "all_gather"\nalgorithm = "ring"\nsize = 4\nnodes = 1'
    path.write_text(f"{path.read_text()}\n[[timings]]\n{row}\n{points}\n")
    with pytest.raises(PlanError, match="cannot be read"):
        cluster.read_cluster(path)


def test_a_file_of_an_earlier_version_has_native_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    cluster.write_cluster(cluster.load_cluster("dgx-a100"), path)
    row = 'op = "send"\nsize = 2\nlatency = 1e-05\nbandwidth = 1e9'
    path.write_text(f"{path.read_text()}\n[[collectives]]\n{row}\n")
    found = cluster.read_cluster(path)
    assert found.collectives == (MeasuredCollective("send", 2, 1e-5, 1e9, algorithm="native"),)
    assert found.timings == ()


def test_devices_are_as_in_the_published_table() -> None:
    rows = [
        row for row in csv.DictReader(SHEET.read_text().splitlines()) if row["row_type"] == "device"
    ]
    assert len(rows) == len(cluster.known_devices())
    for row in rows:
        device = cluster.find_device(row["name"])
        assert device.bandwidth == float(row["hbm_gbs"]) * 1e9
        assert device.peak["fp16"] == pytest.approx(float(row["peak_fp16_dense_tflops"]) * 1e12)
        assert device.peak.get("fp8", 0) == float(row["peak_fp8_dense_tflops"] or 0) * 1e12
        assert 0.9 < device.memory / 2**30 / float(row["hbm_gb"]) <= 1.0
        for measured in filter(None, [row["measured_matmul_bf16_tflops"]]):
            assert device.measured["bf16"] == float(measured) * 1e12


def test_names_of_runs_and_drivers_are_known() -> None:
    assert cluster.find_device("NVIDIA H200").name == "H200-SXM-141GB"
    assert cluster.find_device("A100-80GB-SXM").name == "A100-SXM4-80GB"


def test_unknown_names_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="for example 'dgx-h100'"):
        cluster.load_cluster("dgx-h10")
    with pytest.raises(PlanError, match="does not exist"):
        cluster.load_cluster(str(tmp_path / "no.toml"))
    (tmp_path / "bad.toml").write_text("name = 'x'\n")
    with pytest.raises(PlanError, match="cannot be read"):
        cluster.load_cluster(str(tmp_path / "bad.toml"))


def test_other_numbers_of_nodes_and_devices() -> None:
    found = cluster.load_cluster("dgx-h100")
    assert found.with_size(nodes=4).num_devices == 32
    assert (found.with_size(devices=4).nodes, found.with_size(devices=4).per_node) == (1, 4)
    with pytest.raises(PlanError, match="is not a multiple of 8 devices per node"):
        found.with_size(devices=12)
