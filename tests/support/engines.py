"""An engine on rank threads, as infer runs it on rank processes; and a tokenizer that fits the tiny models."""

import dataclasses
import functools
import hashlib
import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.threads import run_ranks
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine, Outcome, follow
from mpi_tp.engine.kv_cache import allocate_cache
from mpi_tp.engine.prompt import Prompt
from mpi_tp.engine.request import RequestError, SamplingParams
from mpi_tp.engine.runner import HostRunner, Runner, StepOutput
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.engine.step import StepPlan
from mpi_tp.kernels import select
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config
from mpi_tp.tokenizer import Tokenizer
from tests.support.parallel import CPU, layer_context
from tests.support.tiny import hf_config, hf_weights

EOS = 256

Request = tuple[Prompt, SamplingParams]


def byte_level_backend() -> tokenizers.Tokenizer:
    """One token a byte, ids 0 to 255 in the order of the bytes' stand-ins, then EOS: the tiny models' 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return backend


def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), {"eos_token": "</s>"}, frozenset({EOS}), chat_template=None)


def save_tokenizer(folder: Path, **config: Any) -> None:
    """Write the byte-level tokenizer's files into a folder; `config` goes into tokenizer_config.json."""
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))


class RecordingRunner(HostRunner):
    """Runs the plan as another process would get it, and keeps a hash of it and of its hidden states."""

    def __init__(self, *arguments: Any, spoil: int | None = None) -> None:
        super().__init__(*arguments)
        self.hashes: list[str] = []
        self._spoil = spoil

    def launch(self, plan: StepPlan) -> StepOutput:
        return super().launch(pickle.loads(pickle.dumps(plan)))

    def forward(self, plan: StepPlan) -> torch.Tensor:
        hidden = super().forward(plan)
        self.hashes.append(hashlib.sha256(pickle.dumps((plan, hidden.numpy()))).hexdigest())
        if self._spoil is not None:
            hidden[(plan.ids[plan.logit_rows] == self._spoil).nonzero()] = float("nan")
        return hidden


class PipelinedRunner(RecordingRunner):
    """Has a step in flight, as a runner on a GPU: a token may be named by its row in the step before."""

    steps_in_flight = 1
    _before: StepOutput | None = None

    def launch(self, plan: StepPlan) -> StepOutput:
        ids = plan.ids.copy()
        if (ids < 0).any():
            assert self._before is not None
            ids[ids < 0] = self._before.wait().tokens[-1 - ids[ids < 0]]
        self._before = super().launch(dataclasses.replace(plan, ids=ids))
        return self._before


@dataclass(frozen=True)
class Setting:
    """What an engine is made of; `spoil`: the logits that follow this token are no numbers."""

    model: transformers.PreTrainedModel
    strategy: Any = "column_wise"
    num_blocks: int = 64
    max_batch_size: int = 4
    max_step_tokens: int = 2048
    runner: type[RecordingRunner] = RecordingRunner
    tokenizer: Tokenizer | None = field(default_factory=byte_level_tokenizer)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    context_length: int = 256
    spoil: int | None = None


@dataclass
class Served:
    """What an engine made of some requests, by their numbers; the figures are its own at the end."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0


def serve(setting: Setting, requests: Sequence[Request], size: int = 1) -> list[Outcome]:
    """Return the outcomes in the order of the requests."""
    outcomes = serve_some(setting, requests, size, {}).outcomes
    return [outcomes[key] for key in range(len(requests))]


def serve_some(setting: Setting, requests: Sequence[Request], size: int, cancel_at: Mapping[int, int]) -> Served:
    """Serve requests, of which some are cancelled before a step with this number; all ranks run the same steps."""
    ranks = run_ranks(size, functools.partial(_serve_on_rank, setting, requests, cancel_at))
    assert all(hashes == ranks[0][1] for _, hashes in ranks)
    return ranks[0][0]


def _serve_on_rank(
    setting: Setting, requests: Sequence[Request], cancel_at: Mapping[int, int], comm: Communicator
) -> tuple[Served, list[str]]:
    runner = build_runner(setting, comm)
    served = Served()
    if comm.rank:
        follow(comm, runner, lambda: None)
        return served, runner.hashes
    engine = build_engine(setting, comm, runner)
    for key, (prompt, params) in enumerate(requests):
        try:
            engine.submit(key, prompt, params)
        except RequestError as error:
            served.outcomes[key] = Outcome(key, 0, [], error)
    engine.keep_alive()
    for step in itertools.count():
        for key in [key for key, cancelled_at in cancel_at.items() if cancelled_at == step]:
            engine.cancel(key)
        if engine.is_idle:
            break
        for outcome in engine.step():
            assert outcome.key not in served.outcomes
            served.outcomes[outcome.key] = outcome
    assert engine.blocks_in_use == engine.num_running == engine.num_waiting == 0
    engine.keep_alive()
    engine.close()
    served.num_preemptions, served.prefix_hit_tokens = engine.num_preemptions, engine.prefix_hit_tokens
    return served, runner.hashes


def build_runner(setting: Setting, comm: Communicator) -> RecordingRunner:
    model = setting.model
    kernels = select(CPU, "invariant", model.dtype)
    config = parse_config(hf_config(model))
    context = layer_context(hf_config(model), hf_weights(model), comm, kernels, setting.strategy)
    caches = allocate_cache(config, setting.num_blocks, comm.rank, comm.size, torch.float32, CPU)
    for part in (part for cache in caches for part in cache):
        part.fill_(float("nan"))  # whoever reads what nobody wrote is found out
    return setting.runner(CausalLM(context, config), caches, spoil=setting.spoil)


def build_engine(setting: Setting, comm: Communicator, runner: Runner) -> Engine:
    return Engine(
        comm,
        runner,
        Scheduler(BlockPool(setting.num_blocks), setting.max_batch_size, setting.max_step_tokens),
        setting.tokenizer,
        context_length=setting.context_length,
        eos_token_ids=setting.eos_token_ids,
        vocab_size=setting.model.config.vocab_size,
    )
