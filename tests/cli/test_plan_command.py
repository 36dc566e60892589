"""`ranvier plan` as a user types it: tables, files, goals, commands that run, errors that help."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from commands import call
from ranvier.cli import plan as command
from ranvier.cli.main import parse_train_options
from ranvier.cli.parsing import drop_options
from ranvier.errors import PlanError, WriteError
from ranvier.html import plot, scatter
from ranvier.planner import (
    cluster,
    explain,
    html_report,
    model_spec,
    output_files,
    request,
    search,
    search_progress,
)
from ranvier.planner.baselines import PredictedCandidate, find_baselines
from ranvier.planner.predict import Workload
from ranvier.planner.search import SearchRequest, SearchResult

EIGHT = ("--cluster", "dgx-h100", "--nodes", "1", "--model.size", "llama3-8b")
WITHOUT = """
import sys
from ranvier.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules and "numpy" not in sys.modules, "imported"
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def result() -> SearchResult:
    job = Workload(model_spec.load_shipped_spec("llama3-8b"), 4096, 64)
    return search.search_layouts(
        SearchRequest(job, cluster.load_cluster("dgx-h100").with_size(nodes=2))
    )


def test_a_named_size_needs_no_torch(tmp_path: Path) -> None:
    words = [*EIGHT, "--plan.pipe", "1", "--html", str(tmp_path / "p.html")]
    subprocess.run(
        [sys.executable, "-c", WITHOUT, "plan", *words], check=True, capture_output=True, timeout=60
    )
    assert (tmp_path / "p.html").stat().st_size > 10_000


def test_the_table_the_reasons_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", *EIGHT, "--top", "3", "--plan.global-batch", "64") == 0
    out = capsys.readouterr().out
    head = out.splitlines()
    assert head[0].startswith("llama3-8b (8.03B parameters) on 1 x 8 H100")
    assert "Assumed --data.seq-len 4096 (" in out
    assert sum(line.lstrip().startswith(("1 ", "2 ", "3 ", "4 ")) for line in head) == 3
    assert "Bottleneck: " in out and "best of" in out and "FSDP" in out
    told = next(line for line in head if line.startswith("ranvier train"))
    run = parse_train_options(shlex.split(told)[2:])
    assert run.plan.global_batch == 64 and run.data.seq_len == 4096 and run.nproc == 8
    assert run.check_and_resolve(8).plan.world_size == 8


def test_what_is_given_stays_and_json_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = (
        "--plan.row",
        "2",
        "--plan.recompute=full",
        "--plan.global-batch",
        "32",
        "--data.seq-len",
        "2048",
    )
    assert call("plan", *EIGHT, *fixed, "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    for one in (facts["best"], *facts["top"], *facts["baselines"].values()):
        assert one["settings"]["plan.row"] == 2
        assert one["settings"]["plan.recompute"] == "full"
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        assert one["memory_bytes"] <= one["limit_bytes"]
        assert one["interval"][0] < one["seconds"] < one["interval"][1]
    assert facts["job"]["batch"] == 32 and facts["cluster"]["devices"] == 8
    run = parse_train_options(shlex.split(facts["command"])[2:])
    assert run.plan.row == 2 and run.plan.recompute == "full" and run.plan.global_batch == 32


def test_what_was_given_stays_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--plan.pipe",
        "2",
        "--plan.max-in-flight",
        "3",
        "--plan.overlap",
        "dx",
        "--plan.compile",
    )
    assert call("plan", *EIGHT, *given, "off", "--json", "-") == 0
    run = parse_train_options(shlex.split(json.loads(capsys.readouterr().out)["command"])[2:])
    plan = run.plan
    assert (plan.pipe, plan.max_in_flight, plan.overlap, plan.compile) == (2, 3, ("dx",), "off")


