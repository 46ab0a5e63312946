"""Schemas that could end the server."""

import json
import subprocess
import sys

from moetool.serving.grammars import calls_schema
from moetool.serving.request_schema import Tool

_COMPILE = """
import json, sys
from types import SimpleNamespace
from transformers import AutoTokenizer
from moetool.base import assets
from moetool.serving.grammars import Grammars
from moetool.serving.http_errors import Refusal

tokenizer = AutoTokenizer.from_pretrained(assets.path("data", "reference-moe"))
grammars = Grammars(SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer)))
for schema in sys.stdin:
    try:
        grammars.json(schema, "schema")
        print("compiled", flush=True)
    except Refusal as refusal:
        print(refusal, flush=True)
"""


CHAINS = (
    ('{"properties": {"x": {"$ref": "#/$defs/%d"}}}', "{}", "compiled"),
    ('{"prefixItems": [{"$ref": "#/$defs/%d"}]}', '{"$ref": "#/$defs/0"}', "compiled"),
    ('{"$ref": "#/$defs/%d"}', '{"type": "integer"}', "compiled"),
    ('{"$ref": "#/$defs/%d"}', '{"$ref": "#/$defs/0"}', "references in a loop"),
)
"""A definition that refers to the next one, the last definition, and the outcome."""


def test_a_long_chain_of_references_does_not_overflow_the_stack() -> None:
    schemas = ""
    for link, last, _ in CHAINS:
        links = [f'"{number}": {link % (number + 1)}' for number in range(4000)]
        schemas += f'{{"$ref": "#/$defs/0", "$defs": {{{", ".join(links)}, "4000": {last}}}}}\n'
    process = subprocess.run(
        [sys.executable, "-c", _COMPILE], input=schemas, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-500:]
    outcomes = process.stdout.splitlines()
    assert len(outcomes) == len(CHAINS)
    assert all(said in outcome for (_, _, said), outcome in zip(CHAINS, outcomes, strict=True))


def test_references_within_values_of_a_schema_stay_as_they_are() -> None:
    """`$ref` refers to a schema, unless it lies in a value that an answer may hold."""
    value = {"$ref": "#/a"}
    properties = {"x": {"const": value}, "y": {"enum": [value]}, "const": {"$ref": "#/$defs/z"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties, "$defs": {"z": {}}}}}
    schema = json.loads(calls_schema([Tool.model_validate(tool)], several=False))
    parameters = schema["items"]["anyOf"][0]["properties"]["arguments"]
    assert parameters["properties"] == {
        **{"x": {"const": value}, "y": {"enum": [value]}},
        "const": {"$ref": "#/items/anyOf/0/properties/arguments/$defs/z"},
    }
