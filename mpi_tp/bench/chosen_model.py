"""The language model that is measured: a shard set's, or a shape with random weights."""

from dataclasses import dataclass

import torch

from mpi_tp.bench.random_model import open_random_session
from mpi_tp.bench.settings import ModelChoice
from mpi_tp.bench.shapes import Shape
from mpi_tp.config import ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.launch import Job
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.partition.plan import Plan, Strategy, plan_shards
from mpi_tp.replicas import check_multiple
from mpi_tp.session import Machine, Session, load_shards, open_shards
from mpi_tp.shards.reader import ShardSet


@dataclass(frozen=True)
class ChosenModel:
    """What is known before any weight is there; `source` gives the weights."""

    source: ShardSet | Shape
    config: ModelConfig
    strategy: Strategy
    dtype: torch.dtype

    @classmethod
    def open(cls, job: Job, choice: ModelChoice, tensor_parallel: int | None = None) -> "ChosenModel":
        """Open the shard set, or read the shape's config; collective.

        `tensor_parallel` is how many ranks the set must have, None if nothing is said of it.
        Raises FileError and ConfigurationError as `open_shards`, ConfigurationError if it is no language model.
        """
        if choice.shape:
            source: ShardSet | Shape = choice.shape
            strategy, dtype = choice.strategy, getattr(torch, choice.dtype)
        else:
            assert choice.shards is not None
            source = open_shards(job, choice.shards, tensor_parallel)
            strategy, dtype = source.strategy, source.weights_dtype
        config = parse_config(source.config)
        if not isinstance(config, ModelConfig):
            raise ConfigurationError(
                f"{choice.name} is a model of type {config.model_type}: this measures language models"
            )
        return cls(source, config, strategy, dtype)

    def load(self, machine: Machine) -> Session:
        """Load or make up this rank's weights; collective. Raises FileError and ConfigurationError."""
        if isinstance(self.source, ShardSet):
            return load_shards(machine, self.source)
        return open_random_session(machine, self.source, self.strategy, self.dtype)

    def replica_ranks(self, size: int, tensor_parallel: int | None) -> int:
        """Return how many of the job's `size` ranks a replica has: a set's own, `tensor_parallel` or all for a shape.

        Raises ConfigurationError if they are no whole number of replicas.
        """
        ranks = self.source.ranks if isinstance(self.source, ShardSet) else tensor_parallel or size
        check_multiple(size, ranks)
        return ranks

    def check_single(self, what: str, size: int) -> None:
        """Raise ConfigurationError if the job's `size` ranks are several replicas, for what measures but one."""
        ranks = self.replica_ranks(size, None)
        if size > ranks:
            raise ConfigurationError(
                f"{what} uses one replica of {ranks} ranks but mpirun started {size}: use -np {ranks}"
            )

    def plan(self, ranks: int) -> Plan:
        """Return how the tensors are split over the ranks."""
        return plan_shards(tensor_table(self.source.config), self.strategy, ranks)
