"""Files of routes at addresses, through fsspec: a data set of the hub, patterns, and what is refused."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.trace.foreign.importing import import_trace
from moetool.trace.foreign.remote_files import downloaded
from moetool.trace.reader import Trace
from tests.hub import Hub, running
from tests.refusals import refused
from tests.unit.trace.foreign.test_importing import write_parquet

NAME = "lab/routes"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "published"
    for part in ("a", "b"):
        (folder / "data" / part).mkdir(parents=True)
        write_parquet(folder / "data" / part / f"{part}.parquet")
    (folder / "README.md").write_text("# Routes\n")
    with running(tmp_path / "cache", monkeypatch) as served:
        served.folders[NAME] = folder
        yield served


def test_a_data_set_of_the_hub_is_imported_by_its_address(hub: Hub, tmp_path: Path) -> None:
    address = f"hf://datasets/{NAME}/data/b/b.parquet"
    import_trace([address], None, tmp_path / "remote")
    import_trace([hub.folders[NAME] / "data" / "b" / "b.parquet"], None, tmp_path / "local")
    remote, local = Trace(tmp_path / "remote"), Trace(tmp_path / "local")
    imported = [trace.manifest["provenance"]["imported"] for trace in (remote, local)]
    assert imported[0]["addresses"] == [address] and imported[0]["files"] == imported[1]["files"]
    assert remote.requests.equals(local.requests)


@pytest.mark.parametrize("where", ["", "/data", "/**/*.parquet"])
def test_a_directory_gives_its_data_files(where: str, hub: Hub) -> None:
    with downloaded([f"hf://datasets/{NAME}{where}"]) as local:
        assert [file.name for file in local] == ["a.parquet", "b.parquet"]
        published = hub.folders[NAME] / "data"
        assert [file.read_bytes() for file in local] == [
            (published / part / f"{part}.parquet").read_bytes() for part in "ab"
        ]
    assert not any(file.exists() for file in local)


@pytest.mark.parametrize("name", ["../outside.csv", "a/../../outside.csv"])
def test_an_archive_with_files_outside_itself(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.writestr(name, "layer,expert,count\n0,0,1\n")
    with refused(MismatchError, "f.zip", name), downloaded([f"zip://::{tmp_path / 'f.zip'}"]):
        pass


def test_what_cannot_be_read_is_refused(hub: Hub) -> None:
    (hub.folders[NAME] / "more.csv").write_text("layer,expert\n")
    for address, kind, told in (
        (f"hf://datasets/{NAME}", UsageError, ".csv, .parquet"),
        (f"hf://datasets/{NAME}/*.md", UsageError, "*.md"),
        (f"hf://datasets/{NAME}/none.csv", UsageError, "none.csv"),
        ("hf://datasets/lab/other", MoetoolError, "lab/other"),
        ("nothing://here", MoetoolError, "nothing"),
    ):
        with refused(kind, told), downloaded([address]):
            pass
