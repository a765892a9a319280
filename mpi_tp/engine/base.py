"""What a program may ask of an engine, whether one group of ranks serves its requests or several."""

from typing import Any, Protocol

from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.prompt import Prompt
from mpi_tp.engine.request import SamplingParams
from mpi_tp.tokenizer import Tokenizer


class ServingEngine(Protocol):
    """Requests in, outcomes out."""

    tokenizer: Tokenizer | None

    @property
    def num_sampled(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def num_waiting(self) -> int:
        """How many sequences wait to be admitted, or admitted again."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often a sequence has lost its cache blocks to older ones, so far."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether every submitted request has its outcome and no step is in flight."""
        ...

    def submit(self, key: Any, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt under a `key` that no request in flight has.

        A prompt that cannot be served raises RequestError, or has it as its outcome's error.
        """
        ...

    def cancel(self, key: Any) -> None:
        """Drop a request, which then has no outcome; nothing happens if it has had it already."""
        ...

    def step(self) -> list[Outcome]:
        """Go on for a step; return the outcomes that are known by now."""
        ...

    def keep_alive(self) -> None:
        """Let the other ranks see that rank 0 lives while it waits for input."""
        ...

    def close(self) -> None:
        """Release the other ranks."""
        ...
