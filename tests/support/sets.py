"""Shard sets of tiny models, made as a user makes them."""

from pathlib import Path
from typing import Any

from mpi_tp.partition.plan import Strategy
from sharder import Sharder
from tests.support.engines import save_tokenizer
from tests.support.tiny import tiny_model

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def save_checkpoint(folder: Path, name: str = "llama3-rope", **tokenizer_config: Any) -> Path:
    """Write a tiny model as a Hugging Face folder, with a tokenizer of one token a byte."""
    tiny_model(name).save_pretrained(folder)
    save_tokenizer(folder, **tokenizer_config)
    return folder


def make_sets(checkpoint: Path, folder: Path, *ranks: int, strategy: Strategy = "column_wise") -> dict[int, Path]:
    """Shard a checkpoint for each of these rank counts; return the sets by rank count."""
    sets = {count: folder / f"shards-{count}" for count in ranks}
    for count, directory in sets.items():
        Sharder(checkpoint, count, directory, strategy).run()
    return sets
