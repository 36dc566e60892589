"""Chat: conversations to tokens, and which of them are the answers.

A template with generation blocks says itself what the model is to say. With any other the answers
are found by marks: the assistant's texts are rendered once more between characters that no text
has, and what is left without them must be the same text. An answer begins where the prompt for it
ends (what `add_generation_prompt` adds), else where its first text does or the spaces before it;
it ends with the token that the template puts behind it. Where marks change what a template does,
the conversation up to the answer is rendered, which must be how the whole begins.

Special tokens are those that the template writes. In a message they are text, so no message can
end its own turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranvier.data.chat.conversation import Conversation
from ranvier.data.chat.sandbox import BEGIN, CLOSE
from ranvier.data.chat.template import Template
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, RefusedError

FIRST, LAST = 0xD800, 0xDC00
"""Marks before and behind the texts of message i: halves of surrogate pairs, at these and i."""
MOST_MESSAGES = 0x3F0
GUARD = "\udfff"
"""Before a special token in a message: it is text."""
MARKS = re.compile("[\ud800-\udfff]")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names for what an assistant thinks; the first is for all templates."""
Span = tuple[int, int]
Place = tuple[int | None, int | None]
"""Where a text begins and ends, as far as it is known."""
Learn = Literal["answers", "all"]


