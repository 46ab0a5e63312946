"""Answers that follow a JSON schema, by the grammar library llguidance (extra `grammar`)."""

import json
import threading
from functools import lru_cache
from typing import Any

from moetool.request import EngineLike, Grammar
from moetool.serving.http_errors import Refusal
from moetool.serving.request_schema import Tool

_MOST_BLANKS = 8
"""Limit of consecutive white-space tokens: without it a weak model fills its answer with them.

A white-space pattern in the grammar is not a bound: it may match repeatedly between two parts.
"""


class Grammars:
    """Grammars over one tokenizer."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._tokens: tuple[Any, frozenset[int]] | None = None
        self._building = threading.Lock()
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def json(self, schema: str, param: str) -> Grammar:
        """Return the grammar of a JSON schema; may take a second.

        Raises:
            Refusal: llguidance is not installed, or cannot follow the schema.
        """
        try:
            return self._compiled(schema)
        except ImportError:
            needs = "it needs the package llguidance; install it where the server runs: pip install 'moetool[grammar]'"
            raise Refusal(f"{param}: {needs}", param=param) from None
        except ValueError as error:
            raise Refusal(f"{param}: the schema cannot be followed: {str(error)[:300]}", param=param) from None

    def _compile(self, schema: str) -> Grammar:
        from llguidance import LLMatcher

        tokens, blanks = self._vocabulary()
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _JsonGrammar(matcher, blanks)

    def _vocabulary(self) -> tuple[Any, frozenset[int]]:
        """Return llguidance's tokenizer, and the tokens of white space only."""
        from llguidance.hf import from_tokenizer

        with self._building:
            if self._tokens is None:
                tokens = from_tokenizer(self._engine.tokenizer, n_vocab=self._engine.vocab_size)
                texts = (tokens.decode_bytes([token]) for token in range(tokens.vocab_size))
                self._tokens = tokens, frozenset(i for i, text in enumerate(texts) if text and not text.strip())
            return self._tokens


def arguments_schema(tools: list[Tool], name: str) -> str:
    """Return the schema of the arguments of one function."""
    return json.dumps(next(_parameters(tool) for tool in tools if tool.function.name == name))


def calls_schema(tools: list[Tool], *, several: bool) -> str:
    """Return the schema of an array of at least one call."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps(
        {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if several else {"maxItems": 1})
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **tool.function.parameters}


class _JsonGrammar:
    """A compiled grammar."""

    def __init__(self, fresh: Any, blanks: frozenset[int]) -> None:
        self._fresh, self._blanks = fresh, blanks

    def start(self) -> "_Matcher":
        return _Matcher(self._fresh.deep_copy(), self._blanks)


class _Matcher:
    """llguidance's matcher; the caller knows the model's end tokens."""

    def __init__(self, matcher: Any, blanks: frozenset[int]) -> None:
        self._matcher, self._blanks = matcher, blanks
        self._num_blanks = 0  # consecutive blanks at the end of the answer

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> bytearray:
        """Return a byte for every token: 0 where it cannot come next."""
        allowed = bytearray(self._matcher.compute_logit_bias())
        if self._num_blanks < _MOST_BLANKS:
            return allowed
        fewer = bytearray(allowed)
        for token in self._blanks:
            fewer[token] = 0
        return fewer if self.may_end or any(fewer) else allowed

    def accept(self, token: int) -> None:
        """Advance by a token of the answer."""
        self._matcher.consume_token(token)
        self._num_blanks = self._num_blanks + 1 if token in self._blanks else 0
