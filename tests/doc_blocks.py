"""Code blocks of Markdown pages: what is run, what is only checked, and how.

A comment on the line before a block says how it is run:

* `<!-- addopts: OPTIONS -->` sets RANVIER_ADDOPTS for the block instead of SMALL_ADDOPTS.
* `<!-- not run: gpu | network | slurm | nodes [ranks=N][: why] -->` marks a block that cannot run
  here. Its commands are parsed, and their plans are checked for N ranks.

A block with a title (```python title="train.py"```) is a file, written before what follows it runs.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ranvier.cli.completion import SUBCOMMAND_OPTION_CLASSES, find_option_class
from ranvier.cli.inference import with_engine_prefix
from ranvier.cli.parsing import (
    drop_options,
    load_run_with_options,
    option_value,
    parse_options,
    split_words,
)
from ranvier.config.arguments import InferenceOptions
from ranvier.config.run import RunConfig

SMALL_ADDOPTS = (
    "--train.steps 3 --data.max-bytes 200000 --train.eval-interval 0 --train.sample-prompt ''"
)
"""What RANVIER_ADDOPTS is unless a page says otherwise."""
REASONS = ("gpu", "network", "slurm", "nodes")
SHELL = ("bash", "console", "shell", "sh")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<attributes>[^`]*)$")
COMMENT = re.compile(r"^ *<!-- (?P<key>addopts|not run): *(?P<value>.*?) *-->$")
NOT_RUN = re.compile(r"^(?P<reason>\w+)(?: ranks=(?P<ranks>\d+))?(?:: *(?P<why>.+))?$")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str
    addopts: str = SMALL_ADDOPTS
    reason: str = ""
    """Why it is not run; empty if it is."""
    ranks: int = 0
    """Ranks for which the plan of a block that is not run is checked; 0: those of its degrees."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """The commands of a shell block, without prompts and output."""
        if self.language != "console":
            return self.text
        lines = []
        continued = False
        for line in self.text.splitlines():
            if line.startswith("$ "):
                lines.append(line[2:])
            elif continued:
                lines.append(line)
            continued = (continued or line.startswith("$ ")) and line.endswith("\\")
        return "\n".join(lines)

    @property
    def is_command(self) -> bool:
        return self.language in SHELL and not self.title


def read_blocks(page: str, text: str) -> Iterator[Block]:
    """Yields the code blocks of a page in order."""
    comments: dict[str, str] = {}
    opening: re.Match[str] | None = None
    start = 0
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opening is None and fence:
            opening = fence
            start = number
            body = []
        elif opening is not None and line.strip() == "```":
            yield _make_block(page, start, opening, body, comments)
            opening = None
            comments = {}
        elif opening is not None:
            body.append(line)
        elif comment := COMMENT.match(line):
            comments[comment["key"]] = comment["value"]
        elif line.strip():
            assert not comments, f"{page}:{number}: {comments} must be directly before a block."
    assert opening is None, f"{page}:{start}: the block does not end."


def _make_block(
    page: str, line: int, fence: re.Match[str], body: list[str], comments: dict[str, str]
) -> Block:
    title = re.search(r'title="([^"]+)"', fence["attributes"])
    reason = ""
    ranks = 0
    if "not run" in comments:
        match = NOT_RUN.match(comments["not run"])
        assert match and match["reason"] in REASONS, f"{page}:{line}: {comments['not run']!r}"
        reason = match["reason"]
        ranks = int(match["ranks"] or 0)
    return Block(
        page=page,
        line=line,
        language=fence["language"],
        title=title[1] if title else "",
        text=textwrap.dedent("\n".join(body)) + "\n",
        addopts=comments.get("addopts", SMALL_ADDOPTS),
        reason=reason,
        ranks=ranks,
    )


def ranvier_commands(script: str) -> Iterator[list[str]]:
    """Yields the words after `ranvier` of each command of a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not word or word[0] not in "&|;<>":
                words.append(word)
                continue
            names = [i for i, one in enumerate(words) if one == "ranvier"]
            if names:
                yield words[names[0] + 1 :]
            words = []


def check_command(words: list[str], ranks: int) -> None:
    """Parses the options of a command without running it, and checks its plan for `ranks` ranks.

    A run or model that does not exist, because nothing made it, is left out.
    """
    verb = words[0]
    kind = find_option_class(verb)
    kind = SUBCOMMAND_OPTION_CLASSES.get(verb, {}).get(words[1] if words[1:] else "", kind)
    # `--version`, and commands that take a path only.
    if kind is None:
        return
    # The first words are a subcommand, files, or the directory of a run.
    files, options = split_words(words[1:])
    if not issubclass(kind, RunConfig):
        if issubclass(kind, InferenceOptions):
            options = with_engine_prefix(options)
        parse_options(kind, kind(), verb, options)
        return
    nodes = int(option_value(options, "--launch.nnodes") or option_value(options, "--nodes") or 1)
    ranks = ranks or nodes * int(option_value(options, "--nproc") or 0)
    if option_value(options, "--train.init-from"):
        # The positions of the model that it starts from are not known here.
        options = drop_options(options, ("train.init_from", "data.seq_len"))
    run = load_run_with_options(kind, verb, [*filter(os.path.isfile, files), *options])
    if verb in ("train", "verify"):
        degrees = math.prod(abs(size) for size in run.plan.degrees.values())
        run.settings.check_and_resolve(ranks or degrees)


def write_inputs(folder: Path, root: Path) -> None:
    """Writes the files that the pages' commands read: texts, chats, prompts, a model, a run."""
    from published_models import BASE, save, theirs
    from ranvier.data.tokenizer import ByteTokenizer

    (folder / "my.jsonl").write_text('{"text": "Some words of my own, again and again."}\n' * 800)
    (folder / "texts").mkdir()
    for name in ("a", "b", "c"):
        (folder / "texts" / f"{name}.txt").write_text(f"Text {name} has some words. " * 400)
    chat = [
        {"role": "user", "content": "What is a node of Ranvier?"},
        {"role": "assistant", "content": "A gap in the myelin sheath of an axon. " * 4},
    ]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 200)
    (folder / "prompts.jsonl").write_text('{"prompt": "def main("}\n{"prompt": "import "}\n')
    (folder / "run.toml").write_text("[plan]\nrow = 2\n")
    for name in ("recipes", "examples", "benchmarks", "scripts"):
        (folder / name).symlink_to(root / name)
    shape = BASE | {"vocab_size": 257, "max_position_embeddings": 512}
    model = save(theirs("llama", shape), folder / "path" / "to" / "model")
    ByteTokenizer().save(model / "tokenizer.json")
