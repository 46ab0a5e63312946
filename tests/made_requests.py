"""Requests generated from a server's OpenAPI description: valid ones, nearly valid ones and invalid ones."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

Json = Any

_ANY_JSON: st.SearchStrategy[Json] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.sampled_from(["\ud800", "\x00", "🙂" * 40, 10**400, [[[[[[]]]]]]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_LIKELY: dict[str, st.SearchStrategy[Json]] = {
    "model": st.just("reference"),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(1, 6),
    "max_output_tokens": st.integers(1, 6),
    "n": st.integers(1, 3),
    "role": st.sampled_from(["user", "assistant", "system"]),
    "content": st.text(max_size=30),
    "prompt": st.text(min_size=1, max_size=30) | st.lists(st.integers(0, 3000), min_size=1, max_size=20),
}
"""Values by field name that are valid beyond the schema and keep answers short."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `template` is its path in the description, empty if the path does not exist."""

    method: str
    path: str
    template: str
    body: bytes | None
    headers: Mapping[str, str]


def calls(description: Json) -> st.SearchStrategy[Call]:
    """Requests to every operation of an OpenAPI description, and to undefined paths."""
    operations = [
        (method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    made = [_call(description, *one) for one in operations for _ in range(4 if "requestBody" in one[2] else 1)]
    return st.one_of(*made, _elsewhere())


def _call(description: Json, method: str, template: str, operation: Json) -> st.SearchStrategy[Call]:
    path = st.just(template)
    if "{" in template:
        name = st.one_of(st.just("reference"), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
        path = name.map(lambda text: template.partition("{")[0] + quote(text))
    body: st.SearchStrategy[bytes | None] = st.none()
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = _bodies(of_schema(schema, description))
    return st.builds(Call, st.just(method.upper()), path, st.just(template), body, _headers())


def _elsewhere() -> st.SearchStrategy[Call]:
    methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
    paths = st.sampled_from(["/v1", "/v1/", "/v1/embeddings", "/stats/", "/..%2f..%2fetc/passwd", "/v1/%00", "/%ff"])
    return st.builds(Call, methods, paths, st.just(""), st.none() | st.binary(max_size=20), _headers())


def _headers() -> st.SearchStrategy[dict[str, str]]:
    extra = {
        "X-Request-Timeout": st.sampled_from(["5", "0.001", "-1", "inf", "nan", "1e999", "soon", ""]),
        "X-Request-Id": st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=140),
        "Content-Type": st.sampled_from(["text/plain", "application/json; charset=utf-16", "multipart/form-data", ""]),
        "Authorization": st.sampled_from(["Bearer", "Bearer x", "\xff"]),
    }
    none: dict[str, st.SearchStrategy[str]] = {}
    return st.one_of(*[st.just({})] * 6, st.fixed_dictionaries(none, optional=extra))


@st.composite
def _bodies(draw: st.DrawFn, allowed: st.SearchStrategy[Json]) -> bytes:
    """Values allowed by a schema, the same with some fields corrupted, or invalid JSON."""
    kind = draw(st.integers(0, 9))
    if kind == 9:
        return draw(st.binary(max_size=30) | st.sampled_from([b"", b"{", b"[" * 5000, b'{"prompt": NaN}', b"1" * 5000]))
    value = draw(allowed)
    if kind >= 6 and isinstance(value, dict):
        names = draw(st.lists(st.sampled_from([*sorted(value), "top_k", "unheard of"]), min_size=1, max_size=2))
        for name in names:
            value[name] = draw(_ANY_JSON)
        if draw(st.booleans()):
            value.pop(names[0])
    return json.dumps(value).encode("utf-8", "surrogatepass")


def of_schema(schema: Json, description: Json) -> st.SearchStrategy[Json]:
    """Values that a JSON schema allows, for the subset that pydantic writes; other schemas allow anything."""
    if "$ref" in schema:
        found = description
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return of_schema(found, description)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*(of_schema(one, description) for one in choices))
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _objects(schema, description)
        case "array":
            items = of_schema(schema.get("items", {}), description)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(4, schema.get("maxItems", 4)))
        case "string":
            least = schema.get("minLength", 0)
            return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=least + 10)
        case "integer":
            return st.integers(schema.get("minimum", -(2**40)), schema.get("maximum", 2**40))
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum", -1e9)),
                schema.get("maximum", 1e9),
                exclude_min="exclusiveMinimum" in schema,
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.none() | _ANY_JSON


@st.composite
def _objects(draw: st.DrawFn, schema: Json, description: Json) -> Json:
    """An object with all required fields and some optional ones."""
    required = set(schema.get("required", ()))
    made = {}
    for name, of in schema["properties"].items():
        if (
            name in required
            or name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
            or draw(st.integers(0, 5)) == 0
        ):
            made[name] = draw(_LIKELY[name] if name in _LIKELY else of_schema(of, description))
    return made


def verdict(call: Call, status: int, headers: Mapping[str, str], body: bytes, description: Json) -> str | None:
    """The fault of an answer, in words; None without one."""
    described = description["paths"].get(call.template, {}).get(call.method.lower())
    if status >= 500 and status != 503:
        return f"status {status}"
    if described is not None and str(status) not in described["responses"]:
        return f"status {status} is not in the description"
    if described is None and not 400 <= status < 500:
        return f"status {status} for an undefined path"
    if status >= 400 and call.method != "HEAD" and call.template != "/health":
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return f"status {status} without an error object: {body[:100]!r}"
        fields = set() if call.path.startswith("/v1/messages") else {"param", "code"}
        if not (error["message"] and error["type"] and fields <= set(error)):
            return f"status {status} without a reason: {error}"
    if status in (429, 503) and "Retry-After" not in headers:
        return f"status {status} without Retry-After"
    if "X-Request-Id" not in headers:
        return "an answer without X-Request-Id"
    return None


def send(url: str, call: Call) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Timeout": "20", **call.headers}
        connection.request(call.method, call.path, call.body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def fuzz(url: str, description: Json, *, examples: int, seed: int = 0) -> dict[int, int]:
    """Send generated requests; returns the number of answers by status.

    Raises:
        AssertionError: a wrong answer; names the smallest request that causes one.
    """
    statuses: dict[int, int] = {}

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(calls(description))
    def ask(call: Call) -> None:
        status, headers, body = send(url, call)
        statuses[status] = statuses.get(status, 0) + 1
        wrong = verdict(call, status, headers, body, description)
        assert wrong is None, f"{wrong}: {call}"

    ask()
    return statuses
