"""Text for training: a folder with one file per domain, its documents separated by `<|endoftext|>`.

Documents, not lines, are held out, chosen by their hash: a document and all its copies are on the same side in every
run. A file in which no hash falls below the share still holds out one document, whose copies in other files are trained
on. The tokens of a step depend only on the seed and the step, so a killed run can resume exactly.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.errors import UsageError

SEPARATOR = "<|endoftext|>"

_AT_ONCE = 64  # documents per call of the tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The text of one file.

    Attributes:
        name: the file's name without its ending.
        sha256: digest of the file.
        num_bytes: size of the file.
        num_documents: number of documents, held-out ones included, copies counted once.
        num_held_out: number of held-out documents.
        train_N: token ids of the training documents, each ended by the separator's.
        held_out_N: token ids of the held-out documents.
    """

    name: str
    sha256: str
    num_bytes: int
    num_documents: int
    num_held_out: int
    train_N: np.ndarray
    held_out_N: np.ndarray

    def windows(self, length: int) -> int:
        """Return the number of sequences of `length` + 1 tokens in the training text."""
        return (len(self.train_N) - 1) // length


def read_domains(
    folder: Path, tokenizer: Any, held_out: float, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Domain]:
    """Read and tokenize every `.txt` file of a folder, by name.

    Args:
        tokenizer: a tokenizer of transformers with the token `<|endoftext|>`.
        held_out: share of each file's documents to hold out.
        on_progress: called with the bytes read so far and the total.

    Raises:
        UsageError: no such folder, no text in it, a file that is not UTF-8 or holds fewer than two documents, or a
            tokenizer without the separator.
    """
    end = separator_id(tokenizer)
    files = text_files(folder)
    total, done = sum(file.stat().st_size for file in files), 0
    domains = []
    for file in files:
        content = file.read_bytes()
        documents = split_documents(content, file)
        held, train = hold_out(documents, held_out)
        domains.append(
            Domain(
                name=file.stem,
                sha256=hashlib.sha256(content).hexdigest(),
                num_bytes=len(content),
                num_documents=len(documents),
                num_held_out=len(held),
                train_N=_encode(train, tokenizer, end),
                held_out_N=_encode(held, tokenizer, end),
            )
        )
        done += len(content)
        on_progress(done, total)
    return domains


def training_documents(folder: Path, held_out: float) -> Iterator[str]:
    """Yield the training documents of every domain.

    Raises:
        UsageError: as `read_domains`.
    """
    for file in text_files(folder):
        yield from hold_out(split_documents(file.read_bytes(), file), held_out)[1]


def text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder, by name.

    Raises:
        UsageError: there are none.
    """
    if not folder.is_dir():
        raise UsageError(f"no directory {folder}; --data takes a directory of .txt files, one per domain")
    files = sorted(file for file in folder.glob("*.txt") if file.is_file())
    if not files:
        raise UsageError(f"{folder} holds no .txt file; --data takes a directory of them, one per domain")
    return files


def separator_id(tokenizer: Any) -> int:
    """Return the separator's token id.

    Raises:
        UsageError: the tokenizer has none.
    """
    found = tokenizer.convert_tokens_to_ids(SEPARATOR)
    if found is None or tokenizer.convert_ids_to_tokens(found) != SEPARATOR:
        raise UsageError(f"the tokenizer has no token {SEPARATOR}; start --from a checkpoint that has it")
    return int(found)


def split_documents(content: bytes, file: Path) -> list[str]:
    """Return the distinct documents of a file, in order.

    Raises:
        UsageError: the file is not UTF-8, or has fewer than two documents, so that none can be held out.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from None
    parts = (part.strip("\r\n") for part in text.split(SEPARATOR))
    documents = list(dict.fromkeys(part for part in parts if part.strip()))
    if len(documents) < 2:
        raise UsageError(
            f"{file} holds {len(documents)} different documents, expected at least 2, one of them to hold out; "
            f"separate them by {SEPARATOR}"
        )
    return documents


def hold_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Return the held-out and the training documents, at least one of each, in the order of their hashes.

    The order of hashes is unrelated to the file's, so neighbours in the file do not stay neighbours.
    """
    hashed = sorted((hashlib.sha256(document.encode("utf-8")).digest(), document) for document in documents)
    below = sum(int.from_bytes(digest[:8], "big") < share * 2**64 for digest, _ in hashed)
    count = min(max(below, 1), len(hashed) - 1)
    return [document for _, document in hashed[:count]], [document for _, document in hashed[count:]]


def _encode(documents: list[str], tokenizer: Any, end: int) -> np.ndarray:
    pieces = []
    for start in range(0, len(documents), _AT_ONCE):
        encoded = tokenizer(documents[start : start + _AT_ONCE], add_special_tokens=False, verbose=False)
        pieces += [np.array([*ids, end], dtype=np.int32) for ids in encoded["input_ids"]]
    return np.concatenate(pieces)


class TextBatches:
    """Batches of rows of `length` + 1 tokens, drawn from the domains.

    A domain's rows use each of its windows once, in a random order, before any is used again.

    Attributes:
        share_D: each domain's share of the rows.
        domain_N, window_N: domain and window of every row of the run.
    """

    def __init__(
        self, domains: Sequence[Domain], *, length: int, batch_size: int, steps: int, mixing: float, seed: int
    ) -> None:
        """Assign the rows of all steps.

        Raises:
            UsageError: a domain does not fill one row.
        """
        for domain in domains:
            if not domain.windows(length):
                raise UsageError(
                    f"{domain.name} has {len(domain.train_N)} tokens to train on, expected at least {length + 1}; add "
                    f"text, or make the sequences shorter, --set fit.sequence_length={max(2, len(domain.train_N) // 2)}"
                )
        self.domains, self.length, self.batch_size = domains, length, batch_size
        size_D = np.array([domain.windows(length) for domain in domains], dtype=np.float64) ** mixing
        self.share_D = size_D / size_D.sum()
        rows = steps * batch_size
        self.domain_N = np.random.default_rng(seed).choice(len(domains), size=rows, p=self.share_D).astype(np.int32)
        self.window_N = np.empty(rows, dtype=np.int64)
        for number, domain in enumerate(domains):
            of_domain = np.flatnonzero(self.domain_N == number)
            order = np.random.default_rng([seed, number])
            turns = -(-len(of_domain) // domain.windows(length))
            windows = [order.permutation(domain.windows(length)) for _ in range(turns)]
            self.window_N[of_domain] = np.concatenate([*windows, np.empty(0, np.int64)])[: len(of_domain)]

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of a step, counted from 0: int64 [B, length + 1]."""
        chosen = range(step * self.batch_size, (step + 1) * self.batch_size)
        starts = [(self.domains[self.domain_N[i]].train_N, self.window_N[i] * self.length) for i in chosen]
        return np.stack([tokens_N[at : at + self.length + 1] for tokens_N, at in starts]).astype(np.int64)


def held_out_rows(domain: Domain, length: int, max_tokens: int) -> np.ndarray:
    """Return rows of a domain's held-out text, evenly spaced, each for `length` predictions.

    Shapes: int64 [R, length + 1], or one shorter row if the text does not fill one.
    """
    tokens_N = domain.held_out_N
    if len(tokens_N) <= length:
        return tokens_N[None].astype(np.int64)
    windows = (len(tokens_N) - 1) // length
    count = min(windows, max(1, max_tokens // length))
    starts = ((np.arange(count) + 0.5) * windows / count).astype(np.int64) * length
    return np.stack([tokens_N[at : at + length + 1] for at in starts]).astype(np.int64)
