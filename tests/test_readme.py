"""The README starts with the two commands, and examples in docstrings run.

Its commands and programs are run by tests/test_doc_commands.py, its links by tests/test_docs.py.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from ranvier.models import decoder
from ranvier.nn import autotune
from ranvier.parallel import parallelize

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_two_commands_come_first() -> None:
    first, second, *_ = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert first == "pip install -c constraints.txt -e . && ranvier train\n"
    assert second == "pip install -c constraints.txt -e '.[test]' && pytest\n"
    assert (
        README.index(first) < README.index(second) < README.index("Ranvier is a PyTorch framework")
    )


def test_examples_in_docstrings_run() -> None:
    for module in (parallelize, decoder, autotune):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed, module
