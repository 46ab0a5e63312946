"""Prefixes of the KV cache between runs of a server: one file of pages.

The file is a line of JSON, the rows of each layer's keys and values, and a digest of all that. The line names the
checkpoint, the data type, the device and the layout, since other numbers would give other answers without an error.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moetool.base import durable
from moetool.base.bounded_read import require_regular
from moetool.base.errors import MismatchError, MoetoolError, first_line, shortened
from moetool.runtime.decoding import PAGE_TOKENS

_KIND, _SCHEMA_VERSION = "moetool_prefixes", 1
_DIGEST_BYTES = 32
_MOST_PAGES, _MOST_HEADER = 1 << 18, 1 << 24
BLOCK_BYTES = 1 << 24
_HASH_DIGITS = 32


class PrefixFile:
    """Pages of the KV cache in a file, readable by its owner only: prompts can be inferred from them.

    Args:
        facts: strings that must be equal for the pages to be used, such as the checkpoint's revision.
        tensors: rows of the KV cache by layer, [rows, heads, width]; the first page is not kept.
    """

    def __init__(self, path: Path, facts: Mapping[str, str], tensors: Sequence[torch.Tensor]) -> None:
        self.path, self._tensors = path, tensors
        self._facts = {
            "kind": _KIND,
            "schema_version": _SCHEMA_VERSION,
            **facts,
            "page_tokens": PAGE_TOKENS,
            "dtype": str(tensors[0].dtype),
            "device": tensors[0].device.type,
            "rows": [list(rows.shape[1:]) for rows in tensors],
        }

    def save(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Write the pages with these hashes; without any the earlier file stays.

        Raises:
            MoetoolError: disk or memory failed, or another server writes the file. The earlier one stays intact.
        """
        hashes, pages = hashes[-_MOST_PAGES:], pages[-_MOST_PAGES:]
        if not pages:
            return
        head = json.dumps({**self._facts, "hashes": [one.hex() for one in hashes]}).encode() + b"\n"
        try:
            with durable.alone(self.path), durable.staged_file(self.path) as partial, partial.open("wb") as file:
                partial.chmod(0o600)
                digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
                file.write(head)
                for rows in self._tensors:
                    by_page = rows.view(-1, PAGE_TOKENS * rows[0].numel())
                    for begin, end in _blocks(rows, len(pages)):
                        chosen = by_page[torch.tensor(pages[begin:end], device=rows.device)].cpu()
                        content = chosen.view(torch.uint8).numpy().data
                        digest.update(content)
                        file.write(content)
                file.write(digest.digest())
        except (OSError, RuntimeError, MemoryError) as error:
            raise MoetoolError(f"cannot keep the prefixes in {self.path}: {first_line(error)}") from error

    def load(self, most_pages: int) -> list[bytes]:
        """Read pages into those from 1 on, the last ones of the file if it has more than fit.

        Returns:
            Their hashes; empty without a file.

        Raises:
            MismatchError: the file is damaged, or of another checkpoint, data type or layout.
            MoetoolError: it cannot be read.
        """
        try:
            num_bytes = require_regular(self.path)
            with self.path.open("rb") as file:
                return self._read(file, num_bytes, most_pages)
        except FileNotFoundError:
            return []
        except RecursionError as error:
            raise MismatchError(f"the prefixes in {self.path} are damaged ({first_line(error)})") from None
        except (OSError, RuntimeError, MemoryError) as error:
            raise MoetoolError(f"the prefixes in {self.path} cannot be read ({first_line(error)})") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MismatchError(f"the prefixes in {self.path} are damaged ({first_line(error)})") from None

    def _read(self, file: BinaryIO, num_bytes: int, most_pages: int) -> list[bytes]:
        line = file.readline(_MOST_HEADER)
        found: dict[str, Any] = json.loads(line)
        hashes = [bytes.fromhex(one) for one in found.pop("hashes")]
        for name, expected in self._facts.items():
            if (other := found.get(name)) != expected:
                raise MismatchError(f"the prefixes in {self.path} have {name} {shortened(other)}, expected {expected}")
        if any(len(one) * 2 != _HASH_DIGITS for one in hashes):
            raise ValueError("a hash has another length")
        page_bytes = sum(PAGE_TOKENS * rows[0].nbytes for rows in self._tensors)
        if num_bytes != (expected := len(line) + len(hashes) * page_bytes + _DIGEST_BYTES):
            raise ValueError(f"it has {num_bytes} bytes, expected {expected}")
        skipped = max(0, len(hashes) - most_pages)
        digest = hashlib.blake2b(line, digest_size=_DIGEST_BYTES)
        for rows in self._tensors:
            for begin, end in _blocks(rows, len(hashes)):
                content = bytearray(file.read((end - begin) * PAGE_TOKENS * rows[0].nbytes))
                digest.update(content)
                kept = torch.frombuffer(content, dtype=rows.dtype).view(-1, *rows.shape[1:])
                kept = kept[max(0, skipped - begin) * PAGE_TOKENS :]
                row = (1 + max(0, begin - skipped)) * PAGE_TOKENS
                rows[row : row + len(kept)] = kept.to(rows.device)
        if file.read(_DIGEST_BYTES + 1) != digest.digest():
            raise ValueError("its digest is another")
        return hashes[skipped:]


def _blocks(rows: torch.Tensor, num_pages: int) -> list[tuple[int, int]]:
    """Begin and end of the pages of a layer that are copied at a time."""
    size = max(1, BLOCK_BYTES // (PAGE_TOKENS * rows[0].nbytes))
    return [(begin, min(begin + size, num_pages)) for begin in range(0, num_pages, size)]
