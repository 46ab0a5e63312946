"""Tool calls in the text of an answer: one incremental parser per format.

A parser is a generator over a `TextBuffer`: it yields certain parts, and None where it needs more text.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moetool.serving.json_stream import Malformed, TextBuffer, as_unicode, expect, json_value, next_char, until


class AnswerPart(NamedTuple):
    """A piece of an answer; `name` begins a call, whose arguments follow."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str


Parsing = Generator[AnswerPart | None, None, None]


class ToolParser:
    """The parts of one answer."""

    def __init__(self, parse: Callable[[TextBuffer], Parsing]) -> None:
        self._feed = TextBuffer()
        self._parsing: Iterator[AnswerPart | None] = parse(self._feed)

    def push(self, text: str, *, last: bool = False) -> list[AnswerPart]:
        """Return the parts that this text makes certain; with `last`, also all text held back."""
        self._feed.add(text, last=last)
        parts: list[AnswerPart] = []
        with contextlib.suppress(Malformed):  # the answer ends within a mark
            for part in self._parsing:
                if part is None:
                    break
                if part.text or part.kind == "name":
                    parts.append(part)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of a model's calls.

    Attributes:
        signs: marks of chat templates of this format,
        unlike: unless it has one of these.
        shown: special tokens of the format, kept in the text.
        always: whether answers have this format even without tools.
    """

    parse: Callable[[TextBuffer], Parsing]
    signs: Sequence[str]
    unlike: Sequence[str] = ()
    shown: Sequence[str] = ()
    always: bool = False


def format_of(template: str) -> str | None:
    """Return the name of a chat template's format; None where it is unknown."""
    for name, known in FORMATS.items():
        if any(sign in template for sign in known.signs) and not any(sign in template for sign in known.unlike):
            return name
    return None


def named_call(name: str) -> Callable[[TextBuffer], Parsing]:
    """Return the parser of an answer that a grammar limits to the arguments of one call."""

    def parse(feed: TextBuffer) -> Parsing:
        yield AnswerPart("name", name)
        while True:
            yield AnswerPart("arguments", feed.take())
            if feed.ended:
                return
            yield None

    return parse


def required_calls(feed: TextBuffer) -> Parsing:
    """Return the parser of an answer that a grammar limits to an array of calls."""
    if (yield from next_char(feed)) == "[":
        yield from _array(feed)


def _hermes(feed: TextBuffer) -> Parsing:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write it."""
    while (yield from _content(feed, "<tool_call>")):
        if (yield from _object(feed, "<tool_call>")):
            yield from expect(feed, "</tool_call>")


def _mistral(feed: TextBuffer) -> Parsing:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since v11 `[TOOL_CALLS]name[ARGS]{…}` for each."""
    while (yield from _content(feed, "[TOOL_CALLS]")):
        if (yield from next_char(feed)) == "[":
            yield from _array(feed)
            continue
        name = yield from until(feed, "{", keep=True)
        yield AnswerPart("name", name.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip())
        yield from _arguments(feed)


def _llama3_json(feed: TextBuffer) -> Parsing:
    """`{"name": …, "parameters": {…}}`, at the beginning of the answer or after `<|python_tag|>`."""
    mark = "<|python_tag|>"
    going = (yield from next_char(feed)) == "{"
    while going or (yield from _content(feed, mark)):
        going = False
        if (yield from next_char(feed)) == "{" and (yield from _object(feed, "")):
            yield from expect(feed, ";")
            going = (yield from next_char(feed)) == "{"


