"""The page at `/` by itself."""

import base64
import hashlib
import re

from moetool.serving.live_page import HEADERS, PAGE


def test_the_page_runs_its_own_script_and_fetches_nothing_from_elsewhere() -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
    policy = HEADERS["Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in PAGE and "eval(" not in script
    assert set(re.findall(r"\S+://\S+", PAGE)) == {'document.createElementNS("http://www.w3.org/2000/svg",'}
    assert re.findall(r'fetch\("(\w+)"', script) == ["stats"] and "setInterval" not in script


def test_every_element_that_the_script_names_is_there() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', PAGE)
    assert len(ids) == len(set(ids)) and set(re.findall(r'\bat\("([\w-]+)"\)', PAGE)) <= set(ids)
    assert PAGE.count("<label") >= 5 and 'lang="en"' in PAGE and "prefers-color-scheme: dark" in PAGE
