"""Ranks on two hosts that are network namespaces of this one, each with a name of its own, as Slurm's nodes have."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.conftest import MpiRun
from tests.cli.test_replicas import folder, infer, one_replica  # noqa: F401

AGENT = """#!/bin/sh
# What the launcher takes for ssh: HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces behind one bridge, as Open MPI is told of them by `environment`."""

    def __init__(self, tmp_path: Path) -> None:
        unique = os.getpid() % 2**14
        self.names = [f"tp{unique}-{index}" for index in range(2)]
        self._network = f"10.{128 + unique // 256}.{unique % 256}"
        self._bridge = f"tp{unique}"
        self._file = tmp_path / "hosts"
        self._agent = tmp_path / "agent"
        self._agent.write_text(AGENT)
        self._agent.chmod(0o755)

    def set_up(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._network}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self._network}.{index + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def environment(self, *ranks: int) -> Mapping[str, str]:
        """Put so many ranks on each host."""
        self._file.write_text("".join(f"{name} slots={n}\n" for name, n in zip(self.names, ranks, strict=True)))
        return {
            "PRTE_MCA_plm_ssh_agent": str(self._agent),
            "PRTE_MCA_prte_default_hostfile": str(self._file),
            "PRTE_MCA_prte_if_include": f"{self._network}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{self._network}.0/24",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }


@pytest.fixture(scope="module")
def hosts(mpirun: MpiRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    if not mpirun.is_open_mpi:
        pytest.skip("starts Open MPI's daemons, by its own settings")
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.set_up()
    except subprocess.CalledProcessError as error:
        hosts.tear_down()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield hosts
    hosts.tear_down()


PROGRAM = """
import socket
import torch
from mpi_tp import launch
from mpi_tp.devices import choose_device, connect, ranks_sharing
from mpi_tp.replicas import divide

def main(job):
    # As if each host had two GPUs that all its ranks see.
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: type("P", (), {"uuid": f"{socket.gethostname()}-{device.index}"})
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
    mpirun: MpiRun,
    hosts: Hosts,
    folder: Path,  # noqa: F811
    one_replica: bytes,  # noqa: F811
) -> None:
    """Replica 0 has both its ranks on the first host; replica 1 has one on each."""
    output = infer(mpirun, folder, 4, 2, env=hosts.environment(3, 1))
    assert output.read_bytes() == one_replica
    facts = json.loads(output.with_name(f"{output.name}.meta.json").read_text())
    first, second = hosts.names
    assert [rank["host"] for rank in facts["ranks"]] == [first, first, first, second]