def test_a_file_gives_settings_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my $(touch hit) run.toml"
    file.write_text(
        '[model]\nsize = "llama3-1b"\n[plan]\ndepth = 4\nglobal_batch = 32\n'
        "[data]\nseq_len = 1024\n"
    )
    assert call("plan", str(file), *EIGHT[:4], "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["best"]["settings"]["plan.depth"] == 4
    assert (facts["job"]["model"], facts["job"]["seq"]) == ("llama3-1b", 1024)
    assert shlex.split(facts["command"])[:3] == ["ranvier", "train", str(file)]


@pytest.mark.full
def test_a_goal_names_nodes_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    aim = ("--cluster", "dgx-h100", "--goal", "llama3-8b, 20B tokens, 1 day", "--plan.pipe", "1")
    assert call("plan", *aim, "--plan.col", "1") == 0
    out = capsys.readouterr().out
    assert (
        "nodes" in out
        and "device hours" in out
        and "the fewest possible, process 20B tokens" in out
    )
    assert re.search(r"(\d+) nodes .* \(limit 1; (\d+) would take 1\.\d+\)", out)
    assert call("plan", *aim[:3], "llama3-8b, 9T tokens, 1 hour", "--nodes", "2") == 0
    assert "cannot be reached" in capsys.readouterr().out
    assert call("plan", *aim[:3], "llama3-8b, 1B tokens, 1 day", "--devices", "4") == 0
    assert "1 node (4 devices), the fewest possible" in capsys.readouterr().out


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "dgx-h1"), "cluster 'dgx-h1' is not known"),
        (("--cluster", "no.toml"), "does not exist"),
        (
            (*EIGHT, "--top", "0"),
            "top=0 is out of range. Counts must be at least 1. Use 1 or more.",
        ),
        ((*EIGHT[:2], "--nodes", "0"), "nodes=0 is out of range. Counts must"),
        ((*EIGHT[:2], "--devices", "12"), "Use 8 or 16"),
        ((*EIGHT, "--data.seq-len", "0"), "data.seq_len=0 is too small"),
        (("--cluster", "dgx-h100", "--model.size", "llama3-9b"), "Did you mean 'llama3-8b'?"),
        ((*EIGHT, "--plan.rowe", "2"), "--plan.row"),
        ((*EIGHT, "--plan.stage-starts", "3", "4"), "Stages require a pipeline. Use devices=6"),
        ((*EIGHT, "--plan.row", "3"), "row=3 does not divide heads=32"),
        (("--cluster", "dgx-a100", "--precision", "fp8"), "does not support fp8 matmuls"),
        ((*EIGHT, "--goal", "soon"), "'soon' is not a size"),
        ((*EIGHT, "--goal", ""), "goal='' has no tokens and no time"),
        (("--cluster", "dgx-h100", "--nodes", "1", "--model.size", "llama3-405b"), "Use nodes="),
        (("--cluster", "dgx-h100", "--nodes", "64"), "cannot share this job"),
    ],
)
def test_errors_help(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", *words) == 64
    assert said in capsys.readouterr().err


TINY = ("--cluster", "dgx-h100", "--model.size", "tiny")
ONE = "--plan.pipe 1 --plan.col 1"
LONG = "--model.max-seq 300000 --data.seq-len 300000"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--nodes 64", "512 devices cannot share this job"),
        ("--nodes 4096", "32768 devices cannot share"),
        (
            "--nodes 1 --plan.row 3",
            "row=3 on 8 devices is not possible. The product of the degrees must equal",
        ),
        ("--nodes 1 --plan.row 0", "row=0 is not a number of ranks"),
        ("--nodes 1 --plan.data 3", "global_batch=8 cannot be split over data·expert·depth=3"),
        ("--nodes 1 --plan.row 8 --plan.col 8", "row=8 · col=8 on 8 devices"),
        ("--nodes 1 --plan.row 2 --plan.data 2 --plan.depth 1 " + ONE, "data=2 · row=2 on 8"),
        ("--nodes 1 --plan.pipe 100", "pipe=100 with virtual_stages=1 gives 100 virtual stages"),
        ("--nodes 1 --plan.context 16", "context=16 on 8 devices is not possible"),
        ("--nodes 1 --plan.context 4 --plan.row 4", "context=4 · row=4 on 8 devices"),
        ("--nodes 1 --plan.micro-batch 3", "micro_batch=3 does not divide"),
        ("--nodes 1 --plan.global-batch 0", "global_batch=0 cannot be split"),
        ("--nodes 4 --plan.global-batch 13 --plan.row 1 " + ONE, "32 devices cannot share"),
        (f"--model.size llama3-8b --devices 1 {LONG} {ONE}", "does not fit on 1 x H100"),
        ("--model.size llama3-70b --devices 1", "does not fit on 1 x H100-SXM5-80GB in any layout"),
        (
            "--model.size llama3-70b --devices 5 --plan.global-batch 40 --plan.pipe 5",
            "in any layout",
        ),
    ],
)
def test_what_is_offered_works_when_it_is_typed(
    line: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, *line.split()]
    assert call("plan", *words) == 64
    said = capsys.readouterr().err
    assert reason in said and said.count(" Use ") == 1 and "Traceback" not in said
    offered = re.findall(
        r"([a-z._-]+)=(\d+)(?= \(\d+ devices\)|,|\.\n)", said.partition(" Use ")[2]
    )
    assert offered
    for name, value in offered:
        dropped = {name.replace("-", "_")} | ({"nodes", "devices"} if "." not in name else set())
        typed = [*drop_options(words, dropped), f"--{name}", value, "--json", "-"]
        assert call("plan", *typed) == 0, (name, value)
        assert json.loads(capsys.readouterr().out)["fit"] > 0


