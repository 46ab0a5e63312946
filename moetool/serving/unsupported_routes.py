"""Routes of OpenAI's and other protocols that this server lacks; each answer names the alternative."""

from collections.abc import Mapping

from fastapi import FastAPI, Request

from moetool.serving.http_errors import Refusal

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"]
_CHAT = "send the conversation as 'messages' to /v1/chat/completions"
_TEXT = "this server generates text from text; use /v1/chat/completions or /v1/completions"
_STATELESS = f"this server is stateless: {_CHAT}"
_ONE_MODEL = "the server serves one fixed model, which /v1/models names"

ABSENT: Mapping[str, str] = {
    "/v1/responses": f"{_CHAT}, with 'input' and 'instructions' as messages of the roles user and system",
    "/v1/messages": f"that is another vendor's protocol; {_CHAT}",
    "/v1/conversations": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/batches": f"{_STATELESS}, or many prompts in one 'prompt' list to /v1/completions",
    "/v1/embeddings": "this server does not compute embeddings; it has /v1/completions and /v1/chat/completions",
    "/v1/rerank": "this server does not rank; /v1/completions with echo and logprobs scores a text",
    "/v1/moderations": "this server does not moderate; it has /v1/completions and /v1/chat/completions",
    "/v1/edits": _TEXT,
    "/v1/audio": _TEXT,
    "/v1/images": _TEXT,
    "/v1/videos": _TEXT,
    "/v1/realtime": f"sessions are not supported; {_CHAT} with 'stream'",
    "/v1/files": _STATELESS,
    "/v1/uploads": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/v1/fine_tuning": _ONE_MODEL,
    "/v1/engines": _ONE_MODEL,
}
"""Path prefix, and the alternative."""


def install(app: FastAPI) -> None:
    """Answer each of them with 404 and its own message, and describe them so."""

    async def refuse(request: Request) -> None:
        path = request.url.path
        found = max((known for known in ABSENT if f"{path}/".startswith(f"{known}/")), key=len)
        raise Refusal(f"this server has no {found}: {ABSENT[found]}", status=404, code="unknown_url")

    for path, instead in ABSENT.items():
        # One operation each in the description: the common one.
        app.add_api_route(path, refuse, methods=["POST"], status_code=404, summary="Not served", description=instead)
        app.add_api_route(path, refuse, methods=[m for m in _METHODS if m != "POST"], include_in_schema=False)
        app.add_api_route(f"{path}/{{rest:path}}", refuse, methods=_METHODS, include_in_schema=False)
