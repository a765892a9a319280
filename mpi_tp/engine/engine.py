"""Requests in, completions out, on rank 0; the other ranks follow the plans that it broadcasts.

The life of a request: `submit` checks it and queues one sequence a sample; at each `step` the scheduler picks the
tokens that run, every rank runs them, rank 0 samples from the gathered logits and appends; a finished sequence gives
its cache blocks back; when all of a request's samples are done, `step` returns its outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_tp.comm.base import Communicator
from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.engine.prompt import Prompt, encode_prompt
from mpi_tp.engine.request import Completion, RequestError, SamplingParams
from mpi_tp.engine.runner import Runner
from mpi_tp.engine.sampler import choose_token, log_probability
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.engine.sequence import Sequence
from mpi_tp.engine.step import StepPlan, plan_step
from mpi_tp.engine.stop import StopWatcher
from mpi_tp.tokenizer import Tokenizer


@dataclass(frozen=True)
class Outcome:
    """What became of the request that was submitted under `key`: its completions, or why there are none."""

    key: Any
    prompt_tokens: int
    completions: list[Completion]
    error: RequestError | None = None


class Engine:
    """Rank 0's side of continuous batching."""

    def __init__(
        self,
        comm: Communicator,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        context_length: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._comm = comm
        self._runner = runner
        self._scheduler = scheduler
        self.tokenizer = tokenizer
        self._context_length = context_length
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._samples: dict[Any, list[Sequence]] = {}
        self.num_sampled = 0
        """Tokens generated so far."""

    @property
    def num_waiting(self) -> int:
        """How many sequences have not started."""
        return self._scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether every submitted request has its outcome."""
        return self._scheduler.is_idle

    def submit(self, key: Any, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt under a `key` that no request in flight has.

        Raises RequestError if it cannot be encoded, is empty, holds ids outside the vocabulary, fills the context,
        needs more cache than there is, or asks for stop strings of a model without tokenizer.
        """
        prompt_ids = encode_prompt(prompt, self.tokenizer, self._context_length)
        self._check(prompt_ids, params)
        max_length = self._max_length(prompt_ids, params)
        sequences = [
            Sequence(params, sample, list(prompt_ids), len(prompt_ids), max_length, key) for sample in range(params.n)
        ]
        if params.stop and self.tokenizer:
            for sequence in sequences:
                sequence.stop_watcher = StopWatcher(self.tokenizer, params.stop)
        self._samples[key] = sequences
        self._scheduler.add(sequences)

    def step(self) -> list[Outcome]:
        """Run one step on all ranks and return what it finished."""
        chunks = self._scheduler.schedule()
        logits = self._announce(plan_step(chunks, BLOCK_SIZE))
        sampled = [chunk.sequence for chunk in chunks if chunk.ends_sequence]
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
        for sequence, row in zip(sampled, logits, strict=True):
            self._append(sequence, row)
        return self._collect(self._scheduler.retire_finished())

    def keep_alive(self) -> None:
        """Run a step without tokens, so that the other ranks see that rank 0 lives while it waits for input."""
        self._announce(plan_step([], BLOCK_SIZE))

    def close(self) -> None:
        """Release the other ranks from `follow`."""
        self._comm.bcast_object(None)

    def _announce(self, plan: StepPlan) -> NDArray[np.float32]:
        self._comm.bcast_object(plan)
        return self._runner.run(plan).float().cpu().numpy()

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if not prompt_ids:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        wrong = next((token for token in prompt_ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise RequestError("unknown_token", f"token id {wrong} is not in the vocabulary of {self._vocab_size}")
        if len(prompt_ids) >= self._context_length:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self._context_length} with the answer",
            )
        max_length = self._max_length(prompt_ids, params)
        if not self._scheduler.fits(max_length):
            raise RequestError(
                "cache_too_small",
                f"prompt and answer may take {max_length} tokens, more than the key/value cache holds: "
                "raise --kv-memory or lower max_new_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("no_tokenizer", "stop strings need a tokenizer, and the shard set has none")

    def _max_length(self, prompt_ids: list[int], params: SamplingParams) -> int:
        return min(len(prompt_ids) + params.max_new_tokens, self._context_length)

    def _append(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        if not np.isfinite(logits.max()):
            sequence.failure = "the model's logits are not finite numbers"
            return
        params = sequence.params
        token = choose_token(logits, params, sequence.sample, position=len(sequence.tokens))
        sequence.tokens.append(token)
        self.num_sampled += 1
        if params.logprobs:
            sequence.logprobs.append(log_probability(logits, token))
        if token in self._eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) == sequence.max_length:
            sequence.finish_reason = "length"
        watcher = sequence.stop_watcher
        if watcher and (watcher.stops_at(token) or (sequence.is_finished and watcher.stops_at_end())):
            sequence.finish_reason = "stop"
            sequence.stopped_text = watcher.text

    def _collect(self, finished: list[Sequence]) -> list[Outcome]:
        """Return the outcomes of the requests whose last samples are among the finished."""
        keys = dict.fromkeys(sequence.key for sequence in finished)
        done = [key for key in keys if all(sample.is_finished for sample in self._samples[key])]
        return [self._outcome(key, self._samples.pop(key)) for key in done]

    def _outcome(self, key: Any, samples: list[Sequence]) -> Outcome:
        failure = next((sample.failure for sample in samples if sample.failure), None)
        if failure:
            return Outcome(key, samples[0].prompt_length, [], RequestError("model_failure", failure))
        return Outcome(key, samples[0].prompt_length, [self._complete(sample) for sample in samples])

    def _complete(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        text = sequence.stopped_text
        if text is None:
            text = self.tokenizer.decode(sequence.generated) if self.tokenizer else ""
        logprobs = sequence.logprobs if sequence.params.logprobs else None
        return Completion(text, sequence.generated, sequence.finish_reason, logprobs)


def follow(comm: Communicator, runner: Runner, on_step: Callable[[], None]) -> None:
    """Run what rank 0 announces until it closes; `on_step` is called after each step."""
    while (plan := comm.bcast_object(None)) is not None:
        runner.run(plan)
        on_step()
