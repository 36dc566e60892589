"""Building blocks of a self-contained HTML page: styles, tables, lists, and the document.

The document has no external resources: a content security policy forbids them, and all scripts but
its own. Every function escapes the text it is given; `inner` and `body` are HTML already.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from ranvier.html.plot import PLOT_STYLE, READOUT_SCRIPT, escape_html

MAX_TEXT_CHARS = 20_000
"""Maximum number of characters of a text block."""
MAX_LIST_LINES = 200
"""Maximum number of lines of a list."""

PAGE_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none';
 form-action 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hash}'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

LAYOUT_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:76rem;margin:0 auto;padding:2.5rem 1.5rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:3rem 0 1rem;padding-bottom:.4rem;border-bottom:1px solid var(--rule)}
p{margin:.4rem 0;overflow-wrap:anywhere}
.muted{color:var(--muted)}
.kind{color:var(--muted);font-size:.85rem;letter-spacing:.04em;margin:0}
.status{display:inline-block;border:1px solid var(--c2);color:var(--c2);border-radius:1rem;
padding:0 .7rem;font-size:.85rem;font-weight:600}
.status.bad,.note{border-color:var(--c1)}
.status.bad{color:var(--c1)}
.note{border-left:3px solid var(--c1);padding:.2rem .9rem;margin:1rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));gap:.8rem;
margin:1.8rem 0 0;padding:0}
.cards div{border:1px solid var(--rule);border-radius:.6rem;padding:.8rem 1rem}
.cards dt{color:var(--muted);font-size:.85rem}
.cards dd{margin:0;font-size:1.45rem;font-weight:600;font-variant-numeric:tabular-nums}
.cards dd+dd{font-size:.8rem;font-weight:400;color:var(--muted)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:2rem}
figure{margin:0;min-width:0}
figure.bar{max-width:48rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:1rem 0}
th,td{padding:.3rem .9rem .3rem 0;text-align:right;white-space:nowrap;
border-bottom:1px solid var(--rule)}
th{color:var(--muted);font-weight:500}
th:first-child,td:first-child{text-align:left;white-space:normal}
th.text,td.text{text-align:left}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85rem}
pre{overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--rule);
border-radius:.6rem;padding:.9rem 1rem;margin:.8rem 0;line-height:1.5}
summary{cursor:pointer;font-weight:600;padding:.3rem 0}
ul{padding-left:1.2rem;overflow-wrap:anywhere}
@media (max-width:640px){main{padding:1.5rem 1rem 3rem}h1{font-size:1.5rem}
.cards{grid-template-columns:repeat(2,1fr)}.cards dd{font-size:1.2rem}}
"""


def render_document(title: str, body: str, *, script: str = READOUT_SCRIPT) -> str:
    """A complete page; its script is the only one that a browser runs."""
    # The content security policy allows exactly this script, by its hash.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return PAGE_TEMPLATE.format(
        title=escape_html(title),
        hash=digest,
        style=PLOT_STYLE + LAYOUT_CSS,
        body=body,
        script=script,
    )


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, text_columns: Sequence[int] = ()
) -> str:
    """A table that scrolls horizontally on narrow pages.

    Numbers are aligned right; the first column and `text_columns` are aligned left.
    """

    def render_cells(tag: str, cells: Sequence[object]) -> str:
        kinds = [' class="text"' if i in text_columns else "" for i in range(len(cells))]
        start = {"th": '<th scope="col"', "td": "<td"}[tag]
        return "".join(
            f"{start}{kind}>{escape_html(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{render_cells('td', row)}</tr>" for row in rows)
    inner = f"<thead><tr>{render_cells('th', head)}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def render_section(title: str, *parts: str) -> str:
    """A section with a heading; empty if all parts are."""
    inner = "\n".join(filter(None, parts))
    if inner:
        return f"<section><h2>{escape_html(title)}</h2>\n{inner}\n</section>"
    return ""


def render_text_block(text: object) -> str:
    """Preformatted text, truncated if it is very long; empty for blank text."""
    whole = str(text)
    if len(whole) > MAX_TEXT_CHARS:
        more = f"\n[{len(whole) - MAX_TEXT_CHARS:,} more characters]"
    else:
        more = ""
    if whole.strip():
        return f"<pre>{escape_html(whole[:MAX_TEXT_CHARS] + more)}</pre>"
    return ""


def render_list(lines_of: object) -> str:
    """A list of lines, truncated if it is very long; empty if it is not a list."""
    if not isinstance(lines_of, list) or not lines_of:
        return ""
    items = [str(one)[:MAX_TEXT_CHARS] for one in lines_of[:MAX_LIST_LINES]]
    if len(lines_of) > MAX_LIST_LINES:
        items.append(f"and {len(lines_of) - MAX_LIST_LINES:,} more")
    return "<ul>" + "".join(f"<li>{escape_html(item)}</li>" for item in items) + "</ul>"


def render_details(title: str, inner: str) -> str:
    """A collapsible part; empty if `inner` is."""
    if inner:
        return f"<details><summary>{escape_html(title)}</summary>{inner}</details>"
    return ""
