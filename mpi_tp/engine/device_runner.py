"""The forward pass and sampling on a GPU: a step is queued while the one before it still runs.

Steps in which every sequence decodes run as CUDA graphs; steps with prompts are queued kernel by kernel, which their
work hides. Tokens stay on the device: the next step takes them from there.
"""

from typing import Any

import torch
from numpy.typing import NDArray

from mpi_tp.engine.decode_graphs import DecodeGraphs, DecodeInputs, Shape, shape_for
from mpi_tp.engine.device_sampler import SamplingTensors, sample
from mpi_tp.engine.sampler import Sampled
from mpi_tp.engine.step import SamplingRows, StepPlan
from mpi_tp.kernels.base import Cache
from mpi_tp.kernels.gpu.attention import tokens_per_tile
from mpi_tp.kernels.gpu.tiles import TiledInputs, tile
from mpi_tp.kernels.gpu.tokens import resolve
from mpi_tp.models.causal_lm import CausalLM


class DeviceOutput:
    """A queued step's tokens, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _to_host(logprobs)
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> Sampled:
        """Wait for the step and return its tokens."""
        self._done.synchronize()
        return Sampled(self._tokens.numpy(), None if self._logprobs is None else self._logprobs.numpy())


class DeviceRunner:
    """A model and its cache on this rank's GPU. The last block of the cache is for rows that fill up a graph.

    `uses_graphs` is whether the ranks' communicator can be captured.
    """

    steps_in_flight = 1

    def __init__(
        self,
        model: CausalLM,
        caches: list[Cache],
        device: torch.device,
        *,
        max_batch_size: int,
        max_length: int,
        uses_graphs: bool,
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self._tokens_per_tile = tokens_per_tile(model.layers[0].self_attn.heads)
        self.num_blocks = len(caches[0][0]) - 1
        largest = shape_for(max_batch_size, max_length, greedy=True)
        self._inputs = DecodeInputs(largest.rows, largest.length, self.num_blocks, device)
        self._graphs = DecodeGraphs(self._decode) if uses_graphs else None
        self._last_tokens = torch.zeros(largest.rows, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceOutput:
        """Queue the step and return its tokens to come."""
        greedy = plan.sampling is None
        if len(plan.ids) == len(plan.logit_rows) == len(plan.block_tables) > 0:
            shape = shape_for(len(plan.ids), int(plan.positions.max()) + 1, greedy)
            self._inputs.send(shape, plan.ids, plan.positions, plan.slots, plan.block_tables)
            result = (self._graphs.run(shape) if self._graphs else self._decode(shape))[: len(plan.ids)]
        else:
            result = self._run_prompts(plan, greedy)
        tokens, logprobs = result, None
        if plan.sampling is not None:
            tokens, logprobs = sample(result, self._sampling(plan.sampling))
            logprobs = logprobs if plan.sampling.logprobs else None
        self._last_tokens[: len(tokens)] = tokens
        return DeviceOutput(tokens, logprobs)

    def _decode(self, shape: Shape) -> torch.Tensor:
        """Queue a step of one token a sequence: what a graph is captured from."""
        hidden = self._model(
            resolve(self._inputs.ids(shape), self._last_tokens), self._inputs.attention_inputs(shape), self._caches
        )
        return self._finish(hidden, shape.greedy)

    def _run_prompts(self, plan: StepPlan, greedy: bool) -> torch.Tensor:
        num_single, tiles = tile(plan.sequence_ids, self._tokens_per_tile)
        inputs = TiledInputs(
            positions=self._put(plan.positions).long(),
            sequence_ids=self._put(plan.sequence_ids),
            block_tables=self._put(plan.block_tables),
            slots=self._put(plan.slots).long(),
            num_single=num_single,
            tiles=self._put(tiles),
            longest=int(plan.positions[:num_single].max(initial=0)) + 1,
        )
        if not len(plan.ids):
            return torch.empty(0, dtype=torch.int64, device=self._device)
        hidden = self._model(
            resolve(self._put(plan.ids).long(), self._last_tokens), inputs, self._caches, self._put(plan.logit_rows)
        )
        return self._finish(hidden, greedy)

    def _finish(self, hidden: torch.Tensor, greedy: bool) -> torch.Tensor:
        return self._model.greedy_tokens(hidden) if greedy else self._model.logits(hidden)

    def _sampling(self, rows: SamplingRows) -> SamplingTensors:
        return SamplingTensors(
            temperature=self._put(rows.temperature),
            top_k=self._put(rows.top_k),
            top_p=self._put(rows.top_p),
            uniform=self._put(rows.uniform),
            filters=bool((rows.top_k > 0).any() or (rows.top_p < 1).any()),
        )

    def _put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to pinned memory: only there is it no wait."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
