"""Streamed text is the text of decoding all tokens, whatever the tokenizer and the pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.data.tokenizer import ByteTokenizer, Tokenizer, parse_tokenizer, train_tokenizer
from ranvier.infer.detokenizer import IncrementalDetokenizer, StopStringMatcher
from ranvier.infer.sampling_params import SamplingParams

TEXT = "The quick brown fox jumps. Größe 12 €, naïve café; 你好世界 👩‍👩‍👧 😀😀 a\ufffdb\n\n  end."
OUT_OF_VOCAB = 10**6
EXAMPLES = 40


@cache
def byte_level() -> Tokenizer:
    return train_tokenizer([TEXT] * 3 + ["hello world, hello fox"] * 5, 330)


def sentence_piece(decoder: Any) -> Tokenizer:
    """A tokenizer with byte fallback and metaspaces."""
    words = ["▁", "▁the", "▁fox", "▁a", "fox", "é", "€", "a", "b", "o", "th", "e", "▁▁", "."]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{i:02X}>", -20.0) for i in range(256)]
    pieces += [(word, -float(i + 1)) for i, word in enumerate(words)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, True))
    made.add_special_tokens(["<s>", "</s>"])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = decoder
    return parse_tokenizer(made.to_str(), "sentence_piece")


@cache
def llama() -> Tokenizer:
    decoders = tokenizers.decoders
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentence_piece(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


@cache
def metaspace() -> Tokenizer:
    return sentence_piece(tokenizers.decoders.Metaspace())


@cache
def word_piece() -> Tokenizer:
    words = ["[UNK]", "</s>", "the", "fox", "##es", "##é", ".", "n't", "do", "not"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.add_special_tokens(["</s>"])
    made.decoder = tokenizers.decoders.WordPiece()
    return parse_tokenizer(made.to_str(), "word_piece")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "byte level": byte_level,
    "llama": llama,
    "metaspace": metaspace,
    "word piece": word_piece,
}


def whole_text(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True
) -> str:
    """The text of decoding everything, from where that of the prompt ends."""
    decode = tokenizer.decode if skip else tokenizer.decode_with_specials
    text = decode([*prompt, *output])
    known = decode(prompt)
    while not text.startswith(known):
        known = known[:-1]
    return text[len(known) :]


def stopped_text(text: str, stop: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that ends first, and the string."""
    ends = [
        (end, -len(one), one)
        for one in stop
        for end in range(len(one), len(text) + 1)
        if text[:end].endswith(one)
    ]
    if not ends:
        return text, None
    end, _, one = min(ends)
    return text[: end if include else end - len(one)], one


def stream(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    groups: Iterable[Sequence[int]],
    **params: Any,
) -> tuple[list[str], IncrementalDetokenizer]:
    """The pieces of text after each group of tokens and at the end."""
    made = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(**params))
    pieces = [made.append(group) for group in groups]
    pieces.append(made.finish())
    assert made.text == "".join(pieces)
    return pieces, made


@cache
def token_lists(name: str, max_size: int) -> st.SearchStrategy[list[int]]:
    """Random tokens: text, garbage, special tokens, tokens out of the vocabulary."""
    tokenizer = TOKENIZERS[name]()
    encoded = [int(i) for i in tokenizer.encode([TEXT])[0]]
    some = st.sampled_from([*sorted(tokenizer.token_names), OUT_OF_VOCAB, tokenizer.eos_token_id])
    parts = st.one_of(
        some.map(lambda token: [token]),
        st.tuples(some, st.integers(1, 20)).map(lambda one: [one[0]] * one[1]),
        st.tuples(st.integers(0, len(encoded)), st.integers(0, 12)).map(
            lambda at: encoded[at[0] : at[0] + at[1]]
        ),
    )
    return st.lists(parts, max_size=8).map(lambda found: [*chain(*found)][:max_size])


