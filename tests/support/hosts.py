"""Hosts that are network namespaces of this one, each with a name of its own, as Slurm's nodes have."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

AGENT = """#!/bin/sh
# What the launcher takes for ssh: HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces behind one bridge; skips the test where there can be none."""

    def __init__(self, tmp_path: Path) -> None:
        unique = os.getpid() % 2**14
        self.names = [f"tp{unique}-{index}" for index in range(2)]
        self._network = f"10.{128 + unique // 256}.{unique % 256}"
        self._bridge = f"tp{unique}"
        self._file = tmp_path / "hosts"
        self._agent = tmp_path / "agent"
        self._agent.write_text(AGENT)
        self._agent.chmod(0o755)

    def __enter__(self) -> "Hosts":
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            pytest.skip("network namespaces need root, ip and unshare")
        try:
            self._set_up()
        except subprocess.CalledProcessError as error:
            self._tear_down()
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    def _set_up(self) -> None:
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

    def _tear_down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def environment(self, *ranks: int) -> Mapping[str, str]:
        """Return the settings by which Open MPI puts so many ranks on each host."""
        self._file.write_text("".join(f"{name} slots={n}\n" for name, n in zip(self.names, ranks, strict=True)))
        return {
            "PRTE_MCA_plm_ssh_agent": str(self._agent),
            "PRTE_MCA_prte_default_hostfile": str(self._file),
            "PRTE_MCA_prte_if_include": f"{self._network}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{self._network}.0/24",
            "PRTE_MCA_rmaps_default_mapping_policy": "slot",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
