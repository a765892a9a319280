"""The forward pass of one step, on every rank alike."""

import numpy as np
import torch
from numpy.typing import NDArray

from mpi_tp.engine.step import StepPlan
from mpi_tp.kernels.base import AttentionInputs, Cache
from mpi_tp.models.causal_lm import CausalLM


class Runner:
    """A model and its cache on this rank's device."""

    def __init__(self, model: CausalLM, caches: list[Cache], device: torch.device) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self.num_blocks = len(caches[0][0])

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor:
        """Run the step's tokens and return the wanted logits [R, vocabulary], the same on every rank."""
        inputs = AttentionInputs(
            positions=self._put(plan.positions),
            sequence_ids=self._put(plan.sequence_ids),
            block_tables=self._put(plan.block_tables),
            slots=self._put(plan.slots),
        )
        hidden = self._model(self._put(plan.ids), inputs, self._caches, self._put(plan.logit_rows))
        return self._model.logits(hidden)

    def _put(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
