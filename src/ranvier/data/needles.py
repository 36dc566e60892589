"""Needles in a haystack: short facts hidden in a long text, which a model has to recall at its end.

A needle is a sentence with a key and a value, such as "The magic number of amber falcon is 48213.".
It is planted into a text at some depth: the fraction of the text before it. The question is the
same sentence up to the value, after the text, and the answer is the value:

    text ... needle ... text, question -> value

Everything is built from token ids, so that lengths are exact and the prompts of an evaluation look
like the documents that a model was trained on. Needles are on lines of their own, where possible
between two lines of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ranvier.data.corpus import Corpus
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, PlanError

Ints = NDArray[np.int64]

DEFAULT_NEEDLE = "The magic number of {key} is {value}."
KEY, VALUE = "{key}", "{value}"
VALUE_DIGITS = 5
"""Digits of a value: a guess is right in one of 90,000 cases."""
MAX_HAYSTACK_TOKENS = 1 << 24
"""Tokens of a haystack that are held in memory."""
SPARE_TOKENS = 4
"""Tokens that an answer may have in addition to those of the value."""
ADJECTIVES = (
    "amber azure black bold brave brief bright broad calm clear cold crimson deep dry early "
    "empty faint fair fast fierce fine firm flat free fresh gentle golden grand gray green happy "
    "hard high hollow huge icy iron keen large late lean light little lone long loud low lucky "
    "mild narrow new noble old pale plain proud quick quiet rare red rough royal sharp short "
    "silent silver slow small smooth soft solid steep still strong sweet swift tall thin tiny "
    "warm white wide wild wise young"
)
"""First words of keys."""
NOUNS = (
    "anchor apple arrow badger barn basket beacon bell bird boat bridge brook bucket candle "
    "canyon castle cloud comet copper coral crane creek crown desert dragon drum eagle ember "
    "falcon feather fern field flame forest fountain fox garden glacier goose hammer harbor hawk "
    "hill horse island jacket kettle lake lantern leaf lion maple marble meadow mirror moon "
    "mountain needle oak ocean orchard otter owl paper pebble pine planet pond rabbit raven "
    "ribbon river rocket rose sail shadow shell sparrow spruce star stone storm summit swan "
    "temple thunder tiger tower turtle valley violin wagon whale willow window wolf"
)
"""Second words of keys."""
NUM_KEYS = len(ADJECTIVES.split()) * len(NOUNS.split())


@dataclass(frozen=True)
class NeedleTemplate:
    """The sentence of a needle with places for its key and its value."""

    text: str = DEFAULT_NEEDLE

    def find_problem(self) -> str:
        """Returns what is wrong with the sentence; empty if nothing is."""
        text = self.text
        counts = [text.count(KEY), text.count(VALUE)]
        if counts != [1, 1] or text.index(KEY) > text.index(VALUE) or "\n" in text:
            return (
                f"needle={text!r} has {KEY} {counts[0]} times and {VALUE} {counts[1]} times. A "
                f"needle is one line with {KEY}, then {VALUE}, each once. Use "
                f"{DEFAULT_NEEDLE!r}."
            )
        if self.end_text[:1].isdigit():
            return (
                f"needle={text!r} has a digit after {VALUE}. The value is a number, so its end "
                f"would be unknown. Use {DEFAULT_NEEDLE!r}."
            )
        return ""

    def render(self, key: str, value: str) -> str:
        """Returns the needle of a key and a value."""
        return self.text.replace(VALUE, value).replace(KEY, key)

    def render_question(self, key: str) -> str:
        """Returns the needle up to the value, without the space before it."""
        return self.text.partition(VALUE)[0].replace(KEY, key).rstrip(" ")

    @property
    def end_text(self) -> str:
        """What follows the value; empty if it is the end of the line."""
        return self.text.partition(VALUE)[2]

    def is_answer(self, answer: str, value: str) -> bool:
        """Whether a generated text begins with the value, and with nothing but it."""
        text = answer.lstrip(" ")
        return text.startswith(value) and not text[len(value) : len(value) + 1].isdigit()


@dataclass(frozen=True)
class Needle:
    """A fact that is hidden in a text."""

    key: str
    value: str


@dataclass(frozen=True)
class NeedlePrompt:
    """A text with needles, and a question about one of them."""

    tokens: Ints
    needle: Needle
    length: int
    """Tokens of prompt and answer together."""
    depth: float
    """Fraction of the text before the needle."""


@dataclass(frozen=True, eq=False)
class Haystack:
    """Tokens of the text that needles are hidden in, without end tokens."""

    tokens: Ints
    line_ends: NDArray[np.bool_]
    """Whether each token is the last of a line."""

    @classmethod
    def empty(cls) -> Haystack:
        """A haystack without text, for the sizes of needles."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.bool_))

    @classmethod
    def from_corpora(cls, corpora: Sequence[Corpus], tokenizer: Tokenizer) -> Haystack:
        """Reads the documents of corpora one after the other, up to `MAX_HAYSTACK_TOKENS`."""
        parts = []
        room = MAX_HAYSTACK_TOKENS
        for corpus in corpora:
            total = int(corpus.document_lengths.sum())
            parts.append(corpus.read_tokens(np.arange(min(total, room))))
            room -= len(parts[-1])
        tokens = np.concatenate([np.zeros(0, np.int64), *parts])
        tokens = tokens[tokens != tokenizer.eos_token_id]
        if not len(tokens):
            names = ", ".join(corpus.manifest.source for corpus in corpora)
            raise DataError(
                f"{names} has no tokens. Needles are hidden in a text. Use another --haystack, "
                "such as stdlib."
            )
        known, owners = np.unique(tokens, return_inverse=True)
        ends = np.array([tokenizer.decode([token]).endswith("\n") for token in known])
        return cls(tokens, ends[owners])

    def read(self, start: int, count: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Returns tokens and line ends from a place on; a short text is repeated."""
        places = np.arange(start, start + count) % len(self.tokens)
        return self.tokens[places], self.line_ends[places]


@dataclass(frozen=True)
class NeedleBuilder:
    """Builds prompts and training documents with needles."""

    template: NeedleTemplate
    tokenizer: Tokenizer
    haystack: Haystack
    prefix: tuple[int, ...] = ()
    """Tokens that the tokenizer puts before a text, such as the begin-of-text token."""

    def build_prompt(
        self, length: int, depth: float, *, distractors: int, draw: np.random.Generator
    ) -> NeedlePrompt:
        """Returns a prompt that fills `length` tokens together with its answer.

        distractors: number of other needles, at random depths.
        """
        needles = draw_needles(1 + distractors, draw)
        depths = [depth, *draw.random(distractors).tolist()]
        question = self.encode_line(self.template.render_question(needles[0].key))
        room = length - self.answer_tokens - len(question) - len(self.prefix)
        text = self._plant(self.encode_needles(needles), depths, room, draw)
        tokens = np.concatenate([np.array(self.prefix, np.int64), text, question])
        return NeedlePrompt(tokens, needles[0], length, depth)

    def build_document(self, length: int, max_needles: int, draw: np.random.Generator) -> Ints:
        """Returns a document of `length` tokens that repeats its needles at its end, and ends.

        The number of needles is drawn from 1 to `max_needles`, small numbers more often.
        """
        count = int(np.exp(draw.uniform(0.0, np.log(max_needles + 1))))
        needles = draw_needles(min(max(count, 1), max_needles), draw)
        lines = self.encode_needles(needles)
        again = [lines[i] for i in draw.permutation(len(lines))]
        asked = np.concatenate([*again, np.array([self.tokenizer.eos_token_id])])
        depths = draw.random(len(lines)).tolist()
        return np.concatenate([self._plant(lines, depths, length - len(asked), draw), asked])

    def encode_line(self, text: str) -> Ints:
        """Returns the tokens of a line that begins here, with the line break before it."""
        return self.tokenizer.encode([f"\n{text}"])[0].astype(np.int64)

    def encode_needles(self, needles: Sequence[Needle]) -> list[Ints]:
        """Returns the tokens of each needle, with the line break before it."""
        texts = [f"\n{self.template.render(one.key, one.value)}" for one in needles]
        return [ids.astype(np.int64) for ids in self.tokenizer.encode(texts)]

    @cached_property
    def line_break(self) -> Ints:
        """Tokens of a line break."""
        return self.encode_line("")

    @cached_property
    def needle_tokens(self) -> int:
        """Tokens of a needle: those of the longest of some needles, and a few more."""
        some = draw_needles(64, np.random.default_rng(0))
        return max(map(len, self.encode_needles(some))) + SPARE_TOKENS

    @cached_property
    def answer_tokens(self) -> int:
        """Tokens to generate: those of the longest of some values, and a few more."""
        some = draw_needles(64, np.random.default_rng(0))
        sizes = [
            len(line) - len(self.encode_line(self.template.render_question(one.key)))
            for one, line in zip(some, self.encode_needles(some), strict=True)
        ]
        return max(sizes) + SPARE_TOKENS

    def min_length(self, num_needles: int, num_questions: int) -> int:
        """Returns the smallest length of a text with this many needles and questions."""
        # A line break ends each needle.
        planted = num_needles * (self.needle_tokens + len(self.line_break))
        asked = num_questions * self.needle_tokens
        return planted + asked + self.answer_tokens + len(self.prefix) + 1

    def max_needles(self, length: int) -> int:
        """Returns how many needles, each with its question, take half of a document; at least 1."""
        size = 2 * self.needle_tokens + len(self.line_break)
        return min(max(length // 2 // size, 1), NUM_KEYS)

    def _plant(
        self,
        lines: Sequence[Ints],
        depths: Sequence[float],
        room: int,
        draw: np.random.Generator,
    ) -> Ints:
        """Returns a random part of the haystack with needles at depths; `room` tokens in all."""
        planted = [np.concatenate([line, self.line_break]) for line in lines]
        count = room - sum(map(len, planted))
        assert count >= 0, f"{len(lines)} needles do not fit into {room} tokens"
        text, line_ends = self.haystack.read(int(draw.integers(len(self.haystack.tokens))), count)
        breaks = np.flatnonzero(line_ends) + 1
        places = [nearest_break(depth, count, breaks) for depth in depths]
        order = np.argsort(places, kind="stable").tolist()
        parts = []
        start = 0
        for i in order:
            parts += [text[start : places[i]], planted[i]]
            start = places[i]
        return np.concatenate([*parts, text[start:]])


def nearest_break(depth: float, count: int, breaks: Ints) -> int:
    """Returns the place of a depth in a text of `count` tokens, moved to the nearest line break.

    The first and the last place are never moved, and no place by more than 1/20 of the text.
    """
    place = round(depth * count)
    if place in (0, count) or not len(breaks):
        return place
    after = int(np.searchsorted(breaks, place))
    near = breaks[max(after - 1, 0) : after + 1]
    best = int(near[np.argmin(np.abs(near - place))])
    if abs(best - place) <= count // 20:
        return best
    return place


def draw_needles(count: int, draw: np.random.Generator) -> list[Needle]:
    """Returns needles with different keys; values have `VALUE_DIGITS` digits."""
    assert count <= NUM_KEYS, f"{count} needles, but there are {NUM_KEYS} keys"
    first = ADJECTIVES.split()
    second = NOUNS.split()
    pairs = draw.choice(NUM_KEYS, count, replace=False).tolist()
    values = draw.integers(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS, count).tolist()
    return [
        Needle(f"{first[pair % len(first)]} {second[pair // len(first)]}", str(value))
        for pair, value in zip(pairs, values, strict=True)
    ]


def build_training_documents(
    builder: NeedleBuilder, lengths: Sequence[int], *, tokens: int, max_needles: int, seed: int
) -> Iterator[Ints]:
    """Yields documents with needles, about `tokens` tokens in all, the longest first.

    Each length gets the same number of tokens. Lengths divide the largest, so that samples of this
    many tokens contain whole documents, also if some documents are held out.

    max_needles: per document; 0 means as many as take half of its tokens.
    """
    longest = max(lengths)
    windows = max(tokens // (longest * len(lengths)), 1)
    for number, length in enumerate(sorted(lengths, reverse=True)):
        draw = np.random.default_rng([seed, number])
        most = max_needles or builder.max_needles(length)
        for _ in range(windows * (longest // length)):
            yield builder.build_document(length, most, draw)


def check_training_lengths(
    builder: NeedleBuilder, lengths: Sequence[int], max_needles: int
) -> None:
    """Raises if documents of these lengths cannot be built."""
    problems = []
    longest = max(lengths)
    for length in lengths:
        most = max_needles or builder.max_needles(length)
        least = builder.min_length(most, most)
        if length < least:
            problems.append(describe_short_length(length, least, most))
        elif longest % length:
            near = max(size for size in range(1, length) if longest % size == 0)
            problems.append(
                f"lengths={length} does not divide {longest}, the largest. Samples of that many "
                f"tokens must contain whole documents. Use {near}."
            )
    if problems:
        raise PlanError(problems)


def describe_short_length(length: int, least: int, num_needles: int) -> str:
    """Returns the error message for a window that is too short for its needles."""
    if num_needles == 1:
        what = "a needle and its question"
    else:
        what = f"{num_needles} needles and their questions"
    return (
        f"lengths={length} is too short: {what} need {least} tokens with this tokenizer. They must "
        f"fit into the window. Use --lengths {least} or more, or a shorter --needle."
    )