def test_json_of_the_impossible_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", *TINY, "--nodes", "64", "--json", "-") == 64
    out, err = capsys.readouterr()
    (problem,) = json.loads(out)["problems"]
    assert err == f"PlanError: {problem}\n" and "Use plan.global_batch=16, or nodes=48" in problem


def test_without_a_cluster_it_says_how_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    assert call("plan", *EIGHT[4:]) == 64
    assert "ranvier measure" in capsys.readouterr().err


# ---- before and while it searches -------------------------------------------------------


def _nothing(*_: object, **__: object) -> None:
    raise AssertionError("it searched")


@pytest.mark.sample(6)
@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/plan.out", "missing does not exist"),
        ("file/plan.out", "Not a directory"),
        ("folder", "it is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("dangling", "does not exist"),
        ("/proc/plan.out", "cannot be written"),
        ("x" * 300, "File name too long"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--goal", "8B, 1T tokens, 30 days")], ids=["plan", "goal"])
def test_an_output_that_cannot_be_written_is_refused_first(
    option: str,
    name: str,
    reason: str,
    more: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "search_layouts", _nothing)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere/plan.out")
    before = sorted(tmp_path.iterdir())
    words = EIGHT if not more else EIGHT[:2]
    assert call("plan", *words, *more, option, str(tmp_path / name)) == 73
    said = capsys.readouterr().err
    assert reason in said and "Give another path." in said and "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_outputs_are_checked_as_a_user_without_rights_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    output_files.check_outputs(str(old), "-", "")
    assert old.read_text() == "kept" and [*tmp_path.iterdir()] == [old]
    for same in (("-", "-"), (str(old), str(tmp_path / "." / "old.json"))):
        with pytest.raises(PlanError, match="the same output"):
            output_files.check_outputs(*same)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files.tempfile, "TemporaryFile", full)
    with pytest.raises(WriteError, match="No space left on device"):
        output_files.check_outputs(str(tmp_path / "new.json"))
    monkeypatch.setattr(Path, "open", lambda *_: full())
    with pytest.raises(WriteError, match="No space left"):
        output_files.check_outputs(str(old))


@pytest.mark.parametrize(
    ("parameters", "seq", "devices", "batch", "reason"),
    [
        (8.03e9, 4096, 8, 512, "about 1.49M tokens"),
        (8e9, 4096, 8192, 8192, "one sequence for each of 8,192"),
        (8e9, 4096, 24, 384, "about"),
        (1e9, 4096, 4096, 4096, "one sequence for each of 4,096"),
        (405e9, 4096, 1024, 2048, "about 10.6M tokens"),
        (8e9, 131072, 8192, 512, "the largest batch that is assumed"),
        (8e9, 4096, 131072, 32768, "at least 1024 tokens for each of 131,072"),
    ],
)
def test_a_batch_that_nobody_gave_grows_with_the_devices(
    parameters: float, seq: int, devices: int, batch: int, reason: str
) -> None:
    found, why = request.default_batch(int(parameters), seq, devices)
    assert found == batch and reason in why
    sizes = [request.default_batch(int(parameters), seq, 2**n)[0] for n in range(18)]
    assert sizes == sorted(sizes)


def test_the_batch_and_its_reason_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--plan.data", "1024", "--plan.depth", "8", "--plan.recompute", "none")
    words = ("--cluster", "dgx-h100", "--nodes", "1024", "--model.size", "llama3-8b", *fixed)
    assert call("plan", *words) == 0
    out = capsys.readouterr().out
    assert "8192 sequences of 4096 tokens" in out
    assert "--plan.global-batch 8192 (at least one sequence for each of 8,192 devices)" in out
    assert call("plan", *words, "--plan.global-batch", "16384", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["job"]["batch"] == 16384


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_the_best_so_far_is_told(
    terminal: bool, result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(search_progress, "REDRAW_INTERVAL", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr(search_progress.time, "perf_counter", lambda: 0.4 * next(clock))
    slow, fast = result.feasible_candidates[-1], result.best
    with search_progress.SearchProgressPrinter() as lines:
        for count, found in enumerate((slow, slow, fast, fast, fast), 1):
            lines.report_best(found, count)
    said = stream.getvalue()
    assert said.count("\n") == (0 if terminal else 2)
    assert (
        explain.describe_candidate(slow) in said
        and explain.describe_candidate(fast) in said
        and "per step" in said
    )
    assert said.endswith("\r" if terminal else "\n")


def test_a_first_layout_comes_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16,384 devices the grids alone take a while to count."""
    job = Workload(model_spec.load_shipped_spec("llama3-405b"), 4096, 16384)
    asked = SearchRequest(job, cluster.load_cluster("dgx-h100").with_size(nodes=2048))

    class EnoughError(Exception):
        pass

    seen = list[str]()
    monkeypatch.setattr(search, "MAX_FIRST_LOOK_SECONDS", 60.0)
    monkeypatch.setattr(search, "valid_grids", lambda _: (_ for _ in ()).throw(EnoughError))
    with pytest.raises(EnoughError):
        search.search_layouts(
            asked, report=lambda one, _: seen.append(explain.describe_candidate(one))
        )
    assert seen


def test_progress_ends_with_the_best_and_changes_nothing() -> None:
    asked = SearchRequest(
        Workload(model_spec.load_shipped_spec("llama3-1b"), 4096, 64),
        cluster.load_cluster("dgx-h100").with_size(devices=2),
    )
    seen = list[tuple[str, int]]()
    told = search.search_layouts(
        asked, report=lambda one, n: seen.append((explain.describe_candidate(one), n))
    )
    assert [one.candidate for one in told.feasible_candidates] == [
        one.candidate for one in search.search_layouts(asked).feasible_candidates
    ]
    assert seen[-1] == (explain.describe_candidate(told.best), told.num_candidates)


def test_all_who_are_told_are_ranked(result: SearchResult) -> None:
    rows = explain.distinct_candidates(result.feasible_candidates, 5)
    assert len({tuple(one.plan.degrees.values()) for one in rows}) == 5
    assert rows[0] is result.best
    why = " ".join(explain.explain_choice(result))
    for name, one in find_baselines(result.feasible_candidates, 8).items():
        if one.prediction.step_seconds > 1.01 * result.best.prediction.step_seconds:
            assert f"best {name} layout ({explain.describe_candidate(one)})" in why
    assert explain.summarize_choice(result).count("\n") == 0


POINT = """
const plot = document.querySelector("figure.points svg"), text = document.querySelector(".hover");
const [x, y] = plot.querySelector("path.dot[data-group]").getAttribute("d").slice(1).split(/[,h]/);
const place = plot.getBoundingClientRect(), scale = place.width / plot.viewBox.baseVal.width;
plot.dispatchEvent(new PointerEvent("pointermove", {
  clientX: place.left + x * scale, clientY: place.top + y * scale, bubbles: true}));
"""
"""What moves the pointer over the first layout that fits."""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_a_browser_draws_it_and_points(
    result: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "HOVER_SCRIPT", scatter.HOVER_SCRIPT + POINT)
    file = tmp_path / "plan.html"
    text = html_report.render_report(result, title="a <b> & c", top=5, command="ranvier train")
    file.write_text(text, encoding="utf-8")
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += ["--virtual-time-budget=2000", f"--user-data-dir={tmp_path / 'profile'}"]
    seen = subprocess.run(
        [*words, file.as_uri()], capture_output=True, text=True, timeout=60
    ).stdout
    assert 'data-points="' in seen, seen[:500]
    count = int(seen.partition('data-points="')[2].partition('"')[0])
    shown = [
        one
        for one in (*result.feasible_candidates, *result.oversized_candidates)
        if html_report.is_shown(one, result)
    ]
    assert count == len(shown) > 100
    text = seen.partition('class="hover muted">')[2].partition("</p>")[0]
    assert "micro-batch" in text and "tok/s" in text
    assert 'class="ring"' in seen


def test_the_page_needs_nothing_else(result: SearchResult) -> None:
    text = html_report.render_report(
        result, title="a <b> & c", top=5, command="ranvier train --x '<y>'"
    )
    assert "a &lt;b&gt; &amp; c" in text and "&lt;y&gt;" in text
    assert "http" not in text.replace("http-equiv", "") and "default-src 'none'" in text
    for name in ("All layouts", "Where the time goes", "Baselines", "Memory of the best layout"):
        assert f"<h2>{name}</h2>" in text
    assert (
        text.count("<rect ") > 10
        and f"available: {result.best.prediction.limit / 2**30:.1f}" in text
    )


def test_the_chart_marks_the_best_layout_and_the_pareto_front(result: SearchResult) -> None:
    front = html_report.pareto_front(result.feasible_candidates)
    points = [
        (one.prediction.memory.total_bytes / 2**30, one.prediction.step_seconds)
        for one in result.feasible_candidates
    ]
    for memory, seconds in points:
        beaten = any(m < memory and s < seconds for m, s in points)
        assert beaten or any(m <= memory and s <= seconds for m, s in front)
    assert all(not any(m < a and s < b for m, s in points) for a, b in front)
    assert min(seconds for _, seconds in front) == min(seconds for _, seconds in points)
    page = html_report.render_report(result, title="t", top=3, command="c")
    assert page.count('class="front"') == 1 and page.count('class="best"') == 1
    steps = page.partition('class="front" d="')[2].partition('"')[0]
    assert steps.count("V") == len(front), "layouts that do not fit are not on the front"
    x, y = map(float, page.partition('class="best" d="M')[2].partition("l")[0].split(","))
    near = [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+),([\d.]+)h0", page)]
    assert any(abs(a - x - 8.0) < 0.11 and abs(b - y) < 0.11 for a, b in near)
    assert len({*html_report.BAR_PARTS}) <= plot.NUM_COLOURS
    assert {*html_report.merge_parts(result.best.prediction)} <= {*html_report.BAR_PARTS}


def test_a_pareto_front_has_no_point_that_is_as_slow_with_more_memory() -> None:
    points = [(4, 1.0), (1, 5.0), (2, 5.0), (2, 3.0), (3, 4.0), (4, 1.0), (5, 1.0)]
    several = [
        SimpleNamespace(
            prediction=SimpleNamespace(
                memory=SimpleNamespace(total_bytes=gigabytes * 2**30), step_seconds=seconds
            )
        )
        for gigabytes, seconds in points
    ]
    front = html_report.pareto_front(cast(list[PredictedCandidate], several))
    assert front == [(1, 5.0), (2, 3.0), (4, 1.0)]


def test_the_page_compares_baselines_with_the_best(result: SearchResult) -> None:
    page = html_report.render_report(result, title="t", top=3, command="c")
    table = page.partition("<h2>Baselines</h2>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><td>([^<]*)</td>.*?<td>([\d.]+)x</td></tr>", table)
    ours = result.best.prediction.step_seconds
    assert [(name, float(ratio)) for name, ratio in rows] == [
        (name, pytest.approx(one.prediction.step_seconds / ours, abs=0.006))
        for name, one in find_baselines(result.feasible_candidates, 8).items()
    ]
    assert max(float(ratio) for _, ratio in rows) > 1.05
