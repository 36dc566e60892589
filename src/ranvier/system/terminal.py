"""Terminal: what is printed does nothing to the terminal that shows it, and commands can be pasted.

Texts from outside (what a model says, corpora, names of files, settings, tokenizers, errors that
quote any of these) may hold control characters, with which they could set the title and the
clipboard of a terminal, hide or overwrite other lines, or show text in another order than it has.
`print` is the one door to standard output and standard error: it shows such characters as \\x1b or
\\u202e, whether a terminal, a pipe or a log reads them, because logs are shown on terminals later.
Newlines and tabs stay. Exact texts are what functions return, and what files hold.
"""

from __future__ import annotations

import builtins
import re
import shlex
import sys
from pathlib import Path
from typing import TextIO

CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks and overrides of direction
    "\u2028\u2029\ufff9-\ufffb\ud800-\udfff"  # other ends of lines; halves of characters
    "\U000e0000-\U000e007f]"  # tags, which nothing shows
)
"""Characters that are obeyed rather than shown."""


def escape_controls(text: str) -> str:
    """The text with control characters as Python writes them, except newlines and tabs."""
    return CONTROL_CHARACTERS.sub(_escape_match, text)


def _escape_match(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def print(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """The built-in `print`, with control characters made visible."""
    text = escape_controls(sep.join(map(str, values)))
    builtins.print(text, end=end, file=file, flush=flush)


def write_raw(text: str, file: TextIO | None = None) -> None:
    """Write control sequences of our own; text from outside goes through `escape_controls`."""
    builtins.print(text, end="", file=file or sys.stdout, flush=True)


def command_line(*words: object) -> str:
    """A command that a shell reads as these words; paths that look like options are made plain."""
    return " ".join(quote_word(word) for word in words)


def quote_word(word: object) -> str:
    """A word, quoted if a shell would read it otherwise; with control characters as $'\\x1b'."""
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if not CONTROL_CHARACTERS.search(text) and "\n" not in text and "\t" not in text:
        return shlex.quote(text)
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    # bytes of a name that are no UTF-8 are kept by Python as U+DC80 to U+DCFF
    text = re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    text = re.sub("[\x80-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return f"$'{escape_controls(text)}'"
