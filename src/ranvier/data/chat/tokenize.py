"""Tokenizes conversations and finds the tokens of the assistant's answers.

A template with generation blocks marks the text that the model is to generate. With any other
template the answers are found by marks: the assistant's texts are rendered a second time between
characters that cannot occur in text, and without the marks the result must be the same text. An
answer starts where its generation prompt ends (the text that `add_generation_prompt` adds),
otherwise at its first text or the spaces before it. It ends with the token that the template writes
after it. If marks change the behavior of a template, the conversation up to the answer is rendered
instead, which must be a prefix of the full text.

Only special tokens written by the template count as special. In a message they are plain text, so
that no message can end its own turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranvier.data.chat.conversation import Conversation
from ranvier.data.chat.sandbox import BEGIN_MARK, END_MARK
from ranvier.data.chat.template import ChatTemplate
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, UnsafeInputError

# Lone surrogates are not valid Unicode text, so that no message can contain a mark.
FIRST_MARK = 0xD800
LAST_MARK = 0xDC00
"""Marks before and after the texts of message i: surrogates at these code points plus i."""
# LAST_MARK + MOST_MESSAGES is BEGIN_MARK (0xDFF0): marks of messages never collide with marks of
# generation blocks or with GUARD.
MOST_MESSAGES = 0x3F0
GUARD = "\udfff"
"""Marks a special token inside a message as plain text."""
MARK_PATTERN = re.compile("[\ud800-\udfff]")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning of an assistant; templates always get the first one."""
CharSpan = tuple[int, int]
MarkPlace = tuple[int | None, int | None]
"""Start and end of a text, as far as they are known."""
LossOn = Literal["assistant", "all"]


