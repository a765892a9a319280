"""Shard sets: damaged as a disk damages them, and forged by somebody who computes the digests anew."""

import contextlib
import dataclasses
import json
import os
import random
from pathlib import Path

import torch

from mpi_tp.errors import JobError
from mpi_tp.loading import check_plan
from mpi_tp.shards.checksum import checksum, digest_outside
from mpi_tp.shards.join import open_joiner
from mpi_tp.shards.rank_structure import read_structure
from mpi_tp.shards.reader import ShardSet
from sharder import Sharder
from sharder.inspect import describe
from sharder.verify import verify
from tests.fuzz.hdf5_blocks import find_blocks, mend
from tests.fuzz.mutations import change_bytes, change_json, json_bytes
from tests.fuzz.subjects import Finding, Subject, change
from tests.support.checkpoints import bits_equal
from tests.support.sets import save_checkpoint
from tests.support.shards import read_manifest, write_manifest

RANKS = 2


class _Set(Subject):
    """A set of a tiny model for two ranks, with a tokenizer."""

    def __init__(self, base: Path, scratch: Path) -> None:
        super().__init__(base, scratch)
        if not base.exists():
            checkpoint = save_checkpoint(base.with_name(f"{base.name}-source"), "llama-tied-biases")
            Sharder(checkpoint, RANKS, base).run()
        self.manifest = read_manifest(base)
        self.tensors = self._tensors(ShardSet.open(base))
        self.extents = []
        for rank in range(RANKS):
            with ShardSet.open(base).open_rank(rank) as file:
                self.extents.append([(part.offset, part.offset + part.num_bytes) for part in file.tensors.values()])

    def read(self) -> str:
        shards = ShardSet.open(self.scratch)
        describe(shards)
        check_plan(shards)
        shards.open_tokenizer()
        tensors = self._tensors(shards)
        if tensors.keys() != self.tensors.keys():
            raise Finding(f"it has other tensors: {sorted(tensors.keys() ^ self.tensors.keys())}")
        for name, tensor in tensors.items():
            if not bits_equal(tensor, self.tensors[name]):
                raise Finding(f"tensor {name} is another one")
        verify(self.scratch)
        return "loads equal"

    @staticmethod
    def _tensors(shards: ShardSet) -> dict[str, torch.Tensor]:
        with open_joiner(shards) as joiner:
            return {name: joiner.join(entry) for name, entry in shards.manifest.tensors.items()}


class DamagedSet(_Set):
    """Any file of the set is changed; nothing may pass."""

    kind = "set"

    def make(self, rng: random.Random) -> bool:
        files = sorted(path for path in self.scratch.rglob("*") if path.is_file())
        return change(rng.choice(files), lambda data: change_bytes(rng, data))

    def outcome(self, seed: int, index: int) -> str:
        outcome = super().outcome(seed, index)
        if outcome == "loads equal":
            raise Finding("damage was not noticed")
        if outcome != "unchanged":
            with contextlib.suppress(JobError):
                verify(self.scratch)
                raise Finding("verify did not notice the damage")
        return outcome


class ForgedRankFile(_Set):
    """The metadata of one HDF5 file are changed and the manifest says so: what is behind the digests is reached."""

    kind = "hdf5"

    def __init__(self, base: Path, scratch: Path) -> None:
        super().__init__(base, scratch)
        contents = [(base / entry.name).read_bytes() for entry in self.manifest.files]
        self._blocks = [find_blocks(content) for content in contents]
        mend(bytearray(contents[0]), self._blocks[0])  # compiles it, once

    def make(self, rng: random.Random) -> bool:
        rank = rng.randrange(RANKS)
        entry = self.manifest.files[rank]
        path = self.scratch / entry.name
        same = change(path, lambda data: self._change(rng, data, rank))
        size = path.stat().st_size
        try:
            parts = read_structure(path, size, self.manifest, rank).values()
            extents = [(part.offset, part.offset + part.num_bytes) for part in parts if part.num_bytes]
        except JobError:
            extents = self.extents[rank]
        descriptor = os.open(path, os.O_RDONLY)
        digest = digest_outside(descriptor, size, extents)
        os.close(descriptor)
        files = list(self.manifest.files)
        files[rank] = dataclasses.replace(entry, size=size, digest=digest)
        write_manifest(self.scratch, dataclasses.replace(self.manifest, files=files))
        return same

    def _change(self, rng: random.Random, data: bytes, rank: int) -> bytes:
        """Change blocks of the structure."""
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            start, end = rng.choice(self._blocks[rank])
            changed[start:end] = change_bytes(rng, bytes(changed[start:end])).ljust(end - start, b"\0")[: end - start]
        return bytes(changed)


class MendedRankFile(ForgedRankFile):
    """The same with HDF5's own checksums right too: this reaches the HDF5 library itself, which can crash."""

    kind = "hdf5-mended"

    def outcome(self, seed: int, index: int) -> str:
        """Let a process of its own read the input, as `verify` does; a crash is the HDF5 library's."""
        receiver, sender = os.pipe()
        if not (child := os.fork()):
            try:
                outcome = super().outcome(seed, index)
            except BaseException as error:
                outcome = f"!{error!r}"
            os.write(sender, outcome[:1000].encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as pipe:
            outcome = pipe.read()
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return "crash of the HDF5 library"
        if outcome.startswith("!"):
            raise Finding(outcome)
        return outcome

    def _change(self, rng: random.Random, data: bytes, rank: int) -> bytes:
        return mend(bytearray(super()._change(rng, data, rank)), self._blocks[rank])


class ForgedManifest(_Set):
    """The manifest's fields are changed, its digest is right."""

    kind = "manifest"

    def make(self, rng: random.Random) -> bool:
        path = self.scratch / "manifest.json"
        before = path.read_bytes()
        fields = json.loads(before)
        del fields["digest"]
        target = rng.choice(list(fields))
        holder = fields if rng.random() < 0.2 else {target: fields[target]}
        body = json_bytes({**fields, **change_json(rng, holder)} if holder is not fields else change_json(rng, fields))
        body = body[1:] if body.startswith(b"{") else body
        path.write_bytes(b'{"digest": "%s",\n' % checksum(body).encode() + body)
        return False
