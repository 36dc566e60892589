"""Lines of every file of the package, and a failure where a file or a function is too long.

Usage: python scripts/size.py [folder]
A function is counted from its `def` line to its last line, nested functions included.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path, PurePath

MAX_FILE = 500
"""Lines of a file."""

MAX_FUNCTION = 60
"""Lines of a function."""

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "ranvier"


def oversized(path: PurePath, source: str) -> list[str]:
    """One message for the file and for each function above its limit."""
    problems = []
    lines = len(source.splitlines())
    if lines > MAX_FILE:
        problems.append(f"{path}: {lines} lines; a file has at most {MAX_FILE}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None, f"{path}: {node.name} has no last line"
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                rule = f"a function has at most {MAX_FUNCTION}"
                problems.append(f"{path}:{node.lineno}: {node.name} has {length} lines; {rule}")
    return problems


def main() -> int:
    """Prints the sizes; returns 1 if something is too long, 2 if there is nothing to measure."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    if not sources:
        print(f"No Python file under {folder}.", file=sys.stderr)
        return 2
    for path, source in sources.items():
        print(f"{len(source.splitlines()):6} {path.relative_to(folder)}")
    print(f"{sum(len(source.splitlines()) for source in sources.values()):6} total")
    problems = [p for path, source in sources.items() for p in oversized(path, source)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