@dataclass(frozen=True, eq=False)
class ChatEncoder:
    """A chat template with its tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer

    def encode(
        self, talk: Conversation, loss_on: LossOn = "assistant"
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """The tokens of a conversation, and a mask of the tokens to learn."""
        text, kept = self._render_plain(talk)
        if loss_on == "all":
            spans = [(0, len(text))]
            if self._ends_with_special(text):
                cut = None
            else:
                # The template writes no end token: trailing whitespace is replaced by the
                # tokenizer's.
                cut = len(text.rstrip())
        else:
            spans, cut = self.find_answers(talk, text)
        ids, places = self._encode_with_offsets(text[:cut], kept)
        mask = np.zeros(len(ids), bool)
        starts, ends = np.array(places, np.int64).reshape(-1, 2).T
        for begin, end in spans:
            # A token that overlaps the start of an answer belongs to it.
            if end > begin:
                answer = text[begin:end]
                # Without a generation prompt the leading spaces belong to the answer too, but a
                # token that merely ends in them does not.
                if self._generation_prompt:
                    spaces = 0
                else:
                    spaces = len(answer) - len(answer.lstrip(" "))
                reached = (starts >= begin) & (ends > begin) | (ends > begin + spaces)
                # The mask of an answer is contiguous, regardless of the offsets of the tokens
                # in between.
                inside = np.flatnonzero(reached & (starts < end))
                mask[inside.min(initial=len(ids)) : inside.max(initial=-1) + 1] = True
        # The end token is appended by us and is learned as well.
        if cut is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
            mask = np.append(mask, True)
        return np.array(ids, np.uint32), mask

    def encode_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The tokens of the prompt that asks for an answer to these messages.

        variables: further variables of the template. Without a generation prompt the tokens are
        those of the messages; or the last message is left open, so that it can be continued.
        """
        talk = Conversation(
            list(messages), [True] * len(messages), tools, variables=variables or {}
        )
        text, kept, stop = self._render_prompt(talk, add_generation_prompt, continue_final_message)
        ids, places = self._encode_with_offsets(text, kept)
        # Tokens that start in the stripped spaces are dropped: such a space belongs to the answer.
        return [token for token, (start, _) in zip(ids, places, strict=True) if start < stop]

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of `encode_prompt`."""
        talk = Conversation(
            list(messages), [True] * len(messages), tools, variables=variables or {}
        )
        text, _, stop = self._render_prompt(talk, add_generation_prompt, continue_final_message)
        return text[:stop]

    def _render_prompt(
        self, talk: Conversation, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, list[CharSpan], int]:
        """The text of a prompt, where special tokens are plain text, and where it ends."""
        mark = chr(FIRST_MARK)
        if continue_final_message:
            _, kept = self._render_plain(talk)
            last = talk.messages[-1]
            opened = [*talk.messages[:-1], {**last, "content": f"{last.get('content')}{mark}"}]
            text, found, _ = self._render_messages(talk, opened).partition(mark)
            if not found:
                raise DataError(
                    f"The chat template {self.template.origin} does not write the last message. "
                    "Only a message that it writes can be continued. Send a new message."
                )
            return text, [one for one in kept if one[1] <= len(text)], len(text)
        text, kept = self._render_plain(talk, prompt=add_generation_prompt)
        stop = len(text)
        if add_generation_prompt and text == self._render_messages(talk, talk.messages):
            # The template has no generation prompt: use everything that it writes before an answer.
            asked = [*talk.messages, {"role": "assistant", "content": f"{mark}x"}]
            text = MARK_PATTERN.sub("", self._render_messages(talk, asked).partition(mark)[0])
            stop = len(_strip_trailing_spaces(text))
        return text, kept, stop

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end token and the tokenizer's EOS."""
        mark = chr(FIRST_MARK)
        talk = Conversation([{"role": "user", "content": "x"}], [True])
        asked = [*talk.messages, {"role": "assistant", "content": f"x{mark}"}]
        try:
            tail = self._render_messages(talk, asked).partition(mark)[2]
        # Some templates require more than one question and one answer.
        except DataError:
            tail = ""
        found = self._special_pattern.search(tail)
        if found is None:
            own = []
        else:
            own = [self.tokenizer.special_token_ids[found[0]]]
        return frozenset([*own, self.tokenizer.eos_token_id])

    # ---- text ------------------------------------------------------------------------------

    def _render_messages(
        self,
        talk: Conversation,
        messages: Sequence[dict[str, Any]],
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> str:
        """The template's rendering of some messages of a conversation."""
        values = {"messages": [_with_reasoning(one) for one in messages], "tools": talk.tools}
        more = {"documents": None, "add_generation_prompt": prompt}
        rendering = self.template.select_template(talk.tools)
        # The variables of a request must not replace the messages or the tokens.
        known = {**talk.variables, **self.template.tokens, **values, **more}
        return rendering(known, at=talk.location, marks=marks)

    def _render_plain(
        self, talk: Conversation, *, prompt: bool = False
    ) -> tuple[str, list[CharSpan]]:
        """The text of a conversation, and spans where special tokens are plain text."""
        text = self._render_messages(talk, talk.messages, prompt=prompt)
        if not self.tokenizer.special_token_ids or not any(
            _has_match(self._special_pattern, x) for x in talk.messages
        ):
            return text, []
        # Render a second time with a guard before each special token, to find where the special
        # tokens of the messages appear in the text.
        guarded = [
            _map_texts(one, lambda x: self._special_pattern.sub(f"{GUARD}\\g<0>", x))
            for one in talk.messages
        ]
        marked = self._render_messages(talk, guarded, prompt=prompt)
        if marked.replace(GUARD, "") != text:
            raise DataError(
                f"{talk.location}: a message contains a special token "
                f"({', '.join(self._special_names(talk))}) that the chat template "
                f"{self.template.origin} searches for. In a message it must be plain text. Remove "
                "it from the record."
            )
        kept = []
        # Each guard before this one shifts the position by one character.
        for count, found in enumerate(re.finditer(GUARD, marked)):
            there = self._special_pattern.match(marked, found.end())
            if there is not None:
                kept.append((found.start() - count, found.start() - count + len(there[0])))
        return text, kept

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Matches any special token, the longest first."""
        names = sorted(self.tokenizer.special_token_ids, key=len, reverse=True)
        # `(?!)` never matches: a tokenizer may have no special tokens.
        return re.compile("|".join(map(re.escape, filter(None, names))) or "(?!)")

    def _special_names(self, talk: Conversation) -> list[str]:
        return sorted(
            {x for one in talk.messages for x in _find_matches(self._special_pattern, one)}
        )

    def _end_offset(self, tail: str) -> int:
        """End of the token that ends an answer, in the text after it; 0 if there is none."""
        found = list(self._special_pattern.finditer(tail))
        known = [
            one for one in found if self.tokenizer.special_token_ids[one[0]] in self.end_token_ids
        ]
        # A known end token first, else the first special token.
        return next((one.end() for one in (*known, *found)), 0)

    def _ends_with_special(self, text: str) -> bool:
        """Whether a text ends with a special token, ignoring whitespace."""
        found = list(self._special_pattern.finditer(text))
        return bool(found) and not text[found[-1].end() :].strip()

    # ---- answers ---------------------------------------------------------------------------

    def find_answers(self, talk: Conversation, text: str) -> tuple[list[CharSpan], int | None]:
        """Character spans of the answers to learn, and where to append an EOS, if needed."""
        if self.template.select_template(talk.tools).has_generation_blocks:
            return self._generation_spans(talk, text), None
        if not talk.assistant_turns:
            return [], None
        if len(talk.messages) > MOST_MESSAGES:
            raise DataError(
                f"{talk.location}: the conversation has {len(talk.messages)} messages. At most "
                f"{MOST_MESSAGES} are supported. Split it."
            )
        places = self._marked_places(talk, text)
        spans = []
        ended = True
        past = 0
        for number in talk.assistant_turns:
            place, marks = places.get(number, ((None, None), "texts"))
            begin, stop = self._answer_borders(talk, text, number, place, past)
            tail = self._text_after_message(talk, text, number, stop, marks)
            end = self._end_offset(tail)
            # `past` is the end of the answer; the next one cannot start before it.
            past = stop + (end or len(tail.rstrip()))
            ended = end > 0
            if talk.is_learned[number]:
                spans.append((begin, past))
        # An EOS is appended only after a learned answer that closes the conversation without one.
        last = talk.assistant_turns[-1] == len(talk.messages) - 1 and talk.is_learned[-1]
        return spans, None if ended or not last or text[past:].strip() else past

    def _generation_spans(self, talk: Conversation, text: str) -> list[CharSpan]:
        """Character spans of the generation blocks."""
        marked = self._render_messages(talk, talk.messages, marks=True)
        if MARK_PATTERN.sub("", marked) != text:
            raise self._answers_lost_error(
                talk, "its generation blocks change when they are marked"
            )
        spans = []
        opened = 0
        place = 0
        for piece in re.split(f"([{BEGIN_MARK}{END_MARK}])", marked):
            if piece == BEGIN_MARK:
                opened = place
            elif piece == END_MARK:
                spans.append((opened, place))
            else:
                place += len(piece)
        # Unlearned answers can only be skipped if blocks and assistant messages correspond.
        if len(spans) == len(talk.assistant_turns):
            spans = [
                x for x, i in zip(spans, talk.assistant_turns, strict=True) if talk.is_learned[i]
            ]
        return spans

    def _marked_places(self, talk: Conversation, text: str) -> dict[int, tuple[MarkPlace, str]]:
        """Start and end of the assistant's texts, as far as marks show them, and which marks."""
        starts = ("outer", "inner", "none")
        ends = ("outer", "inner")
        places: dict[int, tuple[MarkPlace, str]] = {}
        # Templates strip or test texts in different ways: try marks outside and inside of their
        # whitespace until one variant leaves the text unchanged.
        for marks, start, end in product(("empty", "texts", "names"), starts, ends):
            messages = list(talk.messages)
            for number in talk.assistant_turns:
                messages[number] = _mark_texts(messages[number], number, start, end, marks)
            try:
                marked = self._render_messages(talk, messages)
            # The template refuses this variant.
            except DataError:
                continue
            if MARK_PATTERN.sub("", marked) == text:
                # Places found by an earlier variant take precedence.
                places = {n: (x, marks) for n, x in _parse_marks(marked).items()} | places
            if len(places) == len(talk.assistant_turns):
                break
        return places

    def _answer_borders(
        self,
        talk: Conversation,
        text: str,
        number: int,
        mark: MarkPlace,
        past: int,
    ) -> CharSpan:
        """Start of an answer and end of its own text; past: end of the previous answer."""
        begin, stop = mark
        limit = stop if begin is None else begin
        if limit is not None and stop is not None and not past <= limit <= stop:
            raise self._answers_lost_error(talk, f"message {number} is out of order")
        if begin is None:
            # No mark before the text: render the conversation up to the answer instead.
            begin = self._prompt_end(talk, text, number, past)
            if begin is not None:
                return begin, self._message_end(talk, text, number, begin) if stop is None else stop
        if limit is not None and stop is not None and self._generation_prompt:
            # The generation prompt is not learned; the answer starts after it.
            header = text.rfind(self._generation_prompt, past, limit)
            if header >= 0:
                return header + len(self._generation_prompt), stop
            # Perhaps only a part of it is there: templates may add text that they later drop.
            if begin is None:
                begin = self._partial_prompt_end(text, past, limit)
        if begin is None or stop is None:
            raise self._answers_lost_error(talk, f"message {number} was not found")
        if not self._generation_prompt and self._adds_no_prompt(talk, number):
            # Same start as in `encode_prompt`, so that training and generation see the same prompt.
            begin = past + len(_strip_trailing_spaces(text[past:begin]))
        return begin, stop

    def _adds_no_prompt(self, talk: Conversation, number: int) -> bool:
        """Whether the template adds no generation prompt for an answer."""
        try:
            asked = [
                self._render_messages(talk, talk.messages[:number], prompt=x) for x in (True, False)
            ]
        # The template refuses a conversation that ends there, so a prompt cannot end there.
        except DataError:
            return False
        return asked[0] == asked[1]

    def _prompt_end(self, talk: Conversation, text: str, number: int, past: int) -> int | None:
        """End of the prompt for an answer, if the text starts with it."""
        before = self._render_messages(talk, talk.messages[:number], prompt=True)
        added = before != self._render_messages(talk, talk.messages[:number])
        good = added and text.startswith(before) and len(before) >= past
        if good:
            return len(before)
        return None

    def _message_end(self, talk: Conversation, text: str, number: int, begin: int) -> int:
        """End of a message's text without marks: before its last special token."""
        whole = self._render_messages(talk, talk.messages[: number + 1])
        if not text.startswith(whole):
            raise self._answers_lost_error(talk, f"the end of message {number} was not found")
        found = [one.start() for one in self._special_pattern.finditer(text, begin, len(whole))]
        if found:
            return found[-1]
        return begin + len(text[begin : len(whole)].rstrip())

    @cached_property
    def _generation_prompt(self) -> str:
        """The template's generation prompt; empty if it has none."""
        talk = Conversation([{"role": "user", "content": "x"}], [True])
        try:
            bare = self._render_messages(talk, talk.messages)
            full = self._render_messages(talk, talk.messages, prompt=True)
        except UnsafeInputError:
            raise
        # Some templates require more than one question.
        except DataError:
            return ""
        if full.startswith(bare):
            return full[len(bare) :]
        return ""

    def _partial_prompt_end(self, text: str, past: int, limit: int) -> int | None:
        """End of the longest prefix of the generation prompt within a range of the text."""
        # Prefixes of three or fewer characters would match by chance.
        for size in range(len(self._generation_prompt) - 1, 3, -1):
            place = text.rfind(self._generation_prompt[:size], past, limit)
            if place >= 0:
                return place + size
        return None

    def _text_after_message(
        self, talk: Conversation, text: str, number: int, stop: int, marks: str
    ) -> str:
        """The text that the template writes after a message's own text.

        marks: the kind of marks that showed where the text ends.
        """
        # Nothing follows the last message.
        if number == len(talk.messages) - 1:
            return text[stop:]
        mark = chr(LAST_MARK + number)
        before = talk.messages[:number]
        last = _mark_texts(talk.messages[number], number, "none", "outer", marks)
        try:
            marked = self._render_messages(talk, [*before, last])
            if mark in marked:
                tail = marked.rpartition(mark)[2]
            else:
                whole = self._render_messages(talk, talk.messages[: number + 1])
                if text.startswith(whole[:stop]):
                    tail = whole[stop:]
                else:
                    tail = ""
        # The template refuses a conversation that ends here.
        except DataError:
            found = self._special_pattern.search(text, stop)
            own = (
                found is not None
                and self.tokenizer.special_token_ids[found[0]] in self.end_token_ids
            )
            if found is not None and own:
                return text[stop : found.end()]
            return ""
        # Text that the template only writes at the end of a conversation is not in the full text.
        return _common_prefix(tail, text[stop:])

    def _answers_lost_error(self, talk: Conversation, what: str) -> DataError:
        return DataError(
            f"{talk.location}: the answers cannot be located in the output of the chat template "
            f"{self.template.origin}: {what}. Only answers are learned. Put {{% generation %}} and "
            "{% endgeneration %} around them in the template, or use data.loss_on=all."
        )

    # ---- tokens ----------------------------------------------------------------------------

    def _encode_with_offsets(
        self, text: str, kept: Sequence[CharSpan]
    ) -> tuple[list[int], list[CharSpan]]:
        """Ids of a text and their character spans; kept: special tokens that are plain text."""
        ids: list[int] = []
        places: list[CharSpan] = []
        for begin, end, special in _split_pieces(text, kept):
            some, at = self._encode_piece(text[begin:end], special=special, first=begin == 0)
            ids += some
            places += [(begin + a, begin + b) for a, b in at]
        return ids, places

    def _encode_piece(
        self, text: str, *, special: bool, first: bool
    ) -> tuple[list[int], list[CharSpan]]:
        """Encode a piece of a text; some tokenizers prepend a space to the start of any text."""
        if first:
            return self.tokenizer.encode_with_offsets(text, special=special)
        # Encode after a newline, which absorbs the added space, and drop its tokens again.
        newline, _ = self.tokenizer.encode_with_offsets("\n", special=special)
        ids, at = self.tokenizer.encode_with_offsets("\n" + text, special=special)
        # The newline was merged with the text, so its tokens cannot be dropped.
        if ids[: len(newline)] != newline:
            return self.tokenizer.encode_with_offsets(text, special=special)
        count = len(newline)
        return ids[count:], [(max(a - 1, 0), b - 1) for a, b in at[count:]]


def _strip_trailing_spaces(text: str) -> str:
    """Strip spaces at the end of a prompt: they belong to the token of the next word."""
    return text.rstrip(" ")


def _common_prefix(a: str, b: str) -> str:
    """The longest common prefix."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(differ, min(len(a), len(b)))]


def _split_pieces(text: str, kept: Sequence[CharSpan]) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each piece of a text, and whether its special tokens are special."""
    place = 0
    for begin, end in kept:
        if begin > place:
            yield place, begin, True
        yield begin, end, False
        place = end
    if place < len(text) or not kept:
        yield place, len(text), True


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has the keys that templates look for."""
    found = next((message[x] for x in REASONING_KEYS if message.get(x) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, REASONING_KEYS[0]: found}


def _map_texts(value: Any, change: Any, *, skip: Sequence[str] = ("role",)) -> Any:
    """A JSON value with its strings mapped; skip: keys whose values stay unchanged."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k in skip else _map_texts(v, change, skip=skip) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_texts(one, change, skip=skip) for one in value]
    return value


def _find_matches(pattern: re.Pattern[str], value: Any) -> list[str]:
    found: list[str] = []

    def look(text: str) -> str:
        found.extend(pattern.findall(text))
        return text

    _map_texts(value, look)
    return found


def _has_match(pattern: re.Pattern[str], value: Any) -> bool:
    return bool(_find_matches(pattern, value))


def _mark_texts(
    message: dict[str, Any], number: int, start: str, end: str, marks: str
) -> dict[str, Any]:
    """A message with marks around its texts: at their borders, or inside of their whitespace.

    marks: `texts`: non-empty texts; `empty`: empty ones too, which makes them truthy for a
    template; `names`: also names of called tools, for calls without any text.
    """
    first = chr(FIRST_MARK + number)
    last = chr(LAST_MARK + number)

    def around(text: str) -> str:
        if not text and marks != "empty":
            return text
        if start == "inner":
            left = len(text) - len(text.lstrip())
        else:
            left = 0
        if end == "inner":
            right = len(text.rstrip())
        else:
            right = len(text)
        right = max(left, right)
        head = "" if start == "none" else first
        return f"{text[:left]}{head}{text[left:right]}{last}{text[right:]}"

    # Templates compare these values; a mark would change their behavior.
    skip = ("role", "type", "id", *(() if marks == "names" else ("name",)))
    return {**message, **_map_texts(message, around, skip=skip)}


def _parse_marks(marked: str) -> dict[int, MarkPlace]:
    """First mark before and last mark after the texts of each message, as offsets without marks."""
    found: dict[int, MarkPlace] = {}
    place = 0
    for piece in re.split("([\ud800-\udfff])", marked):
        code = ord(piece) if len(piece) == 1 else 0
        if FIRST_MARK <= code < FIRST_MARK + MOST_MESSAGES:
            number = code - FIRST_MARK
            begin, end = found.get(number, (None, None))
            found[number] = (place if begin is None else begin, end)
        elif LAST_MARK <= code < LAST_MARK + MOST_MESSAGES:
            number = code - LAST_MARK
            found[number] = (found.get(number, (None, None))[0], place)
        else:
            place += len(piece)
    return found