def _deepseek(feed: TextBuffer) -> Parsing:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and a block of JSON; since V3.1 the name, and bare JSON."""
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    while (yield from _content(feed, "<｜tool▁calls▁begin｜>")):  # noqa: RUF001
        while (yield from expect(feed, begin)):
            name = (yield from until(feed, sep)).strip()
            if name == "function":
                name = (yield from until(feed, "\n")).strip()
                yield from expect(feed, "```json")
            yield AnswerPart("name", name)
            yield from _arguments(feed)
            yield from until(feed, end)
        yield from expect(feed, "<｜tool▁calls▁end｜>")  # noqa: RUF001


def _harmony(feed: TextBuffer) -> Parsing:
    """Messages in channels: `<|channel|>commentary to=functions.name<|message|>{…}<|call|>`, as gpt-oss writes them."""
    role = ""
    while (yield from _content(feed, "<|channel|>")):
        while True:
            header = role + (yield from until(feed, "<|message|>"))
            channel = header.removeprefix(role).lstrip()
            recipient = next((word[3:] for word in header.replace("<", " <").split() if word.startswith("to=")), "")
            kind: Literal["content", "reasoning", "arguments"] = "content"
            if recipient:
                yield AnswerPart("name", recipient.removeprefix("functions."))
                kind = "arguments"
            elif channel.startswith("analysis"):
                kind = "reasoning"
            yield from _body(feed, kind)
            if not (yield from expect(feed, "<|start|>")):
                break
            role = (yield from until(feed, "<|channel|>")) + " "


def _body(feed: TextBuffer, kind: Literal["content", "reasoning", "arguments"]) -> Parsing:
    """Yield the text of a message up to its end mark, and consume the mark."""
    ends = ("<|end|>", "<|call|>", "<|return|>")
    while True:
        found = [at for at in map(feed.find, ends) if at >= 0]
        if found:
            yield AnswerPart(kind, feed.take(min(found)))
            for end in ends:
                if (yield from expect(feed, end)):
                    return
        yield AnswerPart(kind, feed.take(feed.certain(*ends)))
        if feed.ended:
            yield AnswerPart(kind, feed.take())
            return
        yield None


FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        parse=_harmony,
        signs=("<|channel|>",),
        shown=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        always=True,
    ),
    "mistral": ToolFormat(
        parse=_mistral, signs=("[TOOL_CALLS]",), shown=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]")
    ),
    "deepseek": ToolFormat(
        parse=_deepseek,
        signs=("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
        shown=tuple(
            f"<｜tool▁{name}｜>"  # noqa: RUF001
            for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
        ),
    ),
    "hermes": ToolFormat(
        parse=_hermes, signs=("<tool_call>",), unlike=("<function=", "<arg_key>"), shown=("<tool_call>", "</tool_call>")
    ),
    "llama3_json": ToolFormat(
        parse=_llama3_json, signs=("<|python_tag|>", '{"name": function name, "parameters"'), shown=("<|python_tag|>",)
    ),
}
"""Formats by their name in `--set server.tool_format`; a template's format is the first whose mark it contains."""


def _content(feed: TextBuffer, mark: str) -> Generator[AnswerPart | None, None, bool]:
    """Yield text up to a mark, without the space before it, and consume the mark; return whether it came."""
    while (at := feed.find(mark)) < 0:
        if feed.ended:
            yield AnswerPart("content", feed.take())
            return False
        yield AnswerPart("content", feed.take(feed.certain(mark, spaces=True)))
        yield None
    yield AnswerPart("content", feed.take(at).rstrip())
    feed.take(len(mark))
    return True


def _arguments(feed: TextBuffer) -> Generator[AnswerPart | None, None, None]:
    """Yield an object as the arguments of the current call. Raises: Malformed."""
    if (yield from next_char(feed)) != "{":
        raise Malformed
    for piece in json_value(feed):
        yield None if piece is None else AnswerPart("arguments", piece)


def _array(feed: TextBuffer) -> Parsing:
    yield from expect(feed, "[")
    while (yield from next_char(feed)) == "{":
        yield from _object(feed, "")
        yield from expect(feed, ",")
    yield from expect(feed, "]")


def _object(feed: TextBuffer, before: str) -> Generator[AnswerPart | None, None, bool]:
    """Yield one call as an object; other text becomes content after `before`. Return whether it was a call."""
    feed.remember()
    named = False
    try:
        for part in _members(feed):
            named = named or (part is not None and part.kind == "name")
            yield part
    except Malformed:
        pass
    if not named:
        yield AnswerPart("content", before + feed.remembered())
    return named


def _members(feed: TextBuffer) -> Parsing:
    """Yield the parts of a call's object. Raises: Malformed."""
    if not (yield from expect(feed, "{")):
        raise Malformed
    named, early = False, ""
    while (yield from next_char(feed)) == '"':
        key = json.loads((yield from _whole(feed)))
        if not (yield from expect(feed, ":")):
            raise Malformed
        first = yield from next_char(feed)
        if key == "name" and not named:
            name = json.loads((yield from _whole(feed)))
            if not isinstance(name, str):
                raise Malformed
            named = True
            yield AnswerPart("name", as_unicode(name))
            yield AnswerPart("arguments", early)
        elif key in ("arguments", "parameters"):
            if named and first == "{":
                yield from _arguments(feed)
            else:
                text = yield from _whole(feed)
                early = (
                    as_unicode(json.loads(text)) if first == '"' else text
                )  # some models write the object into a string
                if named:
                    yield AnswerPart("arguments", early)
        else:
            yield from _whole(feed)
        yield from expect(feed, ",")
    if not (yield from expect(feed, "}")):
        raise Malformed


def _whole(feed: TextBuffer) -> Generator[None, None, str]:
    """Return one JSON value as text. Raises: Malformed where it is invalid or incomplete."""
    pieces: list[str] = []
    for piece in json_value(feed):
        if piece is None:
            yield None
        else:
            pieces.append(piece)
    text = "".join(pieces)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    return text
