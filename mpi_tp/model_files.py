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


def read_text(path: Path) -> str:
    """Read a text. Raises FileError if the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
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
