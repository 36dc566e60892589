"""Reports: what a page shows of a run, and what it makes of broken or missing files."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ranvier.errors import DataError
from ranvier.train.report import report

VOID = {"meta", "link", "br", "hr", "img", "input"}
ALWAYS = ("Loss", "Throughput", "Learning rate", "Gradient norm", "Memory", "Time per step")
ABOUT: dict[str, Any] = {
    "title": "tiny on a laptop",
    "model": "tiny",
    "parameters": 124_439_808,
    "device": "cpu",
    "world": 4,
    "grid": "row 2 · col 2",
    "versions": {"torch": "2.11.0"},
    "fingerprint": "9f3c2a71",
    "corpora": ["stdlib: 4 MB"],
    "groups": ["matrices: 85 M"],
    "command": "ranvier train tiny",
    "started": "2025-01-01T10:00:00Z",
    "finished": "2025-01-01T10:01:40Z",
    "status": "finished",
    "phases": {"start-up": 9.0, "step": 81.0, "checkpoint": 10.0},
    "sample": {"prompt": "def main(", "text": "argv):\n    pass"},
    "restarts": [20],
    "unknown": [1, 2],
}


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "tokens": (step + 1) * 1024,
        "loss": 3.0 + math.exp(-step / 50),
        "lr": 3e-4,
        "grad_norm": 0.5 + 0.1 * (step % 3),
        "step_seconds": 0.5,
        "tokens_per_second": 2048.0,
        "mfu": 0.41,
        "mfu_noncausal": 0.46,
        "peak_memory_bytes": 3 * 2**30,
        "exposed_communication_seconds": 0.1,
        "data_seconds": 0.05,
        "val_loss": 3.5 if step % 10 == 9 else None,
        "loss_scale": None,
    }
    return {**row, **changes}


def save(folder: Path, rows: list[dict[str, Any]], about: Any = None, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + tail)
    if about is not None:
        (folder / "run.json").write_text(json.dumps(about))
    return folder


class Page(HTMLParser):
    """Tags that close in order, attributes that could load something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "action", "data")]
        assert not any(key.startswith("on") for key, _ in attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def page_of(folder: Path) -> tuple[str, Page]:
    path = report.write_report(folder)
    assert path == folder / "report.html"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]  # no temporary is left
    text = path.read_text(encoding="utf-8")
    for svg in plots(text):
        ElementTree.fromstring(svg)
    return text, Page(text)


def plots(text: str) -> list[str]:
    return re.findall(r'<svg class="plot".*?</svg>', text, re.DOTALL)


def titles(text: str) -> list[str]:
    return [str(ElementTree.fromstring(svg).findtext("title")) for svg in plots(text)]


def test_a_full_run_shows_everything(tmp_path: Path) -> None:
    folder = save(tmp_path, [metrics(step) for step in range(40)], ABOUT)
    (folder / "config.toml").write_text('[model]\nsize = "<tiny>"\n')
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000020.tmp").mkdir()
    (folder / "trace-rank0.json").write_text("{}")
    text, page = page_of(folder)
    mfu, bar = "Model FLOP utilization (MFU)", "Share of the time"
    assert set(titles(text)) == {*ALWAYS, mfu, bar}
    for series in ("train", "train, smoothed", "validation"):
        assert f'data-name="{series}"' in text
    words = "tiny on a laptop|finished|4 rank(s)|row 2 · col 2|3.5000|2048|41 %|46 %|3 GiB|41k|"
    words += "1 min 40 s|124M|def main(|stdlib: 4 MB|9f3c2a71|matrices: 85 M|ranvier train tiny|"
    words += 'size = "<tiny>"|2.11.0|step-00000010|perfetto|resumed at step 20|81 %|not accounted'
    missing = [word for word in words.split("|") if word not in page.text]
    assert missing == ["not accounted"]  # the phases fill the wall time
    assert "step-00000020.tmp" not in page.text


