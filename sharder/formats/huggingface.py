"""Reader of a Hugging Face model folder: `config.json` and one or many weight files, presented as one checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
import xxhash

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.model_files import MODEL_CONFIG_FILE, is_plain_name, read_json
from sharder.formats.base import CheckpointReader, TensorSpec

# Where transformers looks, in this order: one whole file, the index of several; we then take whatever lies there.
LAYOUTS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin"))


class HuggingFaceReader:
    """All tensors of a model folder, whose files are opened by `open_file`.

    Raises FileError for a missing or damaged file, ConfigurationError for a folder without weights or with two
    tensors of one name.
    """

    kind = "huggingface"

    def __init__(self, path: Path, open_file: Callable[[Path], CheckpointReader]) -> None:
        self.path = path
        config_file = path / MODEL_CONFIG_FILE
        self.config = read_json(config_file) if config_file.exists() else None
        files, index = _find_weights(path)
        with ExitStack() as stack:
            self._readers = [stack.enter_context(open_file(file)) for file in files]
            self._owners = _merge(self._readers)
            _check_index(index, self._owners, path)
            self._open = stack.pop_all()

    def __enter__(self) -> "HuggingFaceReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; the reader cannot be used any more."""
        self._open.close()

    def names(self) -> list[str]:
        """Names of all tensors, file after file."""
        return list(self._owners)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of tensor `name`."""
        return self._owners[name].spec(name)

    def read(self, name: str) -> torch.Tensor:
        """Read tensor `name`. Raises FileError."""
        return self._owners[name].read(name)

    def source_size(self) -> int:
        """Bytes of all weight files."""
        return sum(reader.source_size() for reader in self._readers)

    def header_digest(self) -> str:
        """xxh3_128 over the header digests of the files."""
        digests = "".join(reader.header_digest() for reader in self._readers)
        return xxhash.xxh3_128_hexdigest(digests.encode())


def _find_weights(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Return the weight files and the index (tensor name to file name; empty without one)."""
    for whole, pattern in LAYOUTS:
        index_file = folder / f"{whole}.index.json"
        if (folder / whole).exists():
            return [folder / whole], {}
        if index_file.exists():
            index = _read_index(index_file)
            return [folder / name for name in sorted(set(index.values()))], index
        if files := sorted(folder.glob(pattern)):
            return files, {}
    raise ConfigurationError(
        f"{folder} holds no .safetensors and no pytorch_model*.bin files; "
        "for another form (.pt, .gguf) give the file itself"
    )


def _read_index(path: Path) -> dict[str, str]:
    """Read the map from tensor names to file names; a file must lie in the folder itself."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise FileError(f"{path} is damaged: it has no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise FileError(f"{path} is damaged: {name} is said to lie in {file!r}, not a file of this folder")
    return index


def _merge(readers: list[CheckpointReader]) -> dict[str, CheckpointReader]:
    """Return each tensor's reader."""
    owners: dict[str, CheckpointReader] = {}
    for reader in readers:
        for name in reader.names():
            if name in owners:
                raise ConfigurationError(
                    f"{name} is in {owners[name].path} and in {reader.path}; remove the file that does not belong"
                )
            owners[name] = reader
    return owners


def _check_index(index: Mapping[str, str], owners: Mapping[str, CheckpointReader], folder: Path) -> None:
    """Check that every tensor of the index is where it says."""
    for name, file in index.items():
        found = owners[name].path.name if name in owners else "no file"
        if found != file:
            raise FileError(f"{folder}: by its index {name} is in {file}, found in {found}; get the folder again")
