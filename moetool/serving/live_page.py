"""The page at `/`: a server or a cluster as it runs, drawn by the browser from `/stats`."""

import base64
import hashlib
from importlib import resources

PAGE = resources.files("moetool.serving").joinpath("live_page.html").read_text(encoding="utf-8")
"""HTML with its style and its script; the same for every server, and without data."""

_SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
