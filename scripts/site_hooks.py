"""Hooks of mkdocs: files outside of docs/ that a page links to become part of the site.

A page links to a recipe, an example or a table of measurements by its path in the repository, so
that the link also works where the Markdown is read directly. mkdocs only knows files inside of
docs/: these hooks add the others under `files/`, and change the links in the pages.
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
    """Changes the links of a page to these files."""
    here = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = repository_path(page.file.src_uri, link[1])
        return posixpath.relpath(f"files/{path}", here or ".") if path else link[1]

    return LINK.sub(replaced, markdown)
