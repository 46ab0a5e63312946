"""Answers that follow a JSON schema, by the grammar library llguidance (extra `grammar`)."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from moetool.runtime.request import EngineLike, Grammar
from moetool.serving.http_errors import Refusal
from moetool.serving.request_schema import Tool

_MOST_BLANKS = 8
"""Limit of consecutive white-space tokens: without it a weak model fills its answer with them.

A white-space pattern in the grammar is not a bound: it may match repeatedly between two parts.
"""


_MAX_SCHEMA_CHARS = 256 * 2**10
"""Length of a schema. llguidance takes seconds for a longer one, and its stack grows with the chain of references."""
_STACK_BYTES = 256 * 2**20
"""Stack to compile in: references take up to 10 KB each (llguidance 1.9), and an overflow ends the process."""
_MAX_PROBED_CHARS = 2**19
"""Text to compile for the values within a schema; an error in further ones ends an answer."""
_MOST_ITEMS_CHARS = 2000
"""Length below which a schema without references has no row of 2,000 items, llguidance's limit."""

_SUBSCHEMAS = ("additionalProperties", "items")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_CHOICES = ("anyOf", "oneOf", "allOf", "$defs", "definitions")
"""Fields whose schemas are not values by themselves."""
_DATA = ("const", "enum", "default", "examples")
"""Fields of values that are no schemas, whatever they hold."""

_Result = TypeVar("_Result")
_STACK_SIZE = threading.Lock()
"""Held while the stack size of new threads is changed."""


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
        import llguidance  # noqa: F401 - ImportError before the work

        if len(schema) > _MAX_SCHEMA_CHARS:
            raise ValueError(f"it has {len(schema)} characters, expected at most {_MAX_SCHEMA_CHARS}")
        tokens, blanks = self._vocabulary()
        return _JsonGrammar(_with_stack(lambda: _compiled(tokens, schema)), blanks)

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
    return json.dumps(next(_parameters(tool) for tool in tools if tool.function.name == name))


def calls_schema(tools: list[Tool], *, several: bool) -> str:
    """Return the schema of an array of at least one call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _moved(_parameters(tool), f"#/items/anyOf/{number}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    return json.dumps(
        {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if several else {"maxItems": 1})
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    # llguidance refuses a reference to itself beside other fields.
    return parameters if "$ref" in parameters else {"type": "object", **parameters}


def _compiled(tokens: Any, schema: str) -> Any:
    """Return llguidance's matcher of a schema.

    llguidance reports some errors (rows of too many items, loops of references) only where an answer reaches them, so
    the beginning of every value is tried.

    Raises:
        ValueError: llguidance cannot follow the schema, or no answer can.
    """
    matcher = _matcher(tokens, schema)
    if matcher.is_error():
        raise ValueError(_reason(matcher))
    if error := _opening_error(tokens, matcher):
        raise ValueError(error)
    whole = json.loads(schema)
    tried = {""}
    for pointer, part in _values(whole, ""):
        text = json.dumps(part)
        if text in tried or ("$ref" not in text and len(text) < _MOST_ITEMS_CHARS):
            continue
        if len(tried) * len(schema) > _MAX_PROBED_CHARS:
            break
        tried.add(text)
        moved = {"$ref": f"#/$defs/whole{pointer}", "$defs": {"whole": _moved(whole, "#/$defs/whole")}}
        probe = _matcher(tokens, json.dumps(moved))
        # One that does not compile alone says nothing about the schema, which did.
        if not probe.is_error() and (error := _opening_error(tokens, probe)):
            raise ValueError(f"{error} (at #{pointer})")
    return matcher


def _matcher(tokens: Any, schema: str) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)


def _opening_error(tokens: Any, fresh: Any) -> str:
    """Return llguidance's error before the first token of an answer, or after an opening bracket; empty if none."""
    for opening in (b"", b"{", b"["):
        trial = fresh.deep_copy()
        bracket = tokens.tokenize_bytes(opening)
        if trial.try_consume_tokens(bracket) == len(bracket):
            trial.compute_logit_bias()
        if trial.is_error():
            return _reason(trial)
    return ""


def _reason(matcher: Any) -> str:
    """Return llguidance's error without its state."""
    reason = str(matcher.get_error()).partition("<state>")[0].strip()
    if reason.startswith("NoExtension"):
        return f"no answer can follow it, such as with references in a loop ({reason})"
    return reason


def _values(schema: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield JSON pointer and schema of each value within a value's schema."""
    if not isinstance(schema, dict):
        return
    fields = [(name, name, schema.get(name)) for name in _SUBSCHEMAS]
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            fields += [(name, f"{name}/{number}", part) for number, part in enumerate(parts)]
    for name in _MAPS:
        if isinstance(parts := schema.get(name), dict):
            fields += [(name, f"{name}/{_escaped(key)}", part) for key, part in parts.items()]
    for name, step, part in fields:
        if isinstance(part, dict):
            if name not in _CHOICES:
                yield f"{pointer}/{step}", part
            yield from _values(part, f"{pointer}/{step}")


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~")


def _moved(schema: Any, base: str, *, named: bool = False) -> Any:
    """Return a schema whose references are relative to a new place.

    Args:
        named: whether it is a map of names to schemas.
    """
    if isinstance(schema, list):
        return [_moved(part, base) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _moved(part, base) for name, part in schema.items()}
    moved = {key: part if key in _DATA else _moved(part, base, named=key in _MAPS) for key, part in schema.items()}
    if isinstance(target := moved.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = base + target[1:]
    return moved


def _with_stack(work: Callable[[], _Result]) -> _Result:
    """Run work on a thread with a large stack."""
    answer: Future[_Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    with _STACK_SIZE:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return answer.result()


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
    def error(self) -> str:
        """Why llguidance cannot go on; empty if it can."""
        return _reason(self._matcher) if self._matcher.is_error() else ""

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
