"""The text of one sequence, and where a stop string ends it."""

from collections.abc import Sequence

from mpi_tp.detokenizer import StopChecker
from mpi_tp.tokenizer import Tokenizer


class TextStream:
    """A sequence's text: followed token by token if a stop string may end it, else decoded at the end."""

    def __init__(self, tokenizer: Tokenizer | None = None, stop: Sequence[str] = ()) -> None:
        """Without a tokenizer the text is empty, and there may be no stop strings."""
        self._tokenizer = tokenizer
        self._checker = StopChecker(stop)
        self._pieces: list[str] = []
        if tokenizer and stop:
            self._detokenizer = tokenizer.detokenizer()

    def stops_at(self, token: int, is_last: bool) -> bool:
        """Take the next token of a text with stop strings; say whether it now holds one.

        The last token may free bytes that were held back.
        """
        piece = self._detokenizer.add(token)
        if is_last:
            piece += self._detokenizer.finish()
        self._pieces.append(self._checker.add(piece))
        return self._checker.stopped

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens, up to the stop string if there is one."""
        if self._checker.stopped:
            return "".join(self._pieces)
        return self._tokenizer.decode(tokens) if self._tokenizer else ""
