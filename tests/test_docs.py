"""The pages are true: settings and variables exist, recipes pass the check, links are whole."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import reference
from ranvier import launch
from ranvier.config import run
from ranvier.config.run import RunConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "README.md"]}
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
OPTION = re.compile(r"--(\w+)\.([\w-]+)")


def known(section: str, key: str) -> bool:
    """Whether a setting exists."""
    config = getattr(RunConfig(), section, None)
    return hasattr(config, key) and key in {field.name for field in dataclasses.fields(config)}


def unknown_options(text: str) -> list[str]:
    """Options with a dot that no config class has."""
    found = OPTION.findall(text)
    return [f"--{s}.{k}" for s, k in found if not known(s, k.replace("-", "_"))]


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links and images that lead nowhere."""
    problems = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, place = link.partition("#")
        if "://" in link:
            continue
        target = path.parent / name if name else path
        if not target.exists():
            problems.append(link)
        elif place and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            if place not in map(anchor, headings):
                problems.append(link)
    return problems


def outside_nav(nav: str, pages: list[str]) -> list[str]:
    """Pages that mkdocs.yml does not name exactly once, and those it names that are not there."""
    named = re.findall(r"^\s+- (?:.*: )?(\S+\.md)$", nav, re.MULTILINE)
    return [p for p in {*named, *pages} if named.count(p) != 1 or p not in pages]


def test_configuration_is_current() -> None:
    assert reference.main(["--check"]) == 0, "Run: python scripts/reference.py"


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "configuration.md"
    monkeypatch.setattr(reference, "PAGE", page)
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0 == reference.main(["--check"])
    page.write_text(page.read_text().replace("Number of optimizer steps.", "Steps."))
    assert reference.main(["--check"]) == 1


def test_every_field_is_described() -> None:
    for field in dataclasses.fields(RunConfig()):
        kind = type(getattr(RunConfig(), field.name))
        texts = reference.field_texts(kind)
        assert {one.name for one in dataclasses.fields(kind)} <= set(texts), kind
        assert all(text.endswith(".") for text in texts.values()), texts


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_the_check(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (ranks,) = re.findall(r"^# ranks: (\d+)$", text, re.MULTILINE)
    assert text.startswith("# ") and f"ranvier train recipes/{path.name}" in text
    checked = run.load_run_config(path).check_and_resolve(int(ranks))
    assert checked.plan.world_size == int(ranks)
    assert (
        run.run_from_tables(tomllib.loads(run.to_toml(checked))).check_and_resolve(int(ranks))
        == checked
    )


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"cpu.toml", "one-gpu.toml", "64-nodes.toml"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_options_exist_and_links_lead_somewhere(path: Path) -> None:
    assert unknown_options(TEXTS[path]) == []
    assert broken_links(path, TEXTS[path]) == []
    for block in re.findall(r"```toml\n(.*?)```", TEXTS[path], re.DOTALL):
        run.run_from_tables(tomllib.loads(block))


def test_every_page_is_in_the_nav() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert outside_nav(nav, [path.relative_to(ROOT / "docs").as_posix() for path in PAGES]) == []


def test_translated_configurations_make_the_grid_beside_them() -> None:
    text = TEXTS[ROOT / "docs" / "guides" / "coming-from.md"]
    rows = re.findall(r"\| `(--plan\.[^`]*)` \| ([^|]+) \|", text)
    assert len(rows) >= 6
    for options, shape in rows:
        words = re.findall(r"--plan\.([\w-]+) (\d+)", options)
        tables = {
            "model": {"size": "llama3-8b"},
            "plan": {k.replace("-", "_"): int(n) for k, n in words},
        }
        degrees = run.run_from_tables(tables).check_and_resolve(64).plan.degrees
        assert " · ".join(f"{a} {n}" for a, n in degrees.items() if n > 1) == shape.strip()


def test_variables_of_launchers_are_read() -> None:
    folder = Path(launch.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    rows = re.findall(
        r"^\|.*\|$", TEXTS[ROOT / "docs" / "guides" / "several-nodes.md"], re.MULTILINE
    )
    names = {name for row in rows for name in re.findall(r"`([A-Z][A-Z_]{3,})`", row)}
    assert len(names) >= 20
    assert [name for name in sorted(names) if f'"{name}"' not in source] == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n")
    assert unknown_options("--plan.rows 2 --plan.micro-batch 2 --trian.steps 3") == [
        "--plan.rows",
        "--trian.steps",
    ]
    text = "[a](other.md) [b](page.md#a-heading) [c](#a-heding) ![d](none.svg) [e](https://x.org)"
    assert broken_links(page, text) == ["other.md", "#a-heding", "none.svg"]
    nav = "nav:\n  - page.md\n  - Two: gone.md\n"
    assert sorted(outside_nav(nav, ["page.md", "lost.md"])) == ["gone.md", "lost.md"]
