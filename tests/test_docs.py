"""The pages are true: names, settings and links exist, and generated pages are current."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import context_picture
import ranvier
import reference
from ranvier.cli.serve import ServeOptions
from ranvier.config import run
from ranvier.config.run import RunConfig
from syntax_trees import parse, walk

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "ranvier"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "README.md"]}
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
OPTION = re.compile(r"--(\w+)\.([\w-]+)")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
SOURCE_NAME = re.compile(r"`([\w/]+\.(?:py|toml))(?:::([\w.]+))?`")


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def known(section: str, key: str) -> bool:
    """Whether a setting exists."""
    kind = ServeOptions if section in reference.SERVE_SECTIONS else RunConfig
    config: Any = getattr(kind(), section, None)
    return hasattr(config, key) and key in {field.name for field in dataclasses.fields(config)}


def unknown_options(text: str) -> list[str]:
    """Returns the options with a dot that no config class has."""
    found = OPTION.findall(text)
    return [f"--{s}.{k}" for s, k in found if not known(s, k.replace("-", "_"))]


# ---- links and navigation -------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page: its headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def broken_links(path: Path, text: str) -> list[str]:
    """Returns the relative links and images that lead nowhere."""
    problems = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, place = link.partition("#")
        if "://" in link:
            continue
        target = path.parent / name if name else path
        if not target.exists():
            problems.append(link)
        elif place and target.suffix == ".md":
            there = target.read_text(encoding="utf-8")
            documented = place.startswith("ranvier.") and is_documented(place, directives(there))
            if place not in anchors(there) and not documented:
                problems.append(link)
    return problems


def outside_nav(nav: str, pages: list[str]) -> list[str]:
    """Returns pages that mkdocs.yml does not name exactly once, and those that do not exist."""
    named = re.findall(r"^\s+- (?:.*: )?(\S+\.md)$", nav, re.MULTILINE)
    return [p for p in {*named, *pages} if named.count(p) != 1 or p not in pages]


@pytest.mark.parametrize("path", TEXTS, ids=page_name)
def test_options_exist_and_links_lead_somewhere(path: Path) -> None:
    assert unknown_options(TEXTS[path]) == []
    assert broken_links(path, TEXTS[path]) == []
    for block in re.findall(r"```toml[^\n]*\n(.*?)```", TEXTS[path], re.DOTALL):
        run.run_from_tables(tomllib.loads(block))


def test_every_page_is_in_the_nav() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert outside_nav(nav, [path.relative_to(DOCS).as_posix() for path in PAGES]) == []


# ---- generated pages ------------------------------------------------------------------------


def test_generated_pages_are_current() -> None:
    assert reference.main(["--check"]) == 0, "Run: python scripts/reference.py"


def test_the_picture_of_context_is_that_of_the_code() -> None:
    assert context_picture.main(["--check"]) == 0, "Run: python scripts/context_picture.py"


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0 == reference.main(["--check"])
    for name in reference.PAGES:
        text = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
        assert reference.main(["--check"]) == 1, name
        (tmp_path / name).write_text(text, encoding="utf-8")


def test_every_field_is_described() -> None:
    sections = [getattr(RunConfig(), field.name) for field in dataclasses.fields(RunConfig)]
    sections += [getattr(ServeOptions(), name) for name in reference.SERVE_SECTIONS]
    for section in sections:
        kind = type(section)
        texts = reference.field_texts(kind)
        assert {one.name for one in dataclasses.fields(kind)} <= set(texts), kind
        assert all(text.endswith(".") for text in texts.values()), texts


def string_constants() -> Iterator[str]:
    """Yields all strings in the source of the package; f-strings in pieces."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in walk(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@cache
def package_strings() -> str:
    return "\n".join(string_constants())


def test_variables_are_documented_and_read() -> None:
    """Every variable of Ranvier, and no other; launchers and libraries only if they are used."""
    strings = {text for text in package_strings().splitlines() if re.fullmatch("[A-Z0-9_]+", text)}
    own = {name for name in strings if name.startswith("RANVIER_")}
    assert own - {*reference.VARIABLES} == set()
    documented = {*reference.VARIABLES, *reference.LIBRARY_VARIABLES, *reference.DEFAULTS}
    assert documented - strings == set()
    page = TEXTS[DOCS / "reference" / "environment-variables.md"]
    assert {"RANK", "SLURM_PROCID", "MASTER_ADDR"} <= {*re.findall(r"`([A-Z_]+)`", page)}


# ---- API pages ------------------------------------------------------------------------------


def directives(text: str) -> set[str]:
    """Returns the names that an API page documents."""
    return {canonical(name) for name in DIRECTIVE.findall(text)}


def is_documented(name: str, documented: set[str]) -> bool:
    """Whether a name, or a class or module that contains it, is documented."""
    parts = canonical(name).split(".")
    return any(".".join(parts[:i]) in documented for i in range(len(parts), 1, -1))


