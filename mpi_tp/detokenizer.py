"""Text that grows token by token: the incremental detokenizer and the search for stop strings."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns token ids, one at a time, into pieces of text that later tokens cannot change.

    The pieces joined equal the decoding of all ids at once.

    A token's text depends on its neighbours: a character may be spread over several tokens, and SentencePiece drops
    the space before the first word. So a short window of tokens is decoded with and without the newest ones, and
    the difference is the new text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], hidden_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        """`decode` gives the text of a list of ids, and none for those in `hidden_ids`.

        `byte_ids` are the ids of byte-fallback tokens, as `<0x0A>`.
        """
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._num_final = 0  # tokens of the window whose text has been returned

    def add(self, token_id: int) -> str:
        """Take the next id; return the text that has become final, often one word, sometimes nothing."""
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        # The bytes of a run of byte tokens become text together, or not at all.
        if token_id in self._byte_ids:
            return ""
        text = self._new_text()
        # It may be half a character; a token that really says U+FFFD waits for its successor too.
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._window = self._window[self._num_final :]
        self._num_final = len(self._window)
        return text

    def finish(self) -> str:
        """Return the text still held back; what is half a character by now stays one and shows as U+FFFD."""
        text = self._new_text()
        self._window, self._num_final = [], 0
        return text

    def _new_text(self) -> str:
        known = self._decode(self._window[: self._num_final])
        return self._decode(self._window)[len(known) :]


class StopChecker:
    """Cuts a growing text before the first stop string, and holds back what may become one.

    Of several stop strings the one that is complete first counts, so that the cut does not depend on how the text
    comes in pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop` holds no empty strings; it may be empty itself."""
        self._stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Take the next piece of text; return the text that now surely stands before any stop string.

        Once `stopped` is true, the text returned so far is whole, and further pieces give nothing.
        """
        if self.stopped:
            return ""
        self._pending += piece
        found = [(at + len(stop), at) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        self.stopped = bool(found)
        cut = min(found)[1] if found else len(self._pending) - self._num_held()
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _num_held(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0
