"""What makes two input lines the same question: the key by which a resumed run finds the record of a line."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mpi_tp.engine.request import SamplingParams
from mpi_tp.records.lines import BadLine, InputLine

KEY_BYTES = 16


class LineKeys:
    """Keys of lines under one model: equal keys mean equal records.

    `basis` is what the records depend on beside their lines, as JSON can hold it: the model, the kind of numerics.
    """

    def __init__(self, basis: Mapping[str, Any]) -> None:
        self._basis = hashlib.blake2b(json.dumps(basis, sort_keys=True).encode(), digest_size=KEY_BYTES)

    def of(self, line: InputLine | BadLine) -> bytes:
        """Return the key of a line: of its id, its prompt and the options in effect, wherever they were given.

        Its number counts only where the record depends on it: as the default id, in the default seed of a random
        choice, in the ids of OpenAI's format. So lines may move without being served again.
        """
        digest = self._basis.copy()
        digest.update(json.dumps(_content(line)).encode())
        return digest.digest()


def _content(line: InputLine | BadLine) -> list[Any]:
    number = line.number if line.format == "openai" else None
    if isinstance(line, BadLine):
        return ["bad", number, line.id, line.type, line.message]
    return ["good", number, line.id, line.model, line.prompt, *_in_effect(line.params)]


def _in_effect(params: SamplingParams) -> list[Any]:
    """Return the options that the record depends on: a greedy choice knows no seed."""
    choice = [params.temperature, params.top_k, params.top_p, params.seed] if params.temperature else [0]
    return [choice, params.max_new_tokens, params.n, params.stop, params.ignore_eos, params.logprobs]
