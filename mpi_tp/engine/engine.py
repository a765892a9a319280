"""Requests in, completions out, on rank 0; the other ranks follow the plans that it broadcasts.

The life of a request: `submit` checks it and queues one sequence a sample; at each `step` the scheduler picks the
tokens that run and every rank launches them; the tokens that come back, at once or while the next step runs already,
are appended; a finished sequence gives its cache blocks back; when all of a request's samples are done, `step`
returns its outcome.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi_tp.comm.base import Communicator
from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.engine.prompt import Prompt, encode_prompt
from mpi_tp.engine.request import Completion, RequestError, SamplingParams
from mpi_tp.engine.runner import Runner, Sampled, StepOutput
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.engine.sequence import Chunk, Sequence
from mpi_tp.engine.step import StepPlan, plan_step
from mpi_tp.engine.text_stream import TextStream
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
        self._in_flight: deque[tuple[list[Sequence], StepOutput]] = deque()
        self.num_sampled = 0
        """Tokens generated so far."""

    @property
    def num_waiting(self) -> int:
        """How many sequences wait to be admitted, or admitted again."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """How many sequences are admitted."""
        return self._scheduler.num_running

    @property
    def num_preemptions(self) -> int:
        """How often a sequence has lost its cache blocks to older ones, so far."""
        return self._scheduler.num_preemptions

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens found computed in the cache, so far."""
        return self._scheduler.prefix_hit_tokens

    @property
    def blocks_in_use(self) -> int:
        """How many blocks of the cache sequences hold."""
        return self._scheduler.blocks_in_use

    @property
    def is_idle(self) -> bool:
        """Whether every submitted request has its outcome and no step is in flight."""
        return self._scheduler.is_idle and not self._in_flight

    def submit(self, key: Any, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt under a `key` that no request in flight has.

        Raises RequestError if it cannot be encoded, is empty, holds ids outside the vocabulary, fills the context,
        needs more cache than there is, or asks for stop strings of a model without tokenizer.
        """
        prompt_ids = encode_prompt(prompt, self.tokenizer, self._context_length)
        self._check(prompt_ids, params)
        max_length = self._max_length(prompt_ids, params)
        sequences = [
            Sequence(
                params,
                sample,
                list(prompt_ids),
                len(prompt_ids),
                max_length,
                key,
                TextStream(self.tokenizer, params.stop),
            )
            for sample in range(params.n)
        ]
        self._samples[key] = sequences
        self._scheduler.add(sequences)

    def cancel(self, key: Any) -> None:
        """Drop a request, which then has no outcome; nothing happens if it has had it already."""
        sequences = [sample for sample in self._samples.pop(key, []) if not sample.is_finished]
        for sequence in sequences:
            sequence.is_finished = True
        self._scheduler.remove(sequences)

    def step(self) -> list[Outcome]:
        """Launch one step on all ranks; return what those have finished whose tokens are known by now."""
        chunks = self._scheduler.schedule()
        if chunks:
            self._in_flight.append(self._launch(chunks))
        outcomes: list[Outcome] = []
        while len(self._in_flight) > (self._runner.steps_in_flight if chunks else 0):
            sequences, output = self._in_flight.popleft()
            outcomes += self._take(sequences, output.wait())
        return outcomes

    def keep_alive(self) -> None:
        """Run a step without tokens, so that the other ranks see that rank 0 lives while it waits for input."""
        assert not self._in_flight, "a step in flight keeps the ranks alive"
        self._announce(plan_step([], BLOCK_SIZE))

    def close(self) -> None:
        """Release the other ranks from `follow`."""
        self._comm.bcast_object(None)

    def _launch(self, chunks: list[Chunk]) -> tuple[list[Sequence], StepOutput]:
        """Return the sequences that get a token, and what will hold the tokens."""
        output = self._announce(plan_step(chunks, BLOCK_SIZE))
        return [chunk.sequence for chunk in chunks if chunk.ends_sequence], output

    def _announce(self, plan: StepPlan) -> StepOutput:
        self._comm.bcast_object(plan)
        return self._runner.launch(plan)

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
                f"prompt and answer may take {max_length} tokens and the key/value cache holds "
                f"{self._scheduler.capacity}: raise --kv-memory or lower max_new_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("no_tokenizer", "stop strings need a tokenizer, and the shard set has none")

    def _max_length(self, prompt_ids: list[int], params: SamplingParams) -> int:
        return min(len(prompt_ids) + params.max_new_tokens, self._context_length)

    def _take(self, sequences: list[Sequence], sampled: Sampled) -> list[Outcome]:
        """Append a step's tokens to their sequences; return the outcomes of the requests that are complete by this."""
        logprobs = [None] * len(sequences) if sampled.logprobs is None else sampled.logprobs.tolist()
        finished: list[Sequence] = []
        for sequence, token, logprob in zip(sequences, sampled.tokens.tolist(), logprobs, strict=True):
            if sequence.is_finished:
                continue  # while this step was on its way, by the token before or by `cancel`
            self._append(sequence, token, logprob)
            if sequence.is_finished:
                finished.append(sequence)
        if not finished:
            return []
        self._scheduler.remove(finished)
        keys = dict.fromkeys(sequence.key for sequence in finished)
        done = [key for key in keys if all(sample.is_finished for sample in self._samples[key])]
        return [self._outcome(key, self._samples.pop(key)) for key in done]

    def _append(self, sequence: Sequence, token: int, logprob: float | None) -> None:
        if token < 0:
            sequence.failure = "the model's logits are not finite numbers"
            sequence.is_finished = True
            return
        params = sequence.params
        sequence.tokens.append(token)
        self.num_sampled += 1
        if logprob is not None and params.logprobs:
            sequence.logprobs.append(logprob)
        if token in self._eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) == sequence.max_length:
            sequence.finish_reason = "length"
        if params.stop and sequence.text.stops_at(token, is_last=sequence.finish_reason is not None):
            sequence.finish_reason = "stop"
        sequence.is_finished = sequence.finish_reason is not None

    def _outcome(self, key: Any, samples: list[Sequence]) -> Outcome:
        failure = next((sample.failure for sample in samples if sample.failure), None)
        if failure:
            return Outcome(key, samples[0].prompt_length, [], RequestError("model_failure", failure))
        return Outcome(key, samples[0].prompt_length, [self._complete(sample) for sample in samples])

    def _complete(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        generated = sequence.generated
        logprobs = sequence.logprobs if sequence.params.logprobs else None
        return Completion(sequence.text.finish(generated), generated, sequence.finish_reason, logprobs)


def follow(comm: Communicator, runner: Runner, on_step: Callable[[], None]) -> None:
    """Run what rank 0 announces until it closes; `on_step` is called after each step."""
    while (plan := comm.bcast_object(None)) is not None:
        runner.launch(plan)
        on_step()
