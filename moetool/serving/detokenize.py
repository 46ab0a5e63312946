"""Incremental detokenization and stop strings.

Both release text as early as it is certain and never revoke it. Each push to stop strings compares every start in the
held text (at most 1,024 characters, and the new ones) with up to four stop strings.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import decoders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""Replacement character of a decoder; at the end of a text it may be an incomplete character."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_PATIENCE = 64
"""Tokens after which a text that still ends in U+FFFD is released (only for tokenizers of unknown kind)."""


class Detokenizer(ABC):
    """Incremental text of one sequence of tokens.

    All texts of `push` and `finish`, joined, are the tokenizer's own decoding of the whole sequence.
    """

    @abstractmethod
    def push(self, token: int) -> str:
        """Return the text that this token makes certain; never an incomplete character."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text held back."""


class Vocabulary:
    """Bytes and text of a tokenizer's tokens, shared by all requests."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {id for id, token in added if token.special}
        """Tokens that have no text in an answer."""
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_level = isinstance(decoder, decoders.ByteLevel)
        self.token_bytes: Callable[[int], bytes] = cache(self._read_bytes)
        """The bytes of a token by itself."""

    def detokenizer(self, hidden: Collection[int] | None = None) -> Detokenizer:
        """Return a detokenizer for one sequence.

        Args:
            hidden: tokens without text in the answer (default: the special ones).
        """
        hidden = self.special if hidden is None else hidden
        if self._byte_level:
            return _ByteStream(self.token_bytes, hidden)
        return _Window(self._tokenizer.convert_ids_to_tokens, self._decode, hidden)

    def shown(self, token: int) -> str:
        """Return a single token as OpenAI prints it: bytes that form no character become `bytes:\\xe4\\xbd`."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _read_bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # a padding row of the embedding matrix
            return b""
        if self._byte_level:
            # Added tokens are plain text; the others use the byte-level alphabet.
            known = all(char in _BYTE_OF_CHAR for char in name)
            return bytes(_BYTE_OF_CHAR[char] for char in name) if known else name.encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("\u2581", " ").encode()

    def _decode(self, tokens: list[int]) -> str:
        # "Clean-up" would take back spaces that are already with the client.
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes: printable bytes as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


class _ByteStream(Detokenizer):
    """Byte-level BPE: the text is the UTF-8 decoding of the tokens' bytes, one after another."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return "" if token in self._hidden else self._utf8.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window(Detokenizer):
    """Any other tokenizer: decode a few tokens of context and the new ones, and release the added text.

    Decoders treat the beginning of a sequence specially (SentencePiece drops its space), hence the context.
    Byte tokens (`<0xE4>`) wait for the next token of another kind: one invalid byte makes the decoder replace
    its whole run, the valid characters in it too.
    """

    def __init__(
        self, name_of: Callable[[int], str | None], decode: Callable[[list[int]], str], hidden: Collection[int]
    ) -> None:
        self._name_of = name_of
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []
        self._num_context = 0  # leading tokens of the window whose text is released
        self._num_given = 0  # length of that text

    def push(self, token: int) -> str:
        # A token without a name is a padding row of the embedding matrix: neither text nor context.
        if token in self._hidden or not (name := self._name_of(token)):
            return ""
        self._window.append(token)
        return "" if _BYTE_TOKEN.fullmatch(name) else self._release(patience=_PATIENCE)

    def finish(self) -> str:
        return self._release(patience=0)

    def _release(self, patience: int) -> str:
        fresh = self._window[self._num_context :]
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(fresh) < patience:
            return ""
        added = text[self._num_given :]
        self._window = fresh
        self._num_context = len(fresh)
        self._num_given = len(self._decode(fresh))
        return added


class StopStrings:
    """Cuts a text before its leftmost stop string, and holds back a possible beginning of one.

    Attributes:
        matched: the stop string that was found; all text before it is released, and none after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can no longer be part of a stop string."""
        return self._release(text, last=False)

    def finish(self) -> str:
        """Return the remaining text, cut at a complete stop string."""
        return self._release("", last=True)

    def _release(self, text: str, *, last: bool) -> str:
        if self.matched:
            return ""
        self._held += text
        cut = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=len(self._held))
        end = cut if last else self._undecided(cut)
        given, self._held = self._held[:end], self._held[end:]
        if end == cut and self._held:
            self.matched = next(stop for stop in self._stops if self._held.startswith(stop))
        return given

    def _undecided(self, cut: int) -> int:
        """Return the start of the first stop string before `cut` that may still become complete, else `cut`."""
        starts = range(max(0, len(self._held) - self._longest + 1), cut)
        return next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._stops)), cut)
