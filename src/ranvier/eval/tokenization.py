"""Words: texts to tokens and back, as others do it with the tokenizer of a model.

Unlike in training, the tokenizer's own rules hold: it may begin a text with a token of its own, and
special tokens that are spelt out are special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.data.sources import import_optional
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.data.tokenizer_config import read_special_tokens
from ranvier.errors import DataError


@dataclass
class EvalTokenizer:
    """A tokenizer with what its config says of it."""

    run_tokenizer: Tokenizer
    hf_tokenizer: Any
    eos_token_id: int
    """The token that ends a text."""
    prefix_token_id: int
    """The token before a text that nothing else is before."""

    @classmethod
    def from_run(cls, folder: Path) -> EvalTokenizer:
        """Those of a run: its tokenizer.json, and what lies beside it."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"{folder} has no tokenizer.json: its corpora came as tokens. Evaluation needs the "
                f"tokenizer that made them. Copy its tokenizer.json to {path}."
            )
        tokenizer = load_tokenizer(path, folder)
        library = import_optional("tokenizers", "evaluation").Tokenizer.from_str(
            tokenizer.json_text
        )
        library.no_truncation()
        library.no_padding()
        end = tokenizer.eos_token_id
        first = library.token_to_id(read_special_tokens(folder).get("bos_token", ""))
        return cls(tokenizer, library, end, end if first is None else first)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; special: with those that the tokenizer adds itself."""
        ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""
        text: str = self.hf_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_name(self, token: int) -> str:
        """How a token is spelt."""
        return str(self.hf_tokenizer.id_to_token(token))

    def decode_until_stop(self, said: Sequence[int], stops: Sequence[str]) -> str:
        """The text of tokens up to the end, or to what stops it."""
        text = self.decode(said)
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text

    def make_stop_check(self, stops: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Whether the last of the tokens that were said ends the text."""
        stops = [stop for stop in stops if stop]
        # a token has one byte at least, and the first of them may be of a character before
        most = max((len(stop.encode()) for stop in stops), default=0) + 4

        def ended(said: Sequence[int]) -> bool:
            if said[-1] == self.eos_token_id:
                return True
            if stops:
                tail = self.decode(said[-most:])
            else:
                tail = ""
            return any(stop in tail for stop in stops)

        return ended
