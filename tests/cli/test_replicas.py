"""Several replicas of a model over one input: the same records as one of them gives, or one clear end."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.conftest import MpiRun
from tests.cli.test_infer_faults import SlowInput, rank_pids, read_record
from tests.cli.test_launch import last_words
from tests.support.hosts import Hosts
from tests.support.sets import make_sets, save_checkpoint

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
SAMPLING = ("--temperature", "1.1", "--top-k", "90", "--seed", "3")


def lines() -> list[str]:
    """Prompts and answers of unequal lengths, several samples, log-probabilities, and lines that cannot be served."""
    good = [
        {"prompt": "x" * (1 + 37 * at % 60), "max_new_tokens": 1 + 23 * at % 40, "n": 1 + (at % 5 == 0) * 2}
        | ({"logprobs": True} if at % 4 == 0 else {})
        for at in range(24)
    ]
    texts = [json.dumps(line) for line in good]
    texts[5:5] = ["{bad", json.dumps({"prompt": 300 * "y"})]
    texts[13:13] = [json.dumps({"prompt_token_ids": [999]}), json.dumps({"prompt": ""})]
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `in.jsonl` and sets of one and of two ranks."""
    folder = tmp_path_factory.mktemp("replicas")
    make_sets(save_checkpoint(folder / "model"), folder, 1, 2)
    (folder / "in.jsonl").write_text("\n".join(lines()))
    return folder


def infer(
    mpirun: MpiRun, folder: Path, ranks: int, set_ranks: int, *flags: str, env: Mapping[str, str] | None = None
) -> Path:
    """Serve the input and return the output."""
    output = folder / f"{ranks}-of-{set_ranks}.jsonl"
    files = ("--shards", folder / f"shards-{set_ranks}", "--input", folder / "in.jsonl", "--output", output)
    batch = ("--max-batch-size", "3")
    result = mpirun(
        ranks, "-m", "mpi_tp.infer", *files, *SAMPLING, *batch, *flags, env={**ON_CPU, **(env or {})}, timeout=240
    )
    assert result.returncode == 0, result.stderr
    (line,) = last_words(result.stderr)
    assert "28 lines, 4 errors" in line
    return output


@pytest.fixture(scope="module")
def one_replica(mpirun: MpiRun, folder: Path) -> bytes:
    """The output of two ranks."""
    return infer(mpirun, folder, 2, 2).read_bytes()


def test_the_output_of_one_replica_has_its_errors_in_their_places(one_replica: bytes) -> None:
    kinds = [json.loads(line).get("error", {}).get("type") for line in one_replica.splitlines()]
    expected: list[str | None] = [None] * 28
    expected[5:7] = ["invalid_json", "prompt_too_long"]
    expected[13:15] = ["unknown_token", "invalid_prompt"]
    assert kinds == expected


