"""The parts of the benchmarks that need no ranks: shapes, plans, figures, tables."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mpi_tp.bench.chart import Chart, draw, lines, load_pyplot
from mpi_tp.bench.chosen_model import ChosenModel
from mpi_tp.bench.comm import model_messages
from mpi_tp.bench.decode import mean_weight_bytes
from mpi_tp.bench.decode_case import DecodeCase
from mpi_tp.bench.load import read_raw, with_medians
from mpi_tp.bench.nccl_log import NcclLog, last_choice
from mpi_tp.bench.random_model import random_tensor
from mpi_tp.bench.report import as_json, cell, cpu_name, plain, table
from mpi_tp.bench.settings import WARM_UP_STEPS, ModelChoice, ThroughputOptions
from mpi_tp.bench.shapes import SHAPES, Shape
from mpi_tp.bench.throughput import Timeline, draw_lengths, summarise
from mpi_tp.bench.timed_comm import nccl_share
from mpi_tp.bench.timing import percentiles
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.scheduler import STEP_TOKENS, Scheduler
from mpi_tp.engine.sequence import Sequence
from mpi_tp.errors import ConfigurationError
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.models.mlp import mlp_config
from mpi_tp.partition.plan import plan_shards
from tests.support.parallel import CPU

# What the models' own publishers say.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
}


def num_parameters(name: str) -> int:
    return sum(math.prod(row.shape) for row in tensor_table(SHAPES[name]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_its_models_parameters(name: str) -> None:
    assert num_parameters(name) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_builds_the_same_model_from_a_shape(name: str) -> None:
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert num_parameters(name) == sum(parameter.numel() for parameter in model.parameters())
    whole = replace(parse_config(config.to_dict()), eos_token_ids=())  # there by default, and of no use here
    assert whole == parse_config(SHAPES[name])


# --- random weights ---


def test_random_weights_are_each_ranks_own_and_the_same_every_time() -> None:
    config = {**SHAPES["smollm2-135m"], "num_hidden_layers": 1}
    plan = plan_shards(tensor_table(config), "paired", 3)
    for name, planned in plan.items():
        parts = [random_tensor(planned, rank, CPU, torch.bfloat16) for rank in range(3)]
        assert [part.shape for part in parts] == [planned.local_shape(rank) for rank in range(3)]
        assert torch.equal(parts[1], random_tensor(planned, 1, CPU, torch.bfloat16))
        if name.endswith("norm.weight"):
            assert all(part.eq(1).all() for part in parts)
        else:
            assert not torch.equal(parts[0].flatten()[:64], parts[1].flatten()[:64])
            assert parts[0].float().std().item() == pytest.approx(0.02, rel=0.05)


def test_what_every_rank_holds_is_the_same_on_all() -> None:
    config = {"model_type": "llama", **SHAPES["smollm2-135m"], "num_hidden_layers": 1, "attention_bias": True}
    bias = plan_shards(tensor_table(config), "paired", 2)["model.layers.0.self_attn.o_proj.bias"]
    assert torch.equal(*(random_tensor(bias, rank, CPU, torch.float32) for rank in range(2)))


def test_weight_bytes_of_a_step_leave_out_an_embedding_that_is_only_looked_up() -> None:
    for name, looked_up in (("smollm2-135m", 0), ("llama-3-8b", 128256 * 4096)):
        shape = Shape(name, SHAPES[name])
        model = ChosenModel(shape, parse_config(shape.config), "column_wise", torch.bfloat16)
        assert mean_weight_bytes(model, 1) == 2 * (PARAMETERS[name] - looked_up)
        assert mean_weight_bytes(model, 2) > mean_weight_bytes(model, 1) / 2  # both ranks have the norms


def test_a_stack_of_linear_layers_is_no_language_model() -> None:
    config = mlp_config({"0.weight": (3, 4)}, "relu")
    with pytest.raises(ConfigurationError, match=r"mlp\.json is a model of type mlp"):
        ChosenModel.open(None, ModelChoice(None, Shape("mlp.json", config), "paired", "bfloat16"))


# --- decode ---


@pytest.mark.parametrize("batch_size", [1, 7, 128, 256])
@pytest.mark.parametrize(("context", "steps"), [(256, 200), (1024, 50)])
def test_the_mean_context_is_the_one_that_was_asked_for(batch_size: int, context: int, steps: int) -> None:
    case = DecodeCase.plan(batch_size, context, steps, STEP_TOKENS["cpu"])
    scheduler = Scheduler(BlockPool(10**6), batch_size)
    sequences = [
        Sequence(SamplingParams(), 0, [key] * case.prompt_length, case.prompt_length, case.max_length, key)
        for key in range(batch_size)
    ]
    scheduler.add(sequences)
    contexts = []
    for number in range(case.prompt_steps + WARM_UP_STEPS + steps):
        chunks = scheduler.schedule()
        if number >= case.prompt_steps + WARM_UP_STEPS:
            assert [chunk.stop - chunk.start for chunk in chunks] == [1] * batch_size
            contexts += [chunk.start for chunk in chunks]
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
            chunk.sequence.tokens += [0] * chunk.ends_sequence
    assert statistics.mean(contexts) == pytest.approx(context, rel=0.02)
    assert max(len(sequence.tokens) for sequence in sequences) < case.max_length


def test_a_batch_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"2048.*2048"):
        DecodeCase.plan(2048, 256, 100, 2048)
    case = DecodeCase.plan(8, 256, 100, 2048)
    with pytest.raises(ConfigurationError, match="300"):
        case.check_context(300)
    case.check_context(case.max_length)
    with pytest.raises(ConfigurationError, match=r"160 blocks.* 159"):
        case.check_cache(159)
    case.check_cache(160)


def test_nccl_share_is_by_the_kernels_names() -> None:
    assert nccl_share({"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)": 1.0, "gemm": 2.0, "Memcpy HtoD": 1.0}) == 0.25
    assert nccl_share({}) is None


# --- throughput ---


def test_token_times_follow_from_the_steps_in_which_requests_end() -> None:
    timeline = Timeline([1.0, 2.0, 4.0, 8.0], [(1, 2), (3, 1), (3, 3)])
    assert timeline.token_times() == [[1.0, 2.0], [8.0], [2.0, 4.0, 8.0]]
    row = summarise(timeline)
    assert (row["requests"], row["output_tokens"], row["seconds"], row["tokens_per_s"]) == (3, 6, 8.0, 0.75)
    assert row["first_token_p50_s"] == 2.0
    assert row["between_tokens_p50_s"] == 2.0  # of 1, 2 and 4


def test_requests_of_one_token_have_nothing_between() -> None:
    row = summarise(Timeline([1.0], [(0, 1), (0, 1)]))
    assert row["between_tokens_p50_s"] is None
    assert row["first_token_p99_s"] == 1.0


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=101)
    assert percentiles(list(values)) == (sorted(values)[50], sorted(values)[99])


def test_lengths_are_drawn_from_the_whole_range_and_from_the_seed() -> None:
    choice = ModelChoice(Path("shards"), None, "column_wise", "bfloat16")
    options = ThroughputOptions(choice, 500, (3, 5), (7, 8), seed=1)
    lengths = draw_lengths(options)
    assert {a for a, _ in lengths} == {3, 4, 5}
    assert {b for _, b in lengths} == {7, 8}
    assert lengths == draw_lengths(options) != draw_lengths(replace(options, seed=2))


# --- comm and load ---


def test_messages_are_those_of_the_strategy() -> None:
    config = parse_config(SHAPES["llama-3-8b"])
    by_strategy = {
        strategy: {(message.operation, message.num_elements) for message in model_messages(config, strategy)}
        for strategy in ("paired", "column_wise")
    }
    logits = {("all_gather", 128256), ("all_gather", 32 * 128256)}
    reduced = {("all_reduce", 4096), ("all_reduce", 32 * 4096)}
    gathered = {("all_gather", tokens * size) for tokens in (1, 32) for size in (4096, 14336)}
    assert by_strategy == {"paired": logits | reduced, "column_wise": logits | reduced | gathered}


def test_nccls_choice_is_the_last_one_that_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
    path = tmp_path / "log"
    log = NcclLog(path)
    assert log.newest_choice() is None
    path.write_text(
        "host:1:1 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"
        "host:1:1 [0] NCCL INFO AllReduce: 65536 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..3}\n"
    )
    assert log.newest_choice() == "NVLS_TREE SIMPLE"
    assert log.newest_choice() is None
    assert last_choice("NCCL INFO Connected all rings") is None


def test_a_ratio_is_taken_within_its_round() -> None:
    rounds = [{"raw_gb_s": raw, "load_gb_s": load} for load, raw in ((1.0, 2.0), (3.0, 4.0), (9.0, 1.0))]
    rows = with_medians(rounds)
    assert [row["round"] for row in rows] == ["1", "2", "3", "median"]
    assert rows[-1] == {"round": "median", "load_gb_s": 3.0, "raw_gb_s": 2.0, "ratio": 0.75}


def test_a_raw_read_reads_everything(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    assert read_raw(tmp_path / "file", bytearray(64)) == 1000


# --- report ---

ROWS = [
    {"name": "a", "count": 3, "seconds": 0.0123456, "nccl_us": None},
    {"name": "long", "count": 12000, "seconds": 12345.6, "nccl_us": None},
]


def test_a_table_is_markdown_without_columns_of_nothing() -> None:
    assert table(ROWS).splitlines() == [
        "| name | count | seconds |",
        "|-----:|------:|--------:|",
        "|    a |     3 | 0.01235 |",
        "| long | 12000 |   12346 |",
    ]
    assert cell(None) == "-"


def test_json_keeps_every_column_and_every_digit() -> None:
    assert json.loads(as_json({"command": "x"}, ROWS)) == {"meta": {"command": "x"}, "results": ROWS}


def test_settings_become_json() -> None:
    settings = {"path": Path("a/b"), "sizes": (1, 8), "none": None, "inner": {"flag": True}}
    assert plain(settings) == {"path": "a/b", "sizes": [1, 8], "none": None, "inner": {"flag": True}}


def test_the_processors_name_stands_in_cpuinfo() -> None:
    assert cpu_name("processor\t: 0\nmodel name\t: AMD EPYC 9965\nmodel name\t: other\n") == "AMD EPYC 9965"
    assert cpu_name("processor: 0\n")


def test_a_chart_has_a_line_a_series_and_column_in_order() -> None:
    rows = [
        {"op": "reduce", "bytes": 64, "nccl_us": None, "mpi_us": 2.0},
        {"op": "gather", "bytes": 16, "nccl_us": 1.0, "mpi_us": 1.5},
        {"op": "reduce", "bytes": 16, "nccl_us": None, "mpi_us": 1.0},
    ]
    assert lines(Chart("bytes", ("nccl_us", "mpi_us"), "op", logarithmic=True), rows) == [
        ("reduce, mpi_us", [16, 64], [1.0, 2.0]),
        ("gather, nccl_us", [16], [1.0]),
        ("gather, mpi_us", [16], [1.5]),
    ]


def test_a_drawing_is_a_png(tmp_path: Path) -> None:
    with (tmp_path / "x.png").open("wb") as stream:
        draw(load_pyplot(), Chart("name", ("count", "nccl_us")), "a title", ROWS, stream)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")
