"""The command line of the benchmarks."""

import json
from pathlib import Path

import pytest

from mpi_tp.bench.options import COMMANDS, parse_options
from mpi_tp.bench.settings import CommOptions, DecodeOptions, LinearOptions, LoadOptions, ThroughputOptions
from mpi_tp.bench.shapes import SHAPES
from mpi_tp.errors import FileError, UsageError


def test_bare_commands_have_the_documented_defaults() -> None:
    decode, throughput = parse_options(["decode"]), parse_options(["throughput"])
    assert isinstance(decode.settings, DecodeOptions)
    assert isinstance(throughput.settings, ThroughputOptions)
    assert decode.settings.batch_sizes == (1, 8, 32, 128)
    assert (decode.settings.context, decode.settings.steps) == (256, 200)
    assert decode.settings.model.shards == Path("shards")
    assert decode.machine.max_batch_size == 128
    assert (throughput.settings.requests, throughput.settings.seed) == (256, 0)
    assert throughput.settings.input_len == throughput.settings.output_len == (100, 1024)
    assert throughput.machine.max_batch_size == 256
    assert parse_options(["load"]).settings == LoadOptions(Path("shards"), 5)
    assert parse_options(["comm"]).settings == CommOptions(None, "bfloat16")
    assert parse_options(["linear"]).settings == LinearOptions(1, 128, 1024)


def test_a_shape_brings_random_weights_in_bfloat16() -> None:
    settings = parse_options(["decode", "--shape", "qwen3-0.6b", "--strategy", "paired"]).settings
    assert isinstance(settings, DecodeOptions)
    assert settings.model.shape is not None
    assert settings.model.shape.config == SHAPES["qwen3-0.6b"]
    assert (settings.model.shards, settings.model.strategy, settings.model.dtype) == (None, "paired", "bfloat16")


def test_a_shape_can_be_any_models_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    settings = parse_options(["comm", "--shape", str(path), "--dtype", "float32"]).settings
    assert isinstance(settings, CommOptions)
    assert settings.dtype == "float32"
    assert settings.model is not None
    assert settings.model.name == str(path)
    with pytest.raises(FileError, match=r"missing\.json"):
        parse_options(["comm", "--shape", "missing.json"])


def test_flags_can_come_from_a_file_of_infers_sections(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("shape: llama-3-8b\nbatch-sizes: 2,4\ncommunication: {backend: mpi}\nbatching: {kv_memory: 1G}\n")
    options = parse_options(["decode", "--config", str(path), "--batch-sizes", "3"])
    assert isinstance(options.settings, DecodeOptions)
    assert options.settings.batch_sizes == (3,)
    assert (options.machine.comm, options.machine.kv_memory) == ("mpi", 2**30)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shards", "x", "--shape", "llama-3-8b"], "two models"),
        (["--dtype", "float16"], "for --shape"),
        (["--strategy", "paired"], "for --shape"),
        (["--context", "50", "--steps", "84"], "at most 83 steps, or a context of 51"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_options(["decode", *flags])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["decod"], "invalid choice: 'decod'"),
        (["--json", "x", "decode"], "COMMAND"),
        (["decode", "--shape", "gpt-2"], "smollm2-135m, "),
        (["decode", "--batch-sizes", "1,0"], "'0' is no whole number"),
        (["throughput", "--input-len", "9:3"], "9 is more than 3"),
        (["linear", "--context", "3"], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_ends_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], *([command] for command in COMMANDS)])
def test_help_tells_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options([*argv, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in (("--json", "--plot", "--device") if argv else COMMANDS))