def into_groups(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive groups of tokens of the given sizes, repeated."""
    groups: list[list[int]] = []
    start = 0
    while start < len(tokens):
        size = sizes[len(groups) % len(sizes)]
        groups.append(tokens[start : start + size])
        start += size
    return groups


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans(), sizes=SIZES)
def test_streamed_text_is_the_whole_text(
    name: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = data.draw(token_lists(name, 20))
    output = data.draw(token_lists(name, 60))
    pieces, made = stream(tokenizer, prompt, into_groups(output, sizes), skip_special_tokens=skip)
    assert "".join(pieces) == whole_text(tokenizer, prompt, output, skip=skip)
    assert made.num_tokens == len(output) == len(made.text_offsets)
    assert made.text_offsets == sorted(made.text_offsets)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=EXAMPLES)
@given(
    data=st.data(),
    sizes=SIZES,
    include=st.booleans(),
)
def test_no_part_of_a_stop_string_is_sent(
    name: str, data: st.DataObject, sizes: list[int], include: bool
) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = data.draw(token_lists(name, 10))
    output = data.draw(token_lists(name, 40))
    text = whole_text(tokenizer, prompt, output)
    # Parts of the text, near misses, and any others.
    index = st.integers(0, max(len(text) - 1, 0))
    parts = st.tuples(index, st.integers(1, 5)).map(lambda at: text[at[0] : at[0] + at[1]])
    near = parts.map(lambda one: one + "x")
    stop = data.draw(st.lists(parts | near | st.text("aeo ox\ufffd", max_size=3), max_size=3))
    stop = [one for one in stop if one]
    pieces, made = stream(
        tokenizer,
        prompt,
        into_groups(output, sizes),
        stop=tuple(stop),
        include_stop_str_in_output=include,
    )
    assert ("".join(pieces), made.stop_string) == stopped_text(text, stop, include=include)


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5)),
    size=st.integers(1, 4),
)
def test_the_matcher_finds_what_ends_first(text: str, stop: list[str], size: int) -> None:
    matcher = StopStringMatcher(stop)
    wanted, one = stopped_text(text, stop, include=True)
    for start in range(0, len(text), size):
        found = matcher.find(text[start : start + size])
        if found is not None:
            assert (text[: start + found[0]], found[1]) == (wanted, one)
            return
        known = text[: start + size]
        held = max(
            (n for one in stop for n in range(len(one)) if known.endswith(one[:n])), default=0
        )
        assert matcher.num_matched == held
    assert one is None


def every_split(text: str, vocab: dict[bytes, int]) -> st.SearchStrategy[list[int]]:
    """All ways to write a text with the tokens of a vocabulary, also through characters."""
    raw = text.encode()

    @st.composite
    def tokens(draw: Any) -> list[int]:
        found, at = [], 0
        while at < len(raw):
            ends = [end for end in range(at + 1, len(raw) + 1) if raw[at:end] in vocab]
            end = draw(st.sampled_from(ends))
            found.append(vocab[raw[at:end]])
            at = end
        return found

    return tokens()


def vocab_of_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Tokens of a byte-level tokenizer by their bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    letters = {chr(i): i for i in printable} | {chr(256 + n): i for n, i in enumerate(others)}
    return {
        bytes(letters[letter] for letter in name): i
        for i, name in tokenizer.token_names.items()
        if i not in tokenizer.special_token_ids.values()
    }


@settings(max_examples=100)
@given(data=st.data())
def test_every_split_of_characters_and_stop_strings_gives_the_same_text(
    data: st.DataObject,
) -> None:
    tokenizer = byte_level()
    text = "hello 你好 😀 fox.\n\nhello"
    tokens = data.draw(every_split(text, vocab_of_bytes(tokenizer)))
    pieces, _ = stream(tokenizer, [], [[token] for token in tokens])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    for stop, wanted in (("好 😀", "hello 你"), ("\n\n", "hello 你好 😀 fox."), ("lo", "hel")):
        pieces, made = stream(tokenizer, [], [[token] for token in tokens], stop=(stop,))
        assert ("".join(pieces), made.stop_string) == (wanted, stop)


def test_text_comes_as_soon_as_it_is_stable() -> None:
    tokens = list("a€b".encode())
    pieces, made = stream(ByteTokenizer(), [], [[token] for token in tokens], stop=("bc",))
    assert pieces == ["a", "", "", "€", "", "b"]
    assert made.text_offsets == [0, 1, 1, 1, 2]
    names = {name: i for i, name in llama().token_names.items()}
    tokens = [names[one] for one in ("▁the", "<0xE2>", "<0x82>", "<0xAC>", "▁fox", "<0xE2>")]
    pieces, _ = stream(llama(), [names["▁a"]], [[token] for token in tokens])
    assert pieces == [" the", "", "", "", "€ fox", "", "\ufffd"]


def test_a_character_may_begin_in_the_prompt() -> None:
    first, *rest = "€".encode()
    assert stream(ByteTokenizer(), [97, first], [rest, [98]])[0] == ["€", "b", ""]
    # One that never ends belongs to the prompt.
    assert stream(ByteTokenizer(), [97, first], [[98]])[0] == ["b", ""]
    replacement = [int(i) for i in ByteTokenizer().encode(["a\ufffd"])[0]]
    assert stream(ByteTokenizer(), replacement, [[98]])[0] == ["b", ""]


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = list(b"abxabxabx")
    for min_tokens, wanted in ((0, "a"), (3, "a"), (4, "abxa"), (6, "abxa"), (7, "abxabxa")):
        pieces, made = stream(
            ByteTokenizer(), [], [[token] for token in tokens], stop=("bx",), min_tokens=min_tokens
        )
        assert "".join(pieces) == wanted
        assert made.num_tokens == len(wanted) + 2
    # One that overlaps an ignored one counts, and one that begins before and ends after.
    pieces, _ = stream(ByteTokenizer(), [], [b"aaab"], stop=("aa",), min_tokens=3)
    assert "".join(pieces) == "a"
    pieces, _ = stream(ByteTokenizer(), [], [tokens], stop=("xab",), min_tokens=4)
    assert "".join(pieces) == "ab"


def test_tokens_after_a_stop_string_are_not_read() -> None:
    made = IncrementalDetokenizer(ByteTokenizer(), [], SamplingParams(stop=("b",)))
    assert made.append(b"abcd") == "a"
    assert (made.num_tokens, made.stop_string) == (2, "b")
    assert made.append(b"e") == "" and made.finish() == ""
    assert made.num_tokens == 2


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_left_out(include: bool) -> None:
    params = SamplingParams(include_stop_str_in_output=include)
    made = IncrementalDetokenizer(ByteTokenizer(), [], params)
    text = made.append(b"ab", stop_token=98) + made.finish()
    assert text == ("ab" if include else "a")
    assert made.num_tokens == 2 and made.text_offsets == [0, 1]


def test_special_tokens_are_text_if_not_skipped() -> None:
    end = byte_level().eos_token_id
    hello = [int(i) for i in byte_level().encode(["hello"])[0]]
    tokens = [*hello, end, *hello]
    assert "".join(stream(byte_level(), [], [tokens])[0]) == "hellohello"
    pieces, _ = stream(byte_level(), [], [tokens], skip_special_tokens=False)
    assert "".join(pieces) == "hello<|end|>hello"


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are decoded."""

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        object.__setattr__(self, "num_decoded", getattr(self, "num_decoded", 0) + len(tokens))
        return super().decode(tokens)


@pytest.mark.parametrize("kind", ["text", "garbage", "bytes", "broken bytes"])
def test_the_work_per_token_is_bounded(kind: str) -> None:
    names = {name: i for i, name in llama().token_names.items()}
    tokenizer, tokens = {
        "text": (byte_level(), [int(i) for i in byte_level().encode([TEXT * 20])[0]]),
        "garbage": (byte_level(), [vocab_of_bytes(byte_level())[b"\xff"]] * 2000),
        "bytes": (llama(), [names[f"<0x{i:02X}>"] for i in "😀".encode()] * 500),
        "broken bytes": (llama(), [names["<0xE2>"], names["▁a"]] * 1000),
    }[kind]
    counting = CountingTokenizer(tokenizer.json_text, tokenizer.vocab_size, tokenizer.eos_token_id)
    prompt = tokens * 5
    pieces, _ = stream(counting, prompt, [[token] for token in tokens])
    assert "".join(pieces) == whole_text(tokenizer, prompt, tokens)
    # 8 to 16 for each token, and what ends with the last.
    assert counting.__dict__["num_decoded"] < 30 * len(tokens)


class CapitalsTokenizer(ByteTokenizer):
    """Writes capitals between brackets, so that its decoder looks at all tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        plain = super().decode(ids)
        parts = plain.split("[")
        return parts[0] + "".join(
            "[" + part.partition("]")[0].upper() + "]" * ("]" in part) + part.partition("]")[2]
            for part in parts[1:]
        )


def test_a_window_that_changes_the_text_is_not_used() -> None:
    output = list(b"ab[" + b"cdefghijkl" * 8 + b"]mnopqrstuvwxyz" * 3)
    pieces, _ = stream(CapitalsTokenizer(), [], [[token] for token in output])
    assert "".join(pieces) == whole_text(CapitalsTokenizer(), [], output)
