"""What is printed does nothing to a terminal; commands that are suggested can be pasted."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import call
from ranvier.system.terminal import (
    CONTROL_CHARACTERS,
    command_line,
    escape_controls,
    print,
    quote_word,
    write_raw,
)

TITLE, CLEAR, CLIPBOARD = "\x1b]0;owned\x07", "\x1b[2J\x1b[H", "\x1b]52;c;cm0gLXJm\x07"
HOSTILE = [TITLE, CLEAR, CLIPBOARD, "\x9b31m", "a\rb", "\x08\x08", "\x7f", "\u202egpj.exe", "\x00"]
HOSTILE += ["\u2066x\u2069", "\u200f", "\u2028", "\udc9b", "\x0b\x0c", "\x1bc", "\U000e0041"]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_control_characters_are_shown(text: str) -> None:
    shown = escape_controls(f"é {text}\n\t日本 👩‍👩‍👧")
    assert shown.startswith("é ") and shown.endswith("\n\t日本 👩‍👩‍👧")
    assert not CONTROL_CHARACTERS.search(shown) and "\\" in shown
    shown.encode()  # halves of characters would be an error on the way out
    out = io.StringIO()
    print("x", text, 3, sep="-", end="!", file=out)
    assert out.getvalue() == f"x-{escape_controls(text)}-3!"


def test_nothing_else_is_changed() -> None:
    text = "".join(chr(i) for i in (9, 10, *range(32, 127), *range(0xA0, 0x600)) if i != 0xAD)
    kept = escape_controls(text)
    assert kept == text or CONTROL_CHARACTERS.findall(text) == []
    assert escape_controls(r"\x1b") == r"\x1b"


def test_own_sequences_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    write_raw("\r\x1b[K")
    assert capsys.readouterr().out == "\r\x1b[K"


def words_of(line: str) -> list[str]:
    """The words that a shell makes of a line."""
    script = f"words() {{ printf '%s\\0' \"$@\"; }}; words {line}"
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    found = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env=environment, timeout=20
    )
    assert found.stderr == b""
    return [os.fsdecode(word) for word in found.stdout.split(b"\0")[:-1]]


def test_commands_are_read_as_they_were_meant() -> None:
    odd = ["a b", "it's", '"q"', "$(touch x)", "`x`", "$HOME", "a;b", "a&b", "*", "~", "#", "!", ""]
    odd += [
        "\\",
        "a\nb",
        "a\tb'\\",
        "\x1b[31mf",
        "\u202e1",
        "\x9b2",
        "\udcff3",
        "日本",
        "-x",
        "{a,b}",
    ]
    line = command_line("ranvier", *odd)
    assert words_of(line) == ["ranvier", *odd]
    assert not CONTROL_CHARACTERS.search(line) and "\n" not in line
    assert words_of(command_line(Path("-run"), 20)) == ["./-run", "20"]
    assert command_line("ranvier", "train", Path("runs/tiny")) == "ranvier train runs/tiny"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_quoted_words_are_safe(text: str) -> None:
    quoted = quote_word(text)
    assert not CONTROL_CHARACTERS.search(quoted) and "\n" not in quoted
    assert escape_controls(quoted) == quoted, "printing changes no command"


@pytest.mark.parametrize(
    "words",
    [
        (f"tra{CLEAR}in",),
        ("train", f"{TITLE}.toml"),
        ("train", "--model.size", CLEAR),
        ("train", f"--train.{CLEAR}", "3"),
        ("train", "--train.steps", CLEAR),
        ("data", "prepare", f"{CLIPBOARD}.txt"),
        ("generate", f"runs/{CLEAR}", "--prompt", "x"),
        ("checkpoint", "ls", CLEAR),
        ("data", "show", f"\u202e{TITLE}"),
        ("import", CLEAR),
        ("report", "\udc9b"),
    ],
    ids=ascii,
)
def test_errors_show_no_control_characters(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*words) != 0
    out, err = capsys.readouterr()
    assert not CONTROL_CHARACTERS.search(out + err), ascii(out + err)
    assert err and "Traceback" not in err


def test_a_setting_with_control_characters_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[train]\n"\\u001b[2J" = 3\n[plan]\nrank_order = ["\\u202e"]\n')
    assert call("train", "run.toml") == 64
    err = capsys.readouterr().err
    assert not CONTROL_CHARACTERS.search(err) and "\\x1b[2J" in err, ascii(err)
