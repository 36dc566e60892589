"""Terminal output without side effects on the terminal, and commands that can be pasted.

Untrusted text (output of a model, corpora, file names, settings, tokenizers, and errors that quote
them) may contain control characters, which could set the title and the clipboard of a terminal,
hide or overwrite other lines, or reorder text. All output goes through `print`, which shows such
characters as \\x1b or \\u202e. It does so on a terminal, in a pipe and in a log, because logs are
shown on terminals later. Newlines and tabs are kept. Exact text is available from return values and
in files.
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
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # direction marks and overrides
    "\u2028\u2029\ufff9-\ufffb\ud800-\udfff"  # other line separators; surrogates
    "\U000e0000-\U000e007f]"  # tags, which are invisible
)
"""Characters that a terminal interprets instead of showing them."""


def escape_controls(text: str) -> str:
    """Returns the text with control characters as Python escapes, except newlines and tabs."""
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
    """The built-in `print`, with control characters escaped."""
    text = escape_controls(sep.join(map(str, values)))
    builtins.print(text, end=end, file=file, flush=flush)


def write_raw(text: str, file: TextIO | None = None) -> None:
    """Writes our own control sequences; untrusted text must go through `escape_controls`."""
    builtins.print(text, end="", file=file or sys.stdout, flush=True)


def command_line(*words: object) -> str:
    """Returns a shell command of these words; paths that look like options get the prefix ./."""
    return " ".join(quote_word(word) for word in words)


def quote_word(word: object) -> str:
    """Returns a word, quoted for a shell if needed, with control characters as $'\\x1b'."""
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if not CONTROL_CHARACTERS.search(text) and "\n" not in text and "\t" not in text:
        return shlex.quote(text)
    # ANSI-C quoting ($'...') is the only form that can express control characters.
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    # Bytes of a file name that are not UTF-8 are surrogates U+DC80 to U+DCFF (surrogateescape).
    text = re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    text = re.sub("[\x80-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return f"$'{escape_controls(text)}'"
