"""All subjects by kind, with their share of the inputs."""

from tests.fuzz.sets import DamagedSet, ForgedManifest, ForgedRankFile, MendedRankFile
from tests.fuzz.sources import Folder, Gguf, Safetensors, TorchZip
from tests.fuzz.subjects import Subject
from tests.fuzz.texts import JsonLines, TokenizerFiles

SUBJECTS: dict[str, type[Subject]] = {
    subject.kind: subject
    for subject in (
        DamagedSet,
        ForgedRankFile,
        MendedRankFile,
        ForgedManifest,
        Safetensors,
        Gguf,
        TorchZip,
        Folder,
        JsonLines,
        TokenizerFiles,
    )
}

IN_PROCESS = [kind for kind in SUBJECTS if kind != MendedRankFile.kind]
"""Kinds that cannot take the process with them."""