def test_needles_of_the_latest_evaluated_step_are_a_heat_map(tmp_path: Path) -> None:
    save(tmp_path, [metrics(step) for step in range(3)])
    assert "Needle" not in page_of(tmp_path)[1].text
    for step, share in ((2, 0.1), (10, 0.9)):
        table = {"8192": {"0": share, "1": 1.0, "mean": 0.95, "trials": 20}, "1024": {"0": 1.0}}
        (tmp_path / f"eval-{step}.json").write_text(json.dumps({"step": step, "needle": table}))
    text, page = page_of(tmp_path)
    assert "Exact answers after step 10, 20 trials per cell" in page.text
    assert "length in tokens 8,192, depth 0: 90 %" in text and "depth 0: 10 %" not in text


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    text, page = page_of(save(tmp_path, [metrics(step) for step in range(30)], ABOUT))
    assert page.loads == [] and page.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import|@font-face", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("content", [None, "", "\n\n", '{"step": 0, "lo', "[1]\n"])
def test_a_run_without_steps_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl .*\. A report needs .*\. .* directory"):
        report.write_report(tmp_path)
    assert DataError.exit_code == 65 and not (tmp_path / "report.html").exists()


def test_a_cut_off_last_line_is_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path, [metrics(0), metrics(1)], tail='{"step": 2, "loss": 1.')
    assert report.summarize_run(folder)["steps"] == 2
    assert "could not be read" not in page_of(folder)[1].text


def test_a_broken_line_inside_is_noted(tmp_path: Path) -> None:
    folder = save(tmp_path, [metrics(0)], tail='{"step": 1, "lo{"step": 1}\n{"step": 2}\n')
    _, page = page_of(folder)
    assert "1 line(s) of metrics.jsonl could not be read" in page.text


@pytest.mark.parametrize("content", ['{"title": "x', "[1, 2]", "\x00", '{"title": NaN'])
def test_a_broken_run_json_is_noted(tmp_path: Path, content: str) -> None:
    folder = save(tmp_path / "my-run", [metrics(0)])
    (folder / "run.json").write_text(content)
    _, page = page_of(folder)
    assert "run.json" in page.text and "its facts are missing here" in page.text
    assert "my-run" in page.text


def test_facts_of_wrong_types_are_survived(tmp_path: Path) -> None:
    wrong = dict.fromkeys(ABOUT, 7) | {"phases": {"a": "b", "c": -1}, "restarts": ["x", None]}
    page_of(save(tmp_path / "a", [metrics(0)], wrong))
    page_of(save(tmp_path / "b", [metrics(0)], dict.fromkeys(ABOUT)))
    page_of(save(tmp_path / "c", [metrics(0)], {key: [{"a": []}] for key in ABOUT}))


def test_metrics_of_wrong_types_are_survived(tmp_path: Path) -> None:
    keys = [key for key in metrics(0) if key != "step"]
    odd = [None, "x", True, [], math.nan, math.inf, 10**400, 0, -1.5]
    rows = [{"step": i, **dict.fromkeys(keys, value)} for i, value in enumerate(odd)]
    page_of(save(tmp_path / "a", [*rows, {}, {"step": None}]))
    page_of(save(tmp_path / "b", [{}]))


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=y>&{0}\x00\ud800</pre></details>'
    about = dict.fromkeys(ABOUT, evil) | {
        "versions": {evil: evil},
        "corpora": [evil],
        "groups": [evil],
        "phases": {evil: 3.0},
        "sample": {"prompt": evil, "text": evil},
    }
    folder = save(tmp_path, [metrics(0)], about)
    (folder / "config.toml").write_text(evil.replace("\ud800", ""))
    text, page = page_of(folder)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert text.count("&lt;script&gt;alert(1)") >= 12 and "<script>alert" not in text


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    rows = [metrics(i, loss=math.nan if i >= 25 else 2.0) for i in range(30)]
    _, page = page_of(save(tmp_path, rows))
    assert "not finite on 5 step(s), first on step 25" in page.text
    facts = report.summarize_run(tmp_path)
    assert facts["final_loss"] is None and facts["losses_not_finite"] == 5
    assert re.search(r"Final loss\s+not finite", page.text)


