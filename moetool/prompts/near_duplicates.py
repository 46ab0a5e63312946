"""Detection of texts that repeat an earlier one, exactly or nearly: MinHash finds candidates, shingles decide.

Texts are exact duplicates if they are equal after Unicode's compatibility folding, in lower case, with runs of white
space as one space. They are near duplicates if their sets of shingles (three successive tokens) have at least a given
Jaccard similarity |a ∩ b| / |a ∪ b|. A token is a word, one Chinese, Japanese or Korean character, or the characters
between two words of a line. ASCII drawings therefore differ if their lines do.

Source: Broder, "On the resemblance and containment of documents" (1997), with bands as in Leskovec et al., "Mining of
Massive Datasets", § 3.4. 20 bands of 6 rows find a pair of similarity s with probability 1 - (1 - s^6)^20: 99.8 % at
0.8, 62 % at 0.6. Candidates are then compared by all shingles, so a false duplicate needs equal checksums, with
probability about 2^-32 for each pair of shingles. Deviation: a band keeps its first 64 texts, and only the 32
candidates with the most similar signatures are compared. Some duplicates may therefore remain among thousands of texts
that share most of their words.
"""

import hashlib
import random
import re
import unicodedata
import zlib

import numpy as np

from moetool.base.errors import UsageError

SIMILARITY = 0.8
_BANDS, _ROWS = 20, 6
_SHINGLE_TOKENS = 3
_CHUNK = 1 << 14
# Candidates whose signatures agree by this much less than required are skipped: 3 standard deviations of 120 hashes.
_SLACK = 0.12
# Thousands of prompts may share one long instruction. These two limits keep the time per prompt constant.
_ALIKE = 64
_COMPARED = 32
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s](?:[^\w\n]*[^\w\s])?")


class NearDuplicates:
    """Stores texts and detects later ones that repeat them.

    A stored text takes 4 bytes per shingle and about 3 kB more.

    Attributes:
        similarity: minimum Jaccard similarity of near duplicates, above 0; 1 requires the same set of shingles.

    Raises:
        UsageError: the similarity is not in (0, 1].
    """

    def __init__(self, similarity: float = SIMILARITY) -> None:
        if not 0 < similarity <= 1:
            raise UsageError(
                f"similarity is {similarity}, expected above 0 and at most 1; leave it out for {SIMILARITY}"
            )
        self.similarity = similarity
        self.num_exact = self.num_near = 0
        self._digests: set[bytes] = set()
        self._shingles: list[np.ndarray] = []
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        generator = random.Random(0)
        self._factors_P, self._terms_P = (
            np.array([generator.getrandbits(64) | 1 for _ in range(_BANDS * _ROWS)], np.uint64) for _ in range(2)
        )

    def repeats(self, text: str) -> bool:
        """Return whether a text repeats an earlier one. Effects: counts a duplicate, and stores any other text."""
        folded = unicodedata.normalize("NFKC", text).casefold()
        digest = hashlib.blake2b(" ".join(folded.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._digests:
            self.num_exact += 1
            return True
        self._digests.add(digest)
        shingles = _shingles(folded)
        signature_P = self._signature(shingles)
        keys = [(band, signature_P[band * _ROWS : (band + 1) * _ROWS].tobytes()) for band in range(_BANDS)]
        candidates = np.array(sorted({number for key in keys for number in self._bands.get(key, ())}), np.int64)
        if len(candidates) and self._has_like(candidates, shingles, signature_P):
            self.num_near += 1
            return True
        for key in keys:
            alike = self._bands.setdefault(key, [])
            if len(alike) < _ALIKE:
                alike.append(len(self._shingles))
        self._shingles.append(shingles)
        self._signatures.append(signature_P)
        return False

    def _has_like(self, candidates: np.ndarray, shingles: np.ndarray, signature_P: np.ndarray) -> bool:
        signatures_NP = np.stack([self._signatures[number] for number in candidates])
        agree_N = (signatures_NP == signature_P).mean(axis=1)
        likely = candidates[agree_N >= self.similarity - _SLACK]
        agree_N = agree_N[agree_N >= self.similarity - _SLACK]
        for number in likely[np.argsort(-agree_N, kind="stable")[:_COMPARED]]:
            earlier = self._shingles[number]
            common = len(np.intersect1d(shingles, earlier, assume_unique=True))
            if common >= self.similarity * (len(shingles) + len(earlier) - common):
                return True
        return False

    def _signature(self, shingles: np.ndarray) -> np.ndarray:
        """Return the minimum shingle under each of P random orders."""
        least_P = np.full(len(self._factors_P), np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(shingles), _CHUNK):
            values_S = shingles[start : start + _CHUNK].astype(np.uint64)
            hashed_PS = values_S[None] * self._factors_P[:, None] + self._terms_P[:, None]
            np.minimum(least_P, (hashed_PS >> np.uint64(32)).astype(np.uint32).min(axis=1), out=least_P)
        return least_P


def _shingles(text: str) -> np.ndarray:
    """Return the distinct checksums of a text's shingles, ascending; a short text is one shingle."""
    tokens = [token.encode("utf-8", "surrogatepass") for token in _TOKEN.findall(text)]
    count = max(1, len(tokens) - _SHINGLE_TOKENS + 1)
    checksums = (zlib.crc32(b"\0".join(tokens[i : i + _SHINGLE_TOKENS])) for i in range(count))
    return np.unique(np.fromiter(checksums, np.uint32, count))
