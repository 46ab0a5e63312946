"""Files at addresses such as `hf://datasets/org/name`, read through fsspec."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line

_DATA = (".parquet", ".csv", ".tsv", ".jsonl", ".json", ".npz", ".npy", ".safetensors", ".pt", ".txt")


@contextlib.contextmanager
def downloaded(files: Sequence[Path | str]) -> Iterator[list[Path]]:
    """Yield local files; those at addresses are copies that go at the end of the block.

    Args:
        files: paths, and addresses of a file, of several by a pattern, or of a directory or data set, all of whose data
            files are of one kind.

    Raises:
        UsageError: an address has no data file, or files of several kinds.
        MismatchError: an archive has a file outside itself.
        MoetoolError: an address cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="moetool-") as scratch:
        local = []
        for number, file in enumerate(files):
            local += _download(str(file), Path(scratch) / str(number)) if is_address(file) else [Path(file)]
        yield local


def is_address(file: Path | str) -> bool:
    """Whether a file is elsewhere."""
    return "://" in str(file)


def _download(address: str, folder: Path) -> list[Path]:
    import fsspec

    made = []
    try:
        system, path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
        names, start = _names(system, path, address)
        for name in names:
            inside = PurePosixPath(name).relative_to(start)
            if ".." in inside.parts:
                raise MismatchError(f"{address} has the file {name}, expected one inside it; unpack it with care")
            made.append(folder / inside)
            made[-1].parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(made[-1]))
    except MoetoolError:
        raise
    except Exception as error:  # every file system raises its own types
        raise MoetoolError(
            f"cannot read {address} ({type(error).__name__}: {first_line(error)}); check the address and the network, "
            f"or download the file and give its path"
        ) from None
    return made


def _names(system: Any, path: str, address: str) -> tuple[list[str], PurePosixPath]:
    """Return the names of an address's data files, and the directory that they are in."""
    if "*" not in path and system.isfile(path):
        return [path], PurePosixPath(path).parent
    fixed = path.partition("*")[0]
    start = PurePosixPath(fixed if fixed == path or fixed.endswith("/") else PurePosixPath(fixed).parent)
    names = sorted(system.glob(path) if "*" in path else system.find(path))
    kinds = {name: PurePosixPath(name.removesuffix(".gz")).suffix for name in names}
    data = [name for name in names if kinds[name] in _DATA]
    if not data:
        raise UsageError(f"{address} has no file that ends in {', '.join(_DATA)}; give the address of a file")
    if len(several := sorted({kinds[name] for name in data})) > 1:
        one = f"{address.rstrip('/')}/**/*{several[0]}"
        raise UsageError(f"{address} has files of the kinds {', '.join(several)}; choose one, as in {one}")
    return data, start