def module_file(module: str) -> Path | None:
    """Returns the source of a module; None if it is not one."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@cache
def canonical(name: str) -> str:
    """Returns the name where it is defined: ranvier.Grid is ranvier.grid.Grid."""
    module, _, last = name.rpartition(".")
    file = module_file(module) if module else None
    if file is None:
        return name
    for node in walk(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom) and last in {one.name for one in node.names}:
            return canonical(f"{node.module}.{last}")
    return name


def imported_names(code: str) -> set[str]:
    """Returns the full names that a program imports from the package."""
    return {
        f"{node.module}.{one.name}"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ranvier"
        for one in node.names
    }


def programs() -> Iterator[tuple[str, str]]:
    """Yields the Python programs that users read, with their places."""
    for path, text in TEXTS.items():
        if path.parent.name != "contributing":
            for code in re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.M):
                yield page_name(path), textwrap.dedent(code)
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield page_name(path), path.read_text(encoding="utf-8")


def undocumented(names: set[str], documented: set[str]) -> list[str]:
    return sorted(name for name in names if not is_documented(name, documented))


def api_names() -> set[str]:
    pages = (DOCS / "reference" / "api").glob("*.md")
    return {name for page in pages for name in directives(TEXTS[page])}


def test_public_names_have_api_entries() -> None:
    assert undocumented({f"ranvier.{name}" for name in ranvier.__all__}, api_names()) == []


def test_imports_of_readme_docs_and_examples_have_api_entries() -> None:
    documented = api_names()
    found = {(place, name) for place, code in programs() for name in imported_names(code)}
    assert len(found) > 10
    assert sorted(one for one in found if not is_documented(one[1], documented)) == []


def test_api_pages_name_what_exists() -> None:
    for name in api_names():
        module, _, last = name.rpartition(".")
        file = module_file(module)
        assert module_file(name) or (file and find_definition(file, last)), name


# ---- names of the source --------------------------------------------------------------------


def find_definition(file: Path, name: str) -> bool:
    """Whether a file defines a name such as `Class.method`, `function` or `CONSTANT`."""
    body: list[ast.stmt] = parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        for node in body:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            names = {one.id for one in targets if isinstance(one, ast.Name)}
            if part in names or getattr(node, "name", None) == part:
                body = getattr(node, "body", [])
                break
        else:
            return False
    return True


def missing_names(text: str, root: Path) -> list[str]:
    """Returns the names `path.py::Name.method` that do not exist under a root."""
    return [
        f"{path}::{name}" if name else path
        for path, name in SOURCE_NAME.findall(text)
        if not (root / path).is_file() or (name and not find_definition(root / path, name))
    ]


def test_names_of_the_code_tour_exist() -> None:
    text = TEXTS[DOCS / "contributing" / "code-tour.md"]
    assert len(SOURCE_NAME.findall(text)) > 100
    assert missing_names(text, PACKAGE) == []


def test_files_of_extending_exist() -> None:
    text = TEXTS[DOCS / "contributing" / "extending.md"]
    found = [path for path in re.findall(r"`(ranvier/[\w/]+\.py)`", text) if "yours" not in path]
    assert len(found) > 10
    assert [path for path in found if not (ROOT / "src" / path).is_file()] == []


# ---- messages -------------------------------------------------------------------------------


def unknown_messages(text: str, strings: str) -> list[str]:
    """Returns the lines of text blocks that the package does not print; `...` is any value."""
    found = []
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            parts = [part.strip() for part in line.split("...")]
            if not all(part in strings for part in parts):
                found.append(line)
    return found


@pytest.mark.parametrize("path", sorted((DOCS / "troubleshooting").glob("*.md")), ids=page_name)
def test_quoted_messages_are_those_of_the_code(path: Path) -> None:
    assert unknown_messages(TEXTS[path], package_strings()) == []


# ---- recipes and translated settings --------------------------------------------------------


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


def test_translated_configurations_make_the_grid_next_to_them() -> None:
    text = TEXTS[DOCS / "guides" / "coming-from.md"]
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


# ---- negative controls ----------------------------------------------------------------------


def test_mistakes_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n\n::: ranvier.Grid\n")
    assert unknown_options("--plan.rows 2 --plan.micro-batch 2 --trian.steps 3") == [
        "--plan.rows",
        "--trian.steps",
    ]
    text = (
        "[a](other.md) [b](page.md#a-heading) [c](#a-heding) ![d](none.svg) [e](https://x.org) "
        "[f](page.md#ranvier.Grid) [g](page.md#ranvier.Plan)"
    )
    assert broken_links(page, text) == ["other.md", "#a-heding", "none.svg", "page.md#ranvier.Plan"]
    nav = "nav:\n  - page.md\n  - Two: gone.md\n"
    assert sorted(outside_nav(nav, ["page.md", "lost.md"])) == ["gone.md", "lost.md"]


def test_undocumented_names_are_found() -> None:
    code = "from ranvier import Grid\nfrom ranvier.sharding import Shard, round_up\nimport torch\n"
    names = imported_names(code)
    assert names == {"ranvier.Grid", "ranvier.sharding.Shard", "ranvier.sharding.round_up"}
    documented = directives("::: ranvier.Grid\n\n::: ranvier.sharding.Shard\n    options: {}\n")
    assert documented == {"ranvier.grid.Grid", "ranvier.sharding.Shard"}
    assert undocumented(names, documented) == ["ranvier.sharding.round_up"]
    assert undocumented(names, {"ranvier.grid", "ranvier.sharding"}) == []


def test_missing_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("X: int = 1\n\n\nclass A:\n    def f(self): ...\n")
    text = "`a.py::A.f` `a.py::X` `a.py` `a.py::A.g` `a.py::f` `b.py::A` `c.toml` `A.g`"
    assert missing_names(text, tmp_path) == ["a.py::A.g", "a.py::f", "b.py::A", "c.toml"]


def test_unknown_messages_are_found() -> None:
    text = "```text\nRank ... was lost after step\nRank ... was found\n```\n```bash\nls\n```\n"
    assert unknown_messages(text, "Rank \n was lost after step ") == ["Rank ... was found"]
