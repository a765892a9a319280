"""Finding the tokenizer of a checkpoint: named by the user, inside it, or beside it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from mpi_tp.errors import FileError
from mpi_tp.tokenizer import GENERATION_CONFIG_FILE, TOKENIZER_FILE
from sharder.formats import CheckpointReader
from sharder.formats.gguf_file import GgufReader
from sharder.formats.gguf_tokenizer import write_tokenizer

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", GENERATION_CONFIG_FILE)


def collect_tokenizer(reader: CheckpointReader, named: Path | None, target: Path) -> bool:
    """Put the tokenizer's files into the folder `target`; say whether there is a tokenizer at all.

    Raises FileError if the folder that the user `named` has no tokenizer.json, ConfigurationError for one inside a
    GGUF file that is not known.
    """
    if named and not (named / TOKENIZER_FILE).is_file():
        raise FileError(f"{named}/{TOKENIZER_FILE} does not exist: --tokenizer wants the folder that holds it")
    if isinstance(reader, GgufReader) and not named and "tokenizer.ggml.model" in reader.metadata:
        write_tokenizer(reader.metadata, target)
        return True
    folder = reader.path if reader.path.is_dir() else reader.path.parent
    return _copy_first([named, folder] if named else [folder], target)


def _copy_first(folders: Sequence[Path], target: Path) -> bool:
    """Copy the files of the first folder that has a tokenizer; the generation config may come from a later one."""
    folder = next((folder for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
    if folder is None:
        return False
    for name in TOKENIZER_FILES:
        places = folders if name == GENERATION_CONFIG_FILE else [folder]
        found = next((place / name for place in places if (place / name).is_file()), None)
        if found:
            copy_file(found, target / name)
    return True


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; FileError if it cannot be read or written."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise FileError(f"cannot copy {source} to {target}: {error.strerror}") from error
