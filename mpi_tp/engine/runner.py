"""What runs a step, on every rank alike; and the one that samples on the host."""

from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from mpi_tp.engine.sampler import Sampled, sample
from mpi_tp.engine.step import SamplingRows, StepPlan
from mpi_tp.kernels.base import AttentionInputs, Cache
from mpi_tp.models.causal_lm import CausalLM


class StepOutput(Protocol):
    """A step's tokens, which may still be on their way."""

    def wait(self) -> Sampled:
        """Return the tokens; rank 0 calls it once, and the other ranks never."""
        ...


class Runner(Protocol):
    """A model and its cache on this rank's device."""

    num_blocks: int
    """Blocks in the cache."""
    steps_in_flight: int
    """How many steps rank 0 announces before it waits for the tokens of the one before them: 0 or 1."""

    def launch(self, plan: StepPlan) -> StepOutput:
        """Begin a step, which runs after those before it; collective."""
        ...


class HostRunner:
    """Runs the forward pass on the CPU, at once; rank 0 samples with numpy when it waits for the tokens."""

    steps_in_flight = 0

    def __init__(self, model: CausalLM, caches: list[Cache]) -> None:
        self._model = model
        self._caches = caches
        self.num_blocks = len(caches[0][0])

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepOutput:
        """Run the step's tokens on all ranks; every id must be known."""
        hidden = self.forward(plan)
        if plan.sampling is None:
            return HostOutput(self._model.greedy_tokens(hidden), None)
        return HostOutput(self._model.logits(hidden), plan.sampling)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states [R, K] of the plan's logit rows."""
        inputs = AttentionInputs(
            positions=_tensor(plan.positions),
            sequence_ids=_tensor(plan.sequence_ids),
            block_tables=torch.from_numpy(plan.block_tables),
            slots=_tensor(plan.slots),
        )
        return self._model(_tensor(plan.ids), inputs, self._caches, _tensor(plan.logit_rows))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(torch.int64)


class HostOutput:
    """Greedy tokens [R], or logits [R, V] to sample from."""

    def __init__(self, result: torch.Tensor, sampling: SamplingRows | None) -> None:
        self._result = result
        self._sampling = sampling

    def wait(self) -> Sampled:
        """Choose the tokens."""
        if self._sampling is None:
            return Sampled(self._result.numpy(), None)
        return sample(self._result.float().numpy(), self._sampling)
