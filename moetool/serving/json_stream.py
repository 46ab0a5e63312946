"""Incremental text, and JSON values in it."""

from collections.abc import Generator


class Malformed(Exception):
    """The text does not follow the format."""


def as_unicode(text: str) -> str:
    """Return a text with a replacement for each half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class TextBuffer:
    """Text that has arrived and was not consumed yet.

    Attributes:
        ended: whether the text is complete.
    """

    def __init__(self) -> None:
        self._text = ""
        self._taken = ""
        self.ended = False

    def add(self, text: str, *, last: bool) -> None:
        self._text += text
        self.ended = self.ended or last

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, at: int) -> str:
        return self._text[at]

    def find(self, mark: str) -> int:
        """Return the start of a mark; -1 if absent."""
        return self._text.find(mark)

    def starts(self, mark: str) -> bool | None:
        """Whether the text begins with a mark; None while undecided."""
        if self._text.startswith(mark):
            return True
        return None if not self.ended and mark.startswith(self._text) else False

    def take(self, count: int | None = None) -> str:
        """Remove and return this many characters, or all."""
        count = len(self._text) if count is None else count
        taken, self._text = self._text[:count], self._text[count:]
        self._taken += taken
        return taken

    def certain(self, *marks: str, spaces: bool = False) -> int:
        """Return the length of the text that cannot begin a mark; with `spaces`, without trailing spaces."""
        longest = max(map(len, marks))
        size = len(self._text)
        for start in range(max(0, size - longest + 1), size):
            if any(mark.startswith(self._text[start:]) for mark in marks):
                size = start
                break
        return len(self._text[:size].rstrip()) if spaces else size

    def remember(self) -> None:
        """Begin to record consumed text."""
        self._taken = ""

    def remembered(self) -> str:
        return self._taken


def next_char(feed: TextBuffer) -> Generator[None, None, str]:
    """Peek at the next character that is not a space; empty at the end."""
    while True:
        count = 0
        while count < len(feed) and feed[count].isspace():
            count += 1
        feed.take(count)
        if len(feed) or feed.ended:
            return feed[0] if len(feed) else ""
        yield None


def expect(feed: TextBuffer, mark: str) -> Generator[None, None, bool]:
    """Consume a mark and spaces before it if it is next; return whether it was."""
    yield from next_char(feed)
    while (found := feed.starts(mark)) is None:
        yield None
    if found:
        feed.take(len(mark))
    return found


def until(feed: TextBuffer, mark: str, *, keep: bool = False) -> Generator[None, None, str]:
    """Consume the text up to a mark, and the mark unless `keep`. Raises: Malformed where the text ends first."""
    while (at := feed.find(mark)) < 0:
        if feed.ended:
            raise Malformed
        yield None
    text = feed.take(at)
    if not keep:
        feed.take(len(mark))
    return text


def json_value(feed: TextBuffer) -> Generator[str | None, None, None]:
    """Yield one JSON value in pieces; an incomplete one at the end is yielded as far as it goes."""
    depth, quoted, escaped, begun = 0, False, False, False
    while True:
        at = 0
        while at < len(feed):
            char = feed[at]
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
                closes = not quoted and depth == 0
            elif depth == 0 and begun and (char in ",]}:;<" or char.isspace()):
                yield feed.take(at)
                return
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
                closes = char in "}]" and depth == 0
            begun, at = True, at + 1
            if closes:
                yield feed.take(at)
                return
        yield feed.take()
        if feed.ended:
            return
        yield None
