"""The command line of infer, and the configuration file that can fill it in."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tp.array_job import Share
from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import FileError, UsageError
from mpi_tp.infer_options import SECTIONS, STDIN, InferOptions, _parser, parse_options
from mpi_tp.machine_options import MachineOptions
from mpi_tp.options import parse, size


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> list[str]:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


def refusal(argv: list[str]) -> str:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bare_command_has_the_defaults_of_the_contract():
    assert parse_options([]) == InferOptions(
        shards=Path("shards"),
        input=None,
        output=None,
        sampling=SamplingParams(max_new_tokens=64, temperature=0.0, seed=0, n=1),
        chat=False,
        system=None,
        limit=None,
        resume=False,
        share=Share(),
        machine=MachineOptions(
            device="auto",
            comm="auto",
            share_gpu=False,
            numerics="auto",
            max_batch_size=64,
            kv_memory=None,
        ),
        stall_timeout=300.0,
    )


def test_every_flag_reaches_its_field():
    argv = (
        "--shards s --input in.jsonl --output out.jsonl --max-new-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 "
        "--seed -7 --n 2 --stop a --stop b --ignore-eos --chat --system Be --logprobs --limit 9 --comm mpi --share-gpu "
        "--device cpu --numerics fast --max-batch-size 8 --kv-memory 1KiB --stall-timeout 1.5 "
        "--resume"
    )
    sampling = SamplingParams(5, 0.5, 3, 0.9, -7, 2, ("a", "b"), ignore_eos=True, logprobs=True)
    paths = Path("s"), Path("in.jsonl"), Path("out.jsonl")
    rest = True, "Be", 9, True, Share(), MachineOptions("cpu", "mpi", True, "fast", 8, 1024), 1.5
    assert parse_options(argv.split()) == InferOptions(*paths, sampling, *rest)


def test_a_dash_is_standard_input_and_output():
    options = parse_options(["--input", "-", "--output", "-"])
    assert (options.input, options.output) == (STDIN, None)


@pytest.mark.parametrize(
    "argv",
    [
        "--n 0",
        "--n 1.5",
        "--temperature -1",
        "--temperature nan",
        "--temperature inf",
        "--max-batch-size 0",
        "--max-batch-size x",
        "--comm foo",
        "--device tpu",
        "--numerics exact",
        "--max-new-tokens 0",
        "--top-k 0",
        "--top-p 0",
        "--top-p 1.1",
        "--limit 0",
        "--kv-memory 0",
        "--kv-memory 5X",
        "--stall-timeout 0",
        "--stall-timeout nan",
        "--temp 1",  # an abbreviation would change its meaning when a flag is added
        "--resume",  # of what? There is no journal of standard output
        "--resume --output -",
        "--resume --output /dev/null",
        "--tensor-parallel 2",
        "--trace t.json",
        "--system hello",  # without --chat it would do nothing
        "--input a --output ./a",
        "stray",
    ],
)
def test_wrong_command_lines_end_with_code_2(argv: str):
    with pytest.raises((UsageError, SystemExit)) as caught:
        parse_options(argv.split())
    code = caught.value.exit_code if isinstance(caught.value, UsageError) else caught.value.code
    assert code == 2


def test_every_flag_can_come_from_the_file(config):
    text = """
        shards: s
        input: in.jsonl
        output: out.jsonl
        chat: true
        system: Be
        limit: 9
        resume: true
        parallel: {device: cpu, share-gpu: yes, numerics: fast}
        communication: {backend: mpi}
        batching: {max_batch_size: 8, kv_memory: 4GiB}
        sampling:
            max-new-tokens: 5
            temperature: 0.5
            top_k: 3
            top_p: 0.9
            seed: -7
            n: 2
            stop: [a, "no", 3.10]
            ignore_eos: on
            logprobs: false
        monitoring: {stall_timeout: 20}
    """
    sampling = SamplingParams(5, 0.5, 3, 0.9, -7, 2, ("a", "no", "3.10"), ignore_eos=True)
    paths = Path("s"), Path("in.jsonl"), Path("out.jsonl")
    rest = True, "Be", 9, True, Share(), MachineOptions("cpu", "mpi", True, "fast", 8, 4 * 2**30), 20.0
    assert parse_options(config(text)) == InferOptions(*paths, sampling, *rest)


def test_no_flag_is_missing_from_the_file():
    in_sections = {dest for section in SECTIONS.values() for dest in section.values()}
    flags = {action.dest for action in _parser()._actions}
    assert in_sections < flags


def test_the_flag_wins_over_the_file(config):
    argv = config("sampling: {temperature: 1, stop: [file], n: 3}\nshards: file\n")
    options = parse_options([*argv, "--temperature", "0", "--stop", "flag", "--shards", "shards"])
    assert options.sampling == SamplingParams(temperature=0.0, stop=("flag",), n=3)
    assert options.shards == Path("shards")


@pytest.mark.parametrize("text", ["", "# nothing\n", "sampling:\n", "sampling: {top_k: null}\nsystem: ~\noutput:\n"])
def test_empty_values_leave_the_defaults(config, text: str):
    assert parse_options(config(text)) == parse_options([])


def test_one_stop_text_needs_no_list(config):
    assert parse_options(config("sampling: {stop: END}")).sampling.stop == ("END",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sampling: {temprature: 1}", ("sampling.temprature", "did you mean sampling.temperature?")),
        ("temperature: 1", ("unknown key temperature", "did you mean sampling.temperature?")),
        ("sampling: {shards: x}", ("sampling.shards", "did you mean shards?")),
        ("smapling: {temperature: 1}", ("unknown key smapling", "did you mean sampling?")),
        ("communication: {timeout: 3}", ("communication.timeout", "monitoring.stall_timeout")),
        ("server: {port: 80}", ("unknown key server",)),
        ("tensor_parallel: 2", ("unknown key tensor_parallel",)),
        ("config: other.yaml", ("unknown key config",)),
        ("zzzzzz: 1", ("unknown key zzzzzz", "the keys are", "sampling.top_k")),
        ("12: 1", ("unknown key 12",)),
        ("sampling: 3", ("sampling is '3'", "section")),
        ("sampling: {n: many}", ("sampling.n is 'many'", "a whole number")),
        ("sampling: {n: 1.5}", ("sampling.n is '1.5'", "a whole number")),
        ("sampling: {n: [1]}", ("sampling.n is ['1']", "one value")),
        ("sampling: {n: {a: 1}}", ("sampling.n is {'a': '1'}", "one value")),
        ("sampling: {temperature: hot}", ("sampling.temperature is 'hot'", "a number")),
        ("sampling: {logprobs: 3}", ("sampling.logprobs is '3'", "true or false")),
        ("sampling: {stop: [[a]]}", ("sampling.stop is ['a']", "one value")),
        ("sampling: {n: 0}", ("n is 0", "from 1 to 16384")),
        ("communication: {backend: tcp}", ("communication.backend is 'tcp'", "auto, nccl, mpi")),
        ("batching: {kv_memory: lots}", ("batching.kv_memory", "'lots'", "4GiB")),
        ("batching: {max_batch_size: -1}", ("batching.max_batch_size", "'-1'")),
        ("limit: 1\nlimit: 2", ("line 2", "limit stands twice")),
        ("sampling: {top_k: 1, top-k: 2}", ("line 1", "top_k stands twice")),
        ("sampling:\n  n: 1\n temperature: 1", ("line 3",)),
        ("shards: [1, 2", ("line 1",)),
        ("? [a]\n: 1", ("line 1", "a key must be one word")),
        ("a: *b", ("line 1", "undefined alias")),
        ("- a\n- b", ("keys and values",)),
        ("just text", ("keys and values", "just text")),
        ("a: \x00", ("not a YAML file",)),
    ],
)
def test_wrong_files_are_refused_with_one_line(config, text: str, told: tuple[str, ...]):
    argv = config(text)
    message = refusal(argv)
    for part in told:
        assert part in message
    if "n is 0" not in told:
        assert argv[1] in message


def test_a_file_cannot_run_code(config, tmp_path: Path):
    made = tmp_path / "made"
    refusal(config(f"shards: !!python/object/apply:os.mkdir [{made}]"))
    assert not made.exists()


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_an_unreadable_file_is_a_file_error(tmp_path: Path, name: str):
    with pytest.raises(FileError, match="cannot read the configuration file"):
        parse_options(["--config", str(tmp_path / name)])


def test_a_required_flag_may_come_from_the_file(config):
    def parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.add_argument("--shards", required=True)
        parser.add_argument("--config")
        parser.add_argument("--colour", action=argparse.BooleanOptionalAction, default=True)
        return parser

    argv = config("{shards: s, colour: on}")
    assert parse(parser(), [*argv, "--no-colour"], {}) == argparse.Namespace(shards="s", config=argv[1], colour=False)
    with pytest.raises(SystemExit):
        parse(parser(), [], {})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("512M", 512 * 2**20),
        ("512m", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("80GB", 80 * 10**9),
        ("2e9", 2 * 10**9),
        ("1.5K", 1536),
        (".5t", 2**39),
        ("7B", 7),
        ("1e3k", 1024_000),
    ],
)
def test_sizes(text: str, count: int):
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "4X", "GiB", "1,5G", "nan", "inf", "1e400", "0.1", "4 G B", "9e18G"])
def test_no_sizes(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size(text)


def test_help_needs_neither_torch_nor_mpi():
    code = (
        "import sys; import mpi_tp.infer_options, mpi_tp.records\n"
        "try: mpi_tp.infer_options.parse_options(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print('HEAVY', sorted({'torch', 'mpi4py', 'numpy', 'h5py', 'numba'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in run.stdout
    assert "--max-new-tokens" in run.stdout


@pytest.mark.parametrize("wrong", [{"device": "gpu"}, {"comm": None}, {"max_batch_size": 0}, {"kv_memory": "4G"}])
def test_machine_options_of_a_script_are_checked_too(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        MachineOptions(**wrong)
