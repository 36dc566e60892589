"""Clusters: data sheets, files, names."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.planner.cluster import AttentionRate, MatmulRate, MeasuredCollective, MeasuredRate

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
    made = replace(found, device=device, collectives=(MeasuredCollective("send", 2, 1e-5, 1e9),))
    cluster.write_cluster(made, tmp_path / "made.toml")
    assert cluster.read_cluster(tmp_path / "made.toml") == made


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
