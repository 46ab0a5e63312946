"""The description of the protocol at /openapi.json, matched to the server's behaviour."""

from typing import Any

from fastapi import FastAPI

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_REFUSALS = {
    "400": "The request is invalid, or asks for an unsupported feature",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "Too many queued requests; Retry-After gives the seconds to wait",
    "503": "Unavailable, or the request's time limit was exceeded; the message gives the reason",
}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "Returned with the answer; generated if missing or not 1 to 128 visible ASCII characters",
    "schema": {"type": "string"},
}
_REQUEST_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Seconds that the answer may take, if less than the server allows",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


def install(app: FastAPI, *, api_key: bool) -> None:
    """Describe errors as the server returns them, and the key if the server has one.

    FastAPI describes a refused body as 422 in its own form; here it is a 400 in the protocol's.
    """
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = made()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        parts |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
        if api_key:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                _describe(operation, path, asks=api_key and path not in ("/", "/health"))
        return schema

    app.openapi = described  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], path: str, *, asks: bool) -> None:
    answers = operation["responses"]
    form = "MessagesError" if path.startswith("/v1/messages") else "Error"
    answers.pop("422", None)
    parameters = operation.setdefault("parameters", [])
    parameters.append(_REQUEST_ID)
    if path == "/health":
        answers["503"] = {"description": "Requests are not accepted; `status` gives the reason"}
    if path.startswith("/v1/models/"):
        answers["404"] = _answer(_REFUSALS["404"], form)
    if "requestBody" in operation:
        for status, why in _REFUSALS.items():
            answers[status] = _answer(why, form)
    if path in _GENERATING:
        parameters.append(_REQUEST_TIMEOUT)
        answers["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string", "description": "With stream: the protocol's events"}
        }
    answers.setdefault("503", _answer("Too many connections", form))
    if asks:
        answers["401"] = _answer("The key is missing or wrong", form)
        operation["security"] = [{"key": []}]


def _answer(why: str, form: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}}
