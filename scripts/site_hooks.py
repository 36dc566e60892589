"""Hooks of mkdocs: files outside of docs/ that a page links to become part of the site.

A page links to a recipe, an example or a table of measurements by its path in the repository, so
that the link also works where the Markdown is read directly. mkdocs only knows files inside of
docs/: these hooks add the others under `files/`, and change the links in the pages. They also order
the results of the search.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)")
SEARCH_BOOSTS = {
    "troubleshooting/out-of-memory.md": 3.0,
    "troubleshooting/": 2.0,
    "guides/memory.md": 2.0,
    # The search also finds the beginning of a word: "does not fit" finds "Notebooks".
    "guides/notebooks.md": 0.5,
    "reference/api/": 0.2,
}
"""Factors of the search score by the beginning of a page's path; the first match counts."""


def repository_path(page: str, link: str) -> str:
    """Returns the path in the repository of a file outside of docs/; empty if it is not one.

    page: path of the page in docs/.
    """
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    outside = not path.startswith(("docs/", "../")) and not path.endswith(".md")
    return path if outside and (ROOT / path).is_file() else ""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to."""
    found = {
        repository_path(file.src_uri, link)
        for file in files.documentation_pages()
        for link in LINK.findall(file.content_string)
    }
    for path in sorted(found - {""}):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes the links of a page to these files, and sets its factor in the search."""
    uri = page.file.src_uri
    boost = next((n for start, n in SEARCH_BOOSTS.items() if uri.startswith(start)), 1.0)
    page.meta["search"] = {"boost": boost}
    here = posixpath.dirname(uri)

    def replaced(link: re.Match[str]) -> str:
        path = repository_path(uri, link[1])
        return posixpath.relpath(f"files/{path}", here or ".") if path else link[1]

    return LINK.sub(replaced, markdown)
