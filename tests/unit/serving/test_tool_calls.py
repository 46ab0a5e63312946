"""Tool calls out of text: every format, however the text is cut."""

import json
import re
from pathlib import Path

import pytest

import moetool
from moetool.serving.tool_calls import FORMATS, ToolParser, format_of, named_call, required_calls

ARGUMENTS = '{"city": "Köln \\"}<", "days": [1, {"a": null}], "n": -1.5e3}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
BOTH = [("weather", ARGUMENTS), ("now", "{}")]

TEXTS = {
    "hermes": f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n"
    '<tool_call>{"name":"now","arguments":{}}</tool_call>',
    "mistral": f'Let me see. [TOOL_CALLS][{CALL}, {{"arguments": {{}}, "name": "now"}}]',
    "deepseek": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"  # noqa: RUF001
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    "llama3_json": f"Let me see.<|python_tag|>{CALL.replace('arguments', 'parameters')}; "
    '{"name": "now", "parameters": {}}',
    "harmony": "<|channel|>analysis<|message|>Hm <b.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
}


def parsed(name: str, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of a text that comes in pieces of one size."""
    parser = ToolParser(FORMATS[name].parse)
    return _collected(parser, text, size)


def _collected(parser: ToolParser, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    parts += parser.push("", last=True)
    said = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    for kind, piece in parts:
        if kind == "name":
            calls.append([piece, ""])
        elif kind == "arguments":
            calls[-1][1] += piece
        else:
            said[kind] += piece
    return said["content"], said["reasoning"], [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_however_the_text_is_cut(name: str, size: int) -> None:
    assert parsed(name, TEXTS[name], size) == ("Let me see.", "Hm <b." if name == "harmony" else "", BOTH)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 5])
def test_every_beginning_is_taken_without_a_complaint(name: str, size: int) -> None:
    """As where max_tokens cuts an answer short: the calls so far are a beginning of the calls."""
    for end in range(len(TEXTS[name])):
        content, _, calls = parsed(name, TEXTS[name][:end], size)
        assert content[:1] in ("", "<") or "Let me see.".startswith(content.rstrip()[:11])
        for (called, arguments), (whole, known) in zip(calls, BOTH, strict=False):
            # The marks are single tokens, which no answer is cut in.
            assert whole.startswith(called) and known.startswith(re.sub(r"<[|\w]*$", "", arguments))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "text",
    ["", "Hello.", " \n a < b [TOOL <tool \n ", "{ not json", '{"a": 1}', '{"name": 5}', "[1, 2]", "<", "\ufffd"],
)
@pytest.mark.parametrize("size", [1, 100])
def test_text_without_calls_stays_as_it_is(name: str, text: str, size: int) -> None:
    content, reasoning, calls = parsed(name, text, size)
    assert (reasoning, calls) == ("", [])
    assert content.strip() == text.strip()


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(FORMATS["hermes"].parse)
    pieces = [
        parser.push(piece) for piece in ('<tool_call>{"name": "f", "arguments": {"a"', ': "b', '"}}', "</tool_call>")
    ]
    assert [[tuple(part) for part in parts] for parts in pieces] == [
        [("name", "f"), ("arguments", '{"a"')],
        [("arguments", ': "b')],
        [("arguments", '"}')],
        [],
    ]


def test_arguments_in_a_string_are_taken_out_of_it() -> None:
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': ARGUMENTS})}</tool_call>"
    assert parsed("hermes", text, 4) == ("", "", [("f", ARGUMENTS)])


def test_invalid_json_in_a_call_is_content() -> None:
    assert parsed("hermes", "<tool_call>{'name': f}</tool_call>", 3)[0] == "<tool_call>{'name': f}</tool_call>"


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_forced_calls(size: int) -> None:
    assert _collected(ToolParser(named_call("f")), ARGUMENTS, size) == ("", "", [("f", ARGUMENTS)])
    text = f'[{CALL.replace("arguments", "parameters")},\n{{"name": "now", "parameters": {{}}}}]'
    assert _collected(ToolParser(required_calls), text, size) == ("", "", BOTH)


def test_mistral_with_names_outside() -> None:
    text = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}"
    assert parsed("mistral", text, 3) == ("", "", BOTH)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", None),
        ("[TOOL_CALLS]", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|start|>assistant<|channel|>final", "harmony"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),  # noqa: RUF001
        ("<|user|>{{ message.content }}", None),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", None),
        ("<minimax:tool_call><invoke name=", None),
    ],
)
def test_formats_by_template(template: str, name: str | None) -> None:
    assert format_of(template) == name


def test_the_guide_names_every_format() -> None:
    agents = (Path(moetool.__file__).parent / "guide/serving.md").read_text().partition("## Coding agents")[2]
    assert {name for name in FORMATS if f"`{name}`" in agents} == set(FORMATS)
