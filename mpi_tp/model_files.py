"""The small files that come with a model: their names, and how they are read."""

import json
from pathlib import Path
from typing import Any

from mpi_tp.errors import FileError

MODEL_CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
SMALL_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE)
"""What a set holds in tokenizer/, and nothing else."""

MAX_TEXT_BYTES = 64 << 20
"""A config, index or template that is larger is none; parsed, JSON takes up to thirty times its size."""


def is_plain_name(name: str) -> bool:
    """Say whether a name that stands in a file is that of a file in the same folder, and leads nowhere else."""
    return name.isprintable() and name not in ("", ".", "..") and "/" not in name


def read_text(path: Path) -> str:
    """Read a text. Raises FileError if the file cannot be read, is not UTF-8 or longer than any such file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise FileError(f"{path} has more than {MAX_TEXT_BYTES} bytes: is it the right file?")
        return content.decode("utf-8")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is damaged: not UTF-8 at byte {error.start}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FileError if the file cannot be read or holds anything else."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} is damaged: it holds a JSON {type(content).__name__}, not an object")
    return content