@pytest.mark.parametrize(("ranks", "set_ranks", "flags"), [(4, 2, ("--tensor-parallel", "2")), (3, 1, ())])
def test_replicas_give_the_same_bytes(
    mpirun: MpiRun, folder: Path, one_replica: bytes, ranks: int, set_ranks: int, flags: tuple[str, ...]
) -> None:
    output = infer(mpirun, folder, ranks, set_ranks, *flags)
    assert output.read_bytes() == one_replica
    facts = json.loads(output.with_name(f"{output.name}.meta.json").read_text())
    assert (facts["replicas"], len(facts["ranks"])) == (ranks // set_ranks, ranks)
    assert facts["figures"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("ranks", "set_ranks", "flags", "said"),
    [
        (3, 2, (), "holds 2 ranks but mpirun started 3: use -np 2 or a multiple of it, or python -m sharder"),
        (2, 1, ("--tensor-parallel", "2"), "holds 1 ranks but --tensor-parallel is 2: use --tensor-parallel 1, or"),
    ],
)
def test_what_makes_no_replicas_is_told_once(
    mpirun: MpiRun, folder: Path, ranks: int, set_ranks: int, flags: tuple[str, ...], said: str
) -> None:
    result = mpirun(ranks, "-m", "mpi_tp.infer", "--shards", folder / f"shards-{set_ranks}", *flags, env=ON_CPU)
    assert (result.returncode, result.stdout) == (78, "")
    (line,) = last_words(result.stderr)
    assert said in line


def test_what_measures_one_replica_refuses_several(mpirun: MpiRun, folder: Path) -> None:
    result = mpirun(2, "-m", "mpi_tp.bench", "decode", "--shards", folder / "shards-1", env=ON_CPU)
    assert result.returncode == 78
    (line,) = last_words(result.stderr)
    assert "bench decode uses one replica of 1 ranks but mpirun started 2: use -np 1" in line


def test_a_script_gets_all_outcomes_on_all_ranks(mpirun: MpiRun, folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom mpi_tp import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu', max_batch_size=2, tensor_parallel=1)\n"
        "prompts = ['x' * (1 + 7 * at % 20) for at in range(9)] + [[300]]\n"
        "first = llm.generate(prompts, SamplingParams(6, 1.0))\n"
        "assert llm.generate([]) == []\n"
        "again = llm.generate(prompts[:4], SamplingParams(6, 1.0))\n"
        "assert again == first[:4]\n"
        "assert [o.error and o.error.type for o in first] == [None] * 9 + ['unknown_token']\n"
        "print(llm.rank, [c.token_ids for o in first for c in o.completions])\n"
    )
    printed = {}
    for ranks in (1, 2):
        result = mpirun(ranks, script, folder / "shards-1")
        assert (result.returncode, result.stderr) == (0, "")
        for line in result.stdout.splitlines():
            rank, _, tokens = line.partition(" ")
            printed[ranks, rank] = tokens
    assert len(printed) == 3
    assert len(set(printed.values())) == 1


def test_throughput_of_replicas(mpirun: MpiRun, folder: Path, tmp_path: Path) -> None:
    command = ("-m", "mpi_tp.bench", "throughput", "--shards", folder / "shards-1", "--tensor-parallel", "1")
    sizes = ("--requests", "9", "--input-len", "5:30", "--output-len", "4:8", "--max-batch-size", "2")
    result = mpirun(2, *command, *sizes, "--json", tmp_path / "x.json", env=ON_CPU, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    written = json.loads((tmp_path / "x.json").read_text())
    [row] = written["results"]
    assert (row["replicas"], row["requests"]) == (2, 9)
    assert 9 * 4 <= row["output_tokens"] <= 9 * 8
    assert row["first_token_p50_s"] is None
    assert len(written["meta"]["hardware"]) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_that_stalls_ends_the_job(mpirun: MpiRun, folder: Path, tmp_path: Path, rank: int) -> None:
    """Rank 0 misses the reports of the other, the other misses rank 0's assignments."""
    slow_input = SlowInput(tmp_path / "in.jsonl")
    flags = ("--shards", folder / "shards-1", "--input", slow_input.path, "--stall-timeout", "4")
    process = mpirun.start(2, "-m", "mpi_tp.infer", *flags, "--ignore-eos", env=ON_CPU)
    slow_input.write('{"prompt": "one", "max_new_tokens": 4}\n')
    assert read_record(process) == 1
    os.kill(rank_pids(process.pid)[rank], signal.SIGSTOP)
    slow_input.write(4 * '{"prompt": "one", "max_new_tokens": 100}\n')
    _, err = process.communicate(timeout=120)
    slow_input.close()
    assert process.returncode == 75, err
    (line,) = last_words(err)
    assert f"[rank {1 - rank}/2]" in line
    known = ("no progress for 4 s", f"no sign of life from rank {rank}", f"replica {rank} of 2 has work")
    assert any(words in line for words in known)


# --- on several hosts ---


@pytest.fixture(scope="module")
def hosts(mpirun: MpiRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if not mpirun.is_open_mpi:
        pytest.skip("hosts are told by Open MPI's settings")
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


PROGRAM = """
import socket
from types import SimpleNamespace
import torch
from mpi_tp import launch
from mpi_tp.devices import choose_device, connect, ranks_sharing
from mpi_tp.replicas import divide

def main(job):
    # As if each host had two GPUs that all its ranks see.
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        name="GPU", uuid=f"{socket.gethostname()}-{device.index}"
    )
    device = choose_device(job.world, "auto", share_gpu=False)
    sharing = ranks_sharing(job.world, torch.device("cpu"))
    replicas = divide(job.world, 3)
    comm = connect(replicas.ranks, "mpi", torch.device("cpu"), False)
    gathered = comm.all_gather(torch.full((2, 4), float(job.rank)), [4] * comm.size)
    facts = (socket.gethostname(), str(device), sharing, comm._shared is not None, gathered[1, ::4].tolist())
    everyone = job.world.gather(facts)
    if job.rank == 0:
        import json
        print(json.dumps(everyone))
    return 0

launch.run(main)
"""


def test_ranks_are_grouped_by_host(mpirun: MpiRun, hosts: Hosts, tmp_path: Path) -> None:
    """Devices are counted on each host anew, and memory is shared by the ranks of one host only."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = hosts.names
    result = mpirun(3, program, env=hosts.environment(2, 1), timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [
        [first, "cuda:0", 2, False, [0.0, 1.0, 2.0]],
        [first, "cuda:1", 2, False, [0.0, 1.0, 2.0]],
        [second, "cuda:0", 1, False, [0.0, 1.0, 2.0]],
    ]


def test_replicas_within_a_host_and_across_hosts_give_the_same_bytes(
    mpirun: MpiRun, hosts: Hosts, folder: Path, one_replica: bytes
) -> None:
    """Replica 0 has both its ranks on the first host; replica 1 has one on each."""
    output = infer(mpirun, folder, 4, 2, env=hosts.environment(3, 1))
    assert output.read_bytes() == one_replica
    facts = json.loads(output.with_name(f"{output.name}.meta.json").read_text())
    first, second = hosts.names
    assert [rank["host"] for rank in facts["ranks"]] == [first, first, first, second]
