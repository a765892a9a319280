"""The GPU's runner on CPU tensors: its kernels in Triton's interpreter, its pinned memory and events ordinary ones."""

import pytest
import torch

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.kv_cache import allocate_cache
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.runner import HostRunner, Runner
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.kernels.base import Kernels
from mpi_tp.kernels.torch_kernels import TorchKernels
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config
from tests.support.parallel import CPU, layer_context
from tests.support.tiny import hf_config, hf_weights, tiny_model

WHY = "the interpreter of older ones fails with numpy 2.4"
triton = pytest.importorskip("triton", minversion="3.7", reason=f"no Triton of 3.7 or newer: {WHY}")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is visible: tests/gpu runs these kernels on it", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

REQUESTS = [
    (15, SamplingParams(max_new_tokens=4)),
    (30, SamplingParams(max_new_tokens=5, temperature=0.8, top_p=0.9, seed=3, logprobs=True)),
    (1, SamplingParams(max_new_tokens=4)),
    (17, SamplingParams(max_new_tokens=3, n=2, temperature=1.0, top_k=5)),
]


class Alone(SingleCommunicator):
    """One rank whose steps no graph captures."""

    is_capturable = False


class NoEvent:
    """Stands for a CUDA event where everything has happened already."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, pin_memory=False, **options: empty_like(tensor, **options))


def outcomes(
    name: str, kernels: Kernels, on_device: bool, num_blocks: int
) -> dict[int, list[tuple[list[int], object]]]:
    model = tiny_model(name)
    config, comm = hf_config(model), Alone()
    parsed = parse_config(config)
    causal_lm = CausalLM(layer_context(config, hf_weights(model), comm, kernels, "column_wise"), parsed)
    caches = allocate_cache(parsed, num_blocks, 0, 1, torch.float32, CPU)
    runner: Runner = HostRunner(causal_lm, caches)
    if on_device:
        from mpi_tp.engine.device_runner import DeviceRunner

        runner = DeviceRunner(causal_lm, caches, comm, CPU, max_batch_size=6, max_length=128)
    engine = Engine(
        comm,
        runner,
        Scheduler(BlockPool(runner.num_blocks), 6, 24),
        None,
        context_length=128,
        eos_token_ids=frozenset(),
        vocab_size=parsed.vocab_size,
    )
    for key, (length, params) in enumerate(REQUESTS):
        engine.submit(key, [(7 * key + 3 * i) % 250 for i in range(length)], params)
    results = {}
    while not engine.is_idle:
        for outcome in engine.step():
            assert outcome.error is None
            results[outcome.key] = [(own.token_ids, own.logprobs) for own in outcome.completions]
    if num_blocks < 10:
        assert engine.num_preemptions
    return results


@pytest.mark.parametrize(("name", "invariant", "num_blocks"), [("qwen3", True, 30), ("mistral-window", False, 5)])
def test_it_gives_what_the_host_runner_gives(without_cuda, name, invariant, num_blocks):
    from mpi_tp.kernels.gpu_kernels import GpuKernels

    expected = outcomes(name, TorchKernels(), on_device=False, num_blocks=30)
    results = outcomes(name, GpuKernels(invariant), on_device=True, num_blocks=num_blocks)
    for key, completions in expected.items():
        for (ids, logprobs), (own_ids, own_logprobs) in zip(completions, results[key], strict=True):
            assert own_ids == ids
            assert own_logprobs == (logprobs and pytest.approx(logprobs, abs=1e-4))
