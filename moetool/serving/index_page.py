"""The page at `/`: links to every endpoint."""

import html

_LINKS = {
    "/v1/models": "model list, for OpenAI clients",
    "/health": "whether requests are accepted",
    "/stats": "hit rates, bytes and memory, as JSON",
    "/metrics": "the same for Prometheus",
    "/openapi.json": "OpenAPI schema",
}
_POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize")

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Frame-Options": "DENY"}


def index_page(model: str, *, asks_for_key: bool) -> str:
    """Return the page in HTML."""
    links = "".join(f'<li><a href="{path[1:]}">{path}</a>: {what}</li>' for path, what in _LINKS.items())
    posts = "".join(f"<li>POST {path}</li>" for path in _POSTS)
    key = "<p>Requests need the header <code>Authorization: Bearer KEY</code>.</p>" if asks_for_key else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>moetool</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root{color-scheme:light dark}"
        "body{font:16px/1.5 system-ui;max-width:40em;margin:3em auto;padding:0 1em}</style>"
        f"<h1>moetool</h1><p>Serves <code>{html.escape(model)}</code> through an OpenAI-compatible API.</p>{key}"
        f"<ul>{links}{posts}</ul></html>"
    )
