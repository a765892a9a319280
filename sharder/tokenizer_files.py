"""Finding the tokenizer of a checkpoint: named by the user, inside it, or beside it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from mpi_tp.errors import FileError
from mpi_tp.model_files import CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from mpi_tp.tokenizer import Tokenizer, read_eos_token_ids
from sharder.formats import CheckpointReader
from sharder.formats.gguf_file import GgufReader
from sharder.formats.gguf_tokenizer import write_tokenizer


def collect_tokenizer(reader: CheckpointReader, named: Path | None, target: Path) -> None:
    """Put the tokenizer's files into the folder `target`; none if there is no tokenizer.

    What is put there can be loaded. Raises FileError if the folder that the user `named` has no tokenizer.json, or for
    files that are damaged or cannot be copied; ConfigurationError for a tokenizer inside a GGUF file that is not known
    and for a chat template that cannot be used.
    """
    try:
        if named and not (named / TOKENIZER_FILE).is_file():
            raise FileError(f"{named}/{TOKENIZER_FILE} does not exist: --tokenizer wants the folder that holds it")
        if isinstance(reader, GgufReader) and not named and "tokenizer.ggml.model" in reader.metadata:
            write_tokenizer(reader.metadata, target)
            Tokenizer.load(target)
        else:
            folder = reader.path if reader.path.is_dir() else reader.path.parent
            _copy_first([named, folder] if named else [folder], target)
    except OSError as error:
        raise FileError(f"cannot copy the tokenizer to {target}: {error.filename}: {error.strerror}") from error


def _copy_first(folders: Sequence[Path], target: Path) -> None:
    """Copy the files of the first folder that has a tokenizer; the generation config may come from a later one."""
    folder = next((folder for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
    if folder is None:
        return
    Tokenizer.load(folder)  # of the originals, so that a message names the file to mend
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    found = next((place for place in folders if (place / GENERATION_CONFIG_FILE).is_file()), None)
    if found:
        read_eos_token_ids(found / GENERATION_CONFIG_FILE)
        shutil.copyfile(found / GENERATION_CONFIG_FILE, target / GENERATION_CONFIG_FILE)
