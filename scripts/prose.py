"""Lists phrases that docs, docstrings, comments, help texts and errors avoid.

Usage: python scripts/prose.py [PATH ...]
Reads Markdown outside of code blocks, and the strings and comments of Python and TOML files.
Without a path it reads the README, the docs, the change log and the package. Returns 1 if it finds
anything.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "src/ranvier", "scripts"),
    *("benchmarks", "examples", "recipes"),
)

UNIT = (
    "step|token|parameter|rank|sample|sequence|device|GPU|layer|block|second|minute|hour|day|"
    "micro-batch|node|element|weight|value|head|expert|stage|message|call|document|sweep"
)
QUANTITY = (
    r"bytes?|bits?|[KMGT]i?B|FLOPs?|ms|us|s|(?:milli|micro)?seconds?|minutes?|tokens|times|once|"
    r"twice|thrice|calls?|launches|kernels?|messages|collectives?|gathers?|all-reduces?|"
    r"reductions?|sums?|copies|passes|samples|sequences|micro-batches|ranks|processes|threads?|"
    r"elements|values|parameters|weights|states|numbers?|rows?|lines?|files?|objects?|"
    r"buckets?|events?|steps|layers|blocks|jobs?|requests?|checkpoints?|\d[\d.,]*(?<![.,])"
)
PHRASES = {
    "foretold, foretell: predicted": r"\bforet(?:old|ell\w*)\b",
    "foreseen: expected, predicted": r"\bforese\w+",
    "mend: fix": r"\bmend(?:s|ed|ing)?\b",
    "is no X: is not a X": (
        r"(?<!there )\b(?:is|are|was|were|be|as) no (?!longer|more|less|fewer)\w"
    ),
    "goes on: continues": r"\b(?:go|goes|going|gone|went) on\b",
    "thousand million: billion, B": r"\bthousand million",
    "a step: per step": rf"\b(?:{QUANTITY}) an? (?:{UNIT})\b",
    "lies: is, is stored": r"\b(?:lie|lies|lay|lain|lying)\b",
    "rests: is stored, remains": r"\b(?:rests|rested|resting|at rest)\b",
    "told: given, reported": r"\btold\b",
    "worth": r"\bworth\b",
    "nobody, whoever: no one, users who": r"\b(?:nobody|whoever)\b",
    "said, says: reported": r"\b(?:said|unsaid)\b",
    "beside: in addition to, next to": r"\bbesides?\b",
    "afresh, anew": r"\b(?:afresh|anew)\b",
    "met, meets: receives": r"\b(?:meets|bears|borne|dwells?|hence|thereby|therein|whereof)\b",
    "its turn, in turn": r"\bits turn\b",
}
"""What a phrase is and what replaces it, and how it is found."""
PATTERNS = {rule: re.compile(pattern.lower()) for rule, pattern in PHRASES.items()}
"""For lower-case text, which is searched faster than with `re.IGNORECASE`."""


TEXT_TOKENS = ("COMMENT", "STRING", "FSTRING_MIDDLE")  # 3.11 reads an f-string as one string


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of the comments and strings of a Python file, with their numbers."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in TEXT_TOKENS:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a Markdown page outside of code blocks and inline code."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, re.sub(r"`[^`]*`", "``", line)


def texts_of_toml(source: str) -> Iterator[tuple[int, str]]:
    """Yields the comments of a TOML file."""
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line[line.index("#") :]


READERS = {".py": texts_of_python, ".md": texts_of_markdown, ".toml": texts_of_toml}


def find_phrases(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields line number, rule and line for each phrase of a file that should be rewritten."""
    source = path.read_text(encoding="utf-8")
    lower = source.lower()
    # Most files have none of them, and need not be divided into code and text.
    found = {rule: pattern for rule, pattern in PATTERNS.items() if pattern.search(lower)}
    if not found:
        return
    for number, line in READERS[path.suffix](source):
        for rule, pattern in found.items():
            if pattern.search(line.lower()):
                yield number, rule, line.strip()


def main(arguments: Sequence[str]) -> int:
    """Prints what was found; returns 1 if there is anything."""
    count = 0
    for name in arguments or PATHS:
        root = ROOT / name
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in files:
            # This file names the phrases themselves.
            if path.suffix in READERS and path != Path(__file__).resolve():
                for number, rule, line in find_phrases(path):
                    print(f"{path}:{number}: [{rule}] {line}")
                    count += 1
    print(f"{count} phrases to rewrite")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
