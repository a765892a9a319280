"""Inference from a script that the user starts under mpirun.

Every rank runs the same lines:

    from mpi_tp import LLM, SamplingParams

    llm = LLM("shards")
    outcomes = llm.generate(["The capital of France is"], SamplingParams(max_new_tokens=8))
    if llm.rank == 0:
        print(outcomes[0].completions[0].text)
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpi_tp import launch
from mpi_tp.config import ModelConfig
from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.prompt import Prompt
from mpi_tp.engine.request import RequestError, SamplingParams
from mpi_tp.errors import ConfigurationError, UsageError
from mpi_tp.machine_options import MachineOptions
from mpi_tp.models.families import parse_config
from mpi_tp.session import open_engine, open_runner, open_session, open_shards


class LLM:
    """A language model over the ranks of `mpirun`; making one and each `generate` is collective.

    A multiple of the shard set's ranks shares the prompts between as many replicas of the model.

    The keyword arguments are `mpi_tp.machine_options.MachineOptions`'. An uncaught exception on one rank ends all of
    them, and so do `stall_timeout` seconds without a step while a prompt runs.
    Raises UsageError, FileError and ConfigurationError as `mpi_tp.infer` does.
    """

    def __init__(self, shards: str | Path, *, stall_timeout: float = 300.0, **machine: Any) -> None:
        self._job = launch.join(stall_timeout)
        options = MachineOptions(**machine)
        opened = open_shards(self._job, Path(shards), options.tensor_parallel)
        config = parse_config(opened.config)
        if not isinstance(config, ModelConfig):
            raise ConfigurationError(f"{shards} holds a model of type {config.model_type}: LLM needs a language model")
        session = open_session(self._job, opened, options)
        self._engine, self._follow = open_engine(session, open_runner(session))

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._job.rank

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Outcome]:
        """Return each prompt's outcome, in order, on every rank; one that cannot be served has its `error` set.

        `params` are for all prompts or one each; prompt i's seed is that of the common ones plus i. Raises UsageError
        if there are more or fewer of them than prompts.
        """
        own_params = _per_prompt(params, len(prompts))
        self._job.leave_together()  # the script on another rank may take longer to come here than a step may
        with self._job.phase("generating"):
            if self._engine:
                outcomes = self._lead(self._engine, prompts, own_params)
                self._engine.close()
            else:
                outcomes = []
                self._follow(self._job.progress)
            result: list[Outcome] = self._job.world.bcast(outcomes)
        return result

    def _lead(
        self, engine: ServingEngine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for key, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                engine.submit(key, prompt, own)
            except RequestError as error:
                outcomes[key] = Outcome(key, 0, [], error)
        while not engine.is_idle:
            outcomes |= {outcome.key: outcome for outcome in engine.step()}
            self._job.progress()
        return [outcomes[key] for key in range(len(prompts))]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        common = params or SamplingParams()
        return [dataclasses.replace(common, seed=common.seed + index) for index in range(count)]
    if len(params) != count:
        raise UsageError(
            f"{count} prompts came with {len(params)} sampling parameters: give one for each, or one for all"
        )
    return params
