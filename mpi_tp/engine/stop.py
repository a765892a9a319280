"""Ending a sequence at a stop string."""

from mpi_tp.detokenizer import StopChecker
from mpi_tp.tokenizer import Tokenizer


class StopWatcher:
    """Follows one sequence's text, token by token, until it holds a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._checker = StopChecker(stop)
        self._pieces: list[str] = []

    def stops_at(self, token: int) -> bool:
        """Take the next token; say whether the text now holds a stop string."""
        self._pieces.append(self._checker.add(self._detokenizer.add(token)))
        return self._checker.stopped

    def stops_at_end(self) -> bool:
        """Take the end of the text, which may free single bytes; say whether it now holds a stop string."""
        self._pieces.append(self._checker.add(self._detokenizer.finish()))
        return self._checker.stopped

    @property
    def text(self) -> str:
        """The text before the stop string."""
        return "".join(self._pieces)
