"""What an input line becomes: a prompt with its sampling options, or the reason why it cannot be served."""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from mpi_tp.engine.request import SamplingParams

Format = Literal["native", "openai"]
JsonObject = dict[str, Any]
LineId = str | int | float | bool | None


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | list[Message] | list[int]


class LineError(ValueError):
    """One line cannot be served; `type` is a word for programs, the message is for people."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be served; it gets an error record in its place."""

    number: int
    id: LineId
    type: str
    message: str
    format: Format = "native"


@dataclass(frozen=True)
class InputLine:
    """A line to be served.

    `number` is the line's 1-based place in its file, blank lines counted. `prompt` is text, messages for the chat
    template, or token ids. `format` is the one of the answer; `model` is the name that an OpenAI line asked for.
    """

    number: int
    id: LineId
    prompt: Prompt
    params: SamplingParams
    format: Format = "native"
    model: str = ""

    def refused(self, type: str, message: str) -> BadLine:
        """Return this line as one that cannot be served after all, for example for its length."""
        return BadLine(self.number, self.id, type, message, self.format)


Line = InputLine | BadLine