def test_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    known = ("step", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second")
    rows = [{key: metrics(step)[key] for key in known} for step in range(5)]
    text, page = page_of(save(tmp_path, rows))
    assert set(titles(text)) == {*ALWAYS, "Share of the time"} - {"Memory"}
    for word in (
        "MFU",
        "Validation",
        "Parameters",
        "Generated text",
        "Fingerprint",
        "checkpoint",
        "Versions",
    ):
        assert word not in page.text


def test_times_are_split(tmp_path: Path) -> None:
    rows = [metrics(step) for step in range(10)]
    parts = report.summarize_run(save(tmp_path / "a", rows))["phases"]
    assert parts == pytest.approx({"compute": 3.5, "exposed communication": 1.0, "data": 0.5})
    about = {"started": "2025-01-01T10:00:00", "finished": "2025-01-01T10:00:08"}
    facts = report.summarize_run(save(tmp_path / "b", rows, about))
    assert facts["phases"]["not accounted for"] == pytest.approx(3.0)
    assert facts["seconds"] == pytest.approx(8.0)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_wall_time_of_a_resumed_run_has_the_time_between_launches(
    tmp_path: Path, resumed: bool
) -> None:
    about = {**ABOUT, "finished": "2025-01-03T10:01:40Z", "restarts": [20] * resumed}
    folder = save(tmp_path, [metrics(step) for step in range(40)], about)
    facts = report.summarize_run(folder)
    two_days = 2 * 24 * 3600.0
    assert facts["seconds"] == two_days + 100.0
    lost = {} if resumed else {"not accounted for": two_days}
    assert facts["phases"] == {**ABOUT["phases"], **lost}
    words = "with the time between launches" if resumed else "start-up of the trainer, steps"
    assert words in page_of(folder)[1].text


def test_a_summary_has_the_key_facts(tmp_path: Path) -> None:
    rows = [metrics(step) for step in range(40)]
    rows += [metrics(step, loss=1.0, val_loss=None) for step in range(30, 40)]  # resumed
    facts = report.summarize_run(save(tmp_path, rows, ABOUT))
    json.dumps(facts, allow_nan=False)
    assert facts["steps"] == 40 and facts["tokens"] == 40 * 1024 and facts["final_loss"] == 1.0
    assert facts["val_loss"] == 3.5 and facts["parameters"] == 124_439_808
    assert facts["mfu"] == 0.41 and facts["peak_memory_bytes"] == 3 * 2**30
    assert facts["seconds"] == 100.0 and facts["status"] == "finished"


def test_smoothing_follows_without_lag_and_ignores_spikes() -> None:
    slope: list[float | None] = [float(i) for i in range(500)]
    assert report.running_median(slope)[1][2:-2] == slope[2:-2]
    flat: list[float | None] = [1.0] * 500
    flat[250], flat[100], flat[101], flat[0] = 99.0, None, math.nan, 50.0
    assert [v for v in report.running_median(flat)[1] if v != 1.0] == [None, None]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    form = '{"step": %d, "loss": %g, "grad_norm": %g, "step_seconds": %g, "tokens_per_second": %g}'
    lines = []
    for i in range(50_000):
        noise = i * 7919 % 101 / 500
        loss = 900.0 if i == 38_888 else 2.0 + noise
        lines.append(form % (i, loss, noise, 0.5 + noise, 2000 - noise))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    path = report.write_report(tmp_path)
    assert path.stat().st_size < 250_000  # 500,000 with all metrics
    loss = plots(path.read_text())[0]
    path_of = re.search(r'data-name="train" d="M([^"]*)"', loss)
    assert path_of is not None and "log scale" in loss
    points = [tuple(map(float, p.split(","))) for p in re.split("[M ]", path_of[1])]
    top = min(points, key=lambda p: p[1])
    assert sorted(p[1] for p in points)[1] - top[1] > 50  # one point, far above all others
    assert top[0] == pytest.approx(58 + 524 * 0.77777, abs=1)
