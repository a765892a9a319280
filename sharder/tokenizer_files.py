"""Finding the tokenizer of a checkpoint: named by the user, inside it, or beside it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from mpi_tp.errors import FileError
from sharder.formats import CheckpointReader
from sharder.formats.gguf_file import GgufReader
from sharder.formats.gguf_tokenizer import write_tokenizer

TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", GENERATION_CONFIG_FILE)


def collect_tokenizer(reader: CheckpointReader, named: Path | None, target: Path) -> None:
    """Put the tokenizer's files into the folder `target`; none if there is no tokenizer.

    Raises FileError if the folder that the user `named` has no tokenizer.json, ConfigurationError for one inside a
    GGUF file that is not known.
    """
    if named and not (named / TOKENIZER_FILE).is_file():
        raise FileError(f"{named}/{TOKENIZER_FILE} does not exist: --tokenizer wants the folder that holds it")
    if isinstance(reader, GgufReader) and not named and "tokenizer.ggml.model" in reader.metadata:
        write_tokenizer(reader.metadata, target)
        return
    folder = reader.path if reader.path.is_dir() else reader.path.parent
    _copy_first([named, folder] if named else [folder], target)


def _copy_first(folders: Sequence[Path], target: Path) -> None:
    """Copy the files of the first folder that has a tokenizer; the generation config may come from a later one."""
    folder = next((folder for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
    if folder is None:
        return
    for name in TOKENIZER_FILES:
        places = folders if name == GENERATION_CONFIG_FILE else [folder]
        found = next((place / name for place in places if (place / name).is_file()), None)
        if found:
            _copy_file(found, target / name)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file; FileError if it cannot be read or written."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise FileError(f"cannot copy {source} to {target}: {error.strerror}") from error