@dataclass(frozen=True, eq=False)
class Chat:
    """A template with the tokenizer that it is for."""

    template: Template
    tokenizer: Tokenizer

    def encode(
        self, talk: Conversation, learn: Learn = "answers"
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """The tokens of a conversation, and which of them are to be learnt."""
        text, kept = self._plain(talk)
        if learn == "all":
            spans, cut = [(0, len(text))], None if self._closes(text) else len(text.rstrip())
        else:
            spans, cut = self.answers(talk, text)
        ids, places = self._placed(text[:cut], kept)
        mask = np.zeros(len(ids), bool)
        starts, ends = np.array(places, np.int64).reshape(-1, 2).T
        for begin, end in spans:
            if end > begin:  # a token that reaches into the answer is a part of it
                said = text[begin:end]
                # Without a prompt the spaces before it are, but not the end of another token.
                spaces = 0 if self._header else len(said) - len(said.lstrip(" "))
                reached = (starts >= begin) & (ends > begin) | (ends > begin + spaces)
                inside = np.flatnonzero(reached & (starts < end))
                mask[inside.min(initial=len(ids)) : inside.max(initial=-1) + 1] = True
        if cut is not None:
            ids = [*ids, self.tokenizer.end]
            mask = np.append(mask, True)
        return np.array(ids, np.uint32), mask

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> list[int]:
        """The tokens that an answer to these messages follows."""
        talk = Conversation(list(messages), [True] * len(messages), tools)
        text, kept = self._plain(talk, prompt=True)
        stop = len(text)
        if text == self._render(talk, talk.messages):
            # The template adds nothing: all that it writes before an answer does.
            mark = chr(FIRST)
            asked = [*talk.messages, {"role": "assistant", "content": f"{mark}x"}]
            text = MARKS.sub("", self._render(talk, asked).partition(mark)[0])
            stop = len(_unspaced(text))
        ids, places = self._placed(text, kept)
        return [token for token, (start, _) in zip(ids, places, strict=True) if start < stop]

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: that of the template, and that of all documents."""
        mark = chr(FIRST)
        talk = Conversation([{"role": "user", "content": "x"}], [True])
        asked = [*talk.messages, {"role": "assistant", "content": f"x{mark}"}]
        try:
            tail = self._render(talk, asked).partition(mark)[2]
        except DataError:  # it may want more than a question and an answer
            tail = ""
        found = self._any.search(tail)
        own = [] if found is None else [self.tokenizer.specials[found[0]]]
        return frozenset([*own, self.tokenizer.end])

    # ---- text ------------------------------------------------------------------------------

    def _render(
        self,
        talk: Conversation,
        messages: Sequence[dict[str, Any]],
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> str:
        """The template's text of some messages of a conversation."""
        values = {"messages": [_thought(one) for one in messages], "tools": talk.tools}
        more = {"documents": None, "add_generation_prompt": prompt}
        rendering = self.template.rendering(talk.tools)
        return rendering({**self.template.tokens, **values, **more}, at=talk.at, marks=marks)

    def _plain(self, talk: Conversation, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of a conversation, and where special tokens in it are text."""
        text = self._render(talk, talk.messages, prompt=prompt)
        if not self.tokenizer.specials or not any(_occurs(self._any, x) for x in talk.messages):
            return text, []
        guarded = [
            _each(one, lambda x: self._any.sub(f"{GUARD}\\g<0>", x)) for one in talk.messages
        ]
        marked = self._render(talk, guarded, prompt=prompt)
        if marked.replace(GUARD, "") != text:
            raise DataError(
                f"{talk.at}: a message holds a special token ({', '.join(self._names(talk))}) that "
                f"the chat template {self.template.origin} looks for. In a message it is text. "
                "Remove it from the record."
            )
        kept = []
        for count, found in enumerate(re.finditer(GUARD, marked)):
            there = self._any.match(marked, found.end())
            if there is not None:
                kept.append((found.start() - count, found.start() - count + len(there[0])))
        return text, kept

    @cached_property
    def _any(self) -> re.Pattern[str]:
        """Any special token, the longest first."""
        names = sorted(self.tokenizer.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, filter(None, names))) or "(?!)")

    def _names(self, talk: Conversation) -> list[str]:
        return sorted({x for one in talk.messages for x in _found(self._any, one)})

    def _end(self, tail: str) -> int:
        """Where the token ends that ends an answer, in what follows its text; 0: nowhere."""
        found = list(self._any.finditer(tail))
        known = [one for one in found if self.tokenizer.specials[one[0]] in self.ends]
        return next((one.end() for one in (*known, *found)), 0)

    def _closes(self, text: str) -> bool:
        """Whether a text ends with a special token."""
        found = list(self._any.finditer(text))
        return bool(found) and not text[found[-1].end() :].strip()

    # ---- answers ---------------------------------------------------------------------------

    def answers(self, talk: Conversation, text: str) -> tuple[list[Span], int | None]:
        """Characters of the answers to learn, and where the text needs an end of ours, if so."""
        if self.template.rendering(talk.tools).generates:
            return self._generated(talk, text), None
        if not talk.turns:
            return [], None
        if len(talk.messages) > MOST_MESSAGES:
            raise DataError(
                f"{talk.at}: {len(talk.messages)} messages. At most {MOST_MESSAGES} are told "
                "apart. Split the conversation."
            )
        places = self._marked(talk, text)
        spans, ended, past = [], True, 0
        for number in talk.turns:
            place, marks = places.get(number, ((None, None), "texts"))
            begin, stop = self._borders(talk, text, number, place, past)
            tail = self._tail(talk, text, number, stop, marks)
            end = self._end(tail)
            past, ended = stop + (end or len(tail.rstrip())), end > 0
            if talk.learned[number]:
                spans.append((begin, past))
        last = talk.turns[-1] == len(talk.messages) - 1 and talk.learned[-1]
        return spans, None if ended or not last or text[past:].strip() else past

    def _generated(self, talk: Conversation, text: str) -> list[Span]:
        """What generation blocks say."""
        marked = self._render(talk, talk.messages, marks=True)
        if MARKS.sub("", marked) != text:
            raise self._lost(talk, "its generation blocks change when they are marked")
        spans, opened, place = [], 0, 0
        for piece in re.split(f"([{BEGIN}{CLOSE}])", marked):
            if piece == BEGIN:
                opened = place
            elif piece == CLOSE:
                spans.append((opened, place))
            else:
                place += len(piece)
        if len(spans) == len(talk.turns):
            spans = [x for x, i in zip(spans, talk.turns, strict=True) if talk.learned[i]]
        return spans

    def _marked(self, talk: Conversation, text: str) -> dict[int, tuple[Place, str]]:
        """Where the assistant's texts begin and end, as far as marks show it, and which marks."""
        starts, ends = ("outer", "inner", "none"), ("outer", "inner")
        places: dict[int, tuple[Place, str]] = {}
        for marks, start, end in product(("empty", "texts", "names"), starts, ends):
            messages = list(talk.messages)
            for number in talk.turns:
                messages[number] = _between(messages[number], number, start, end, marks)
            try:
                marked = self._render(talk, messages)
            except DataError:
                continue
            if MARKS.sub("", marked) == text:
                places = {n: (x, marks) for n, x in _places(marked).items()} | places
            if len(places) == len(talk.turns):
                break
        return places

    def _borders(
        self,
        talk: Conversation,
        text: str,
        number: int,
        mark: Place,
        past: int,
    ) -> Span:
        """Where an answer begins, and where its own text ends; past: where the one before did."""
        begin, stop = mark
        limit = stop if begin is None else begin
        if limit is not None and stop is not None and not past <= limit <= stop:
            raise self._lost(talk, f"message {number} is out of order in it")
        if begin is None:
            begin = self._prompted(talk, text, number, past)
            if begin is not None:
                return begin, self._own(talk, text, number, begin) if stop is None else stop
        if limit is not None and stop is not None and self._header:
            header = text.rfind(self._header, past, limit)
            if header >= 0:
                return header + len(self._header), stop
            if begin is None:  # perhaps only a part of it: templates may add what they drop later
                begin = self._shorter(text, past, limit)
        if begin is None or stop is None:
            raise self._lost(talk, f"message {number} cannot be found in it")
        if not self._header and self._silent(talk, number):  # begin where `prompt` ends
            begin = past + len(_unspaced(text[past:begin]))
        return begin, stop

    def _silent(self, talk: Conversation, number: int) -> bool:
        """Whether the template adds nothing as the prompt for an answer."""
        try:
            asked = [self._render(talk, talk.messages[:number], prompt=x) for x in (True, False)]
        except DataError:  # it takes no conversation that ends there, so nobody asks
            return False
        return asked[0] == asked[1]

    def _prompted(self, talk: Conversation, text: str, number: int, past: int) -> int | None:
        """Where the prompt for an answer ends, if the text begins with it."""
        before = self._render(talk, talk.messages[:number], prompt=True)
        added = before != self._render(talk, talk.messages[:number])
        good = added and text.startswith(before) and len(before) >= past
        return len(before) if good else None

    def _own(self, talk: Conversation, text: str, number: int, begin: int) -> int:
        """Where the text of a message ends that no mark shows: before its last special token."""
        whole = self._render(talk, talk.messages[: number + 1])
        if not text.startswith(whole):
            raise self._lost(talk, f"the end of message {number} cannot be found in it")
        found = [one.start() for one in self._any.finditer(text, begin, len(whole))]
        return found[-1] if found else begin + len(text[begin : len(whole)].rstrip())

    @cached_property
    def _header(self) -> str:
        """What the template adds as the prompt for an answer; empty if it adds nothing."""
        talk = Conversation([{"role": "user", "content": "x"}], [True])
        try:
            bare = self._render(talk, talk.messages)
            full = self._render(talk, talk.messages, prompt=True)
        except RefusedError:
            raise
        except DataError:  # it may want more than a question
            return ""
        return full[len(bare) :] if full.startswith(bare) else ""

    def _shorter(self, text: str, past: int, limit: int) -> int | None:
        """Behind the longest beginning of the prompt for an answer in a part of the text."""
        for size in range(len(self._header) - 1, 3, -1):
            place = text.rfind(self._header[:size], past, limit)
            if place >= 0:
                return place + size
        return None

    def _tail(self, talk: Conversation, text: str, number: int, stop: int, marks: str) -> str:
        """What the template writes behind the text of a message for its own sake.

        marks: those that have shown where the text ends.
        """
        if number == len(talk.messages) - 1:
            return text[stop:]
        mark, before = chr(LAST + number), talk.messages[:number]
        last = _between(talk.messages[number], number, "none", "outer", marks)
        try:
            marked = self._render(talk, [*before, last])
            if mark in marked:
                tail = marked.rpartition(mark)[2]
            else:
                whole = self._render(talk, talk.messages[: number + 1])
                tail = whole[stop:] if text.startswith(whole[:stop]) else ""
        except DataError:  # it takes no conversation that ends here
            found = self._any.search(text, stop)
            own = found is not None and self.tokenizer.specials[found[0]] in self.ends
            return text[stop : found.end()] if found is not None and own else ""
        return _common(tail, text[stop:])

    def _lost(self, talk: Conversation, what: str) -> DataError:
        return DataError(
            f"{talk.at}: the answers cannot be told from the rest in what the chat template "
            f"{self.template.origin} writes: {what}. They are learnt, the rest is not. Put "
            "{% generation %} and {% endgeneration %} around them, or use data.learn=all."
        )

    # ---- tokens ----------------------------------------------------------------------------

    def _placed(self, text: str, kept: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Ids of a text and the characters of each; kept: special tokens that are text."""
        ids: list[int] = []
        places: list[Span] = []
        for begin, end, special in _pieces(text, kept):
            some, at = self._piece(text[begin:end], special=special, first=begin == 0)
            ids += some
            places += [(begin + a, begin + b) for a, b in at]
        return ids, places

    def _piece(self, text: str, *, special: bool, first: bool) -> tuple[list[int], list[Span]]:
        """A piece of a text, which may not begin it: some tokenizers put a space there."""
        if first:
            return self.tokenizer.placed(text, special=special)
        newline, _ = self.tokenizer.placed("\n", special=special)
        ids, at = self.tokenizer.placed("\n" + text, special=special)
        if ids[: len(newline)] != newline:
            return self.tokenizer.placed(text, special=special)
        count = len(newline)
        return ids[count:], [(max(a - 1, 0), b - 1) for a, b in at[count:]]


def _unspaced(text: str) -> str:
    """What a model is to go on from: a space at its end is a part of the word behind it."""
    return text.rstrip(" ")


def _common(a: str, b: str) -> str:
    """What both begin with."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(differ, min(len(a), len(b)))]


def _pieces(text: str, kept: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of each piece of a text, and whether special tokens in it are such."""
    place = 0
    for begin, end in kept:
        if begin > place:
            yield place, begin, True
        yield begin, end, False
        place = end
    if place < len(text) or not kept:
        yield place, len(text), True


def _thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has the names that templates look for."""
    found = next((message[x] for x in REASONING if message.get(x) is not None), None)
    return message if found is None else {"thinking": found, **message, REASONING[0]: found}


def _each(value: Any, change: Any, *, skip: Sequence[str] = ("role",)) -> Any:
    """A value of JSON with its texts changed; skip: keys whose values stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k in skip else _each(v, change, skip=skip) for k, v in value.items()}
    if isinstance(value, list):
        return [_each(one, change, skip=skip) for one in value]
    return value


def _found(pattern: re.Pattern[str], value: Any) -> list[str]:
    found: list[str] = []

    def look(text: str) -> str:
        found.extend(pattern.findall(text))
        return text

    _each(value, look)
    return found


def _occurs(pattern: re.Pattern[str], value: Any) -> bool:
    return bool(_found(pattern, value))


def _between(
    message: dict[str, Any], number: int, start: str, end: str, marks: str
) -> dict[str, Any]:
    """A message with marks around its texts: at their ends, or inside the space at their ends.

    marks: texts; empty: also in empty ones, which makes them true to a template that asks; names:
    also of tools that are called, for calls without any text.
    """
    first, last = chr(FIRST + number), chr(LAST + number)

    def around(text: str) -> str:
        if not text and marks != "empty":
            return text
        left = len(text) - len(text.lstrip()) if start == "inner" else 0
        right = len(text.rstrip()) if end == "inner" else len(text)
        right = max(left, right)
        head = "" if start == "none" else first
        return f"{text[:left]}{head}{text[left:right]}{last}{text[right:]}"

    skip = ("role", "type", "id", *(() if marks == "names" else ("name",)))
    return {**message, **_each(message, around, skip=skip)}


def _places(marked: str) -> dict[int, Place]:
    """The first mark before and the last behind the texts of each message, without marks."""
    found: dict[int, Place] = {}
    place = 0
    for piece in re.split("([\ud800-\udfff])", marked):
        code = ord(piece) if len(piece) == 1 else 0
        if FIRST <= code < FIRST + MOST_MESSAGES:
            number = code - FIRST
            begin, end = found.get(number, (None, None))
            found[number] = (place if begin is None else begin, end)
        elif LAST <= code < LAST + MOST_MESSAGES:
            number = code - LAST
            found[number] = (found.get(number, (None, None))[0], place)
        else:
            place += len(piece)
    return found
