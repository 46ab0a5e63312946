"""data/README.md accounts for every file of data/."""

import re

from moetool.base import assets, durable


def test_every_file_of_data_is_in_the_readme_with_its_sha256() -> None:
    data = assets.path("data")
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", (data / "README.md").read_text("utf-8"), re.M)
    files = (file for file in data.rglob("*") if file.is_file() and file != data / "README.md")
    assert dict(rows) == {file.relative_to(data).as_posix(): durable.sha256_file(file) for file in files}
