"""HTTPS with a certificate that Python's and openai's clients check."""

import contextlib
import json
import socket
import ssl
import subprocess
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.serving.chat import Conversation
from moetool.serving.server import tls_context
from moetool.serving.server_options import ServerOptions
from tests.refusals import refused
from tests.scripted_engine import ScriptedEngine
from tests.servers import serving


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate for 127.0.0.1, its key, the key with a password, and the key of another one."""
    folder = tmp_path_factory.mktemp("tls")
    paths = {name: str(folder / f"{name}.pem") for name in ("cert", "key", "locked", "other")}
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", paths["key"], "-out", paths["cert"]),
    )
    _openssl("rsa", "-aes256", "-passout", "pass:x", "-in", paths["key"], "-out", paths["locked"])
    _openssl("genrsa", "-out", paths["other"], "2048")
    return paths


def test_https(files: dict[str, str]) -> None:
    options = ServerOptions(ssl_certfile=files["cert"], ssl_keyfile=files["key"], head_timeout_s=0.5)
    with serving(ScriptedEngine(), options=options) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=files["cert"])
        body = json.dumps({"model": "reference", "prompt": "a", "max_tokens": 3, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, context=trust, timeout=30) as response:
            assert b"[DONE]" in response.read()
        parts = urlsplit(url)
        # What is no request is answered and closed as without TLS.
        plain = socket.create_connection((parts.hostname, parts.port), timeout=30)
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 400")
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(100).startswith(b"HTTP")


def test_a_chat_over_https(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(ssl_certfile=files["cert"], ssl_keyfile=files["key"])
    with serving(ScriptedEngine(), options=options) as (url, _):
        with refused(MoetoolError, "self-signed", "SSL_CERT_FILE"):
            Conversation(url)
        with pytest.raises(MoetoolError, match=r"no answer from http:.*(; if it serves HTTPS|reset)"):
            Conversation(url.replace("https", "http"))
        monkeypatch.setenv("SSL_CERT_FILE", files["cert"])
        assert "".join(Conversation(url, settings={"temperature": 0}).ask("hello"))


def test_files_that_cannot_be_used(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "garbage").write_text("no PEM")
    wrong = [
        (str(tmp_path / "missing"), "", "No such file"),
        (str(tmp_path / "garbage"), "", "cannot use"),
        (files["cert"], files["other"], "cannot use"),
        (files["cert"], files["locked"], "is encrypted"),
        (files["cert"], "", "cannot use"),
    ]
    for certificate, key, why in wrong:
        with pytest.raises(UsageError, match=why):
            tls_context(ServerOptions(ssl_certfile=certificate, ssl_keyfile=key))
    with refused(UsageError, "TLS key", "certificate"):
        ServerOptions(ssl_keyfile=files["key"])
