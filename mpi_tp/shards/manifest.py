"""manifest.json to and from bytes; `mpi_tp.shards.format` says what is in it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.shards import manifest_fields
from mpi_tp.shards.checksum import checksum
from mpi_tp.shards.dtypes import dtype_name
from mpi_tp.shards.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    Manifest,
    SetOptions,
    TensorEntry,
)
from mpi_tp.shards.manifest_fields import FieldError

_FIRST_LINE = '{{"digest": "{}",\n'


def set_id(options: SetOptions, tensors: Iterable[TensorEntry]) -> str:
    """Return the set's identity, which follows from its content alone."""
    content = {
        "config": options.config,
        "strategy": options.strategy,
        "ranks": options.ranks,
        "tensors": [[t.name, dtype_name(t.dtype), t.planned.shape, t.checksum] for t in tensors],
    }
    return checksum(json.dumps(content, sort_keys=True).encode())


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json."""
    options = manifest.options
    fields = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "set_id": manifest.set_id,
        "created_by": manifest.created_by,
        "ranks": options.ranks,
        "strategy": options.strategy,
        "dtype": options.dtype,
        "config": options.config,
        "source": vars(options.source),
        "tensors": [_encode_tensor(tensor) for tensor in manifest.tensors.values()],
        "files": [vars(entry) for entry in manifest.files],
        "tokenizer": [vars(entry) for entry in manifest.tokenizer],
    }
    body = (",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in fields.items()) + "\n}\n").encode()
    return _FIRST_LINE.format(checksum(body)).encode() + body


def _lines(value: Any) -> str:
    """Return JSON with an item of a list a line: short, and readable."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[" + ",".join("\n  " + json.dumps(item) for item in value) + "]"


def _encode_tensor(tensor: TensorEntry) -> dict[str, Any]:
    return {**vars(tensor.planned), "dtype": dtype_name(tensor.dtype), "checksum": tensor.checksum}


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Return what the bytes of the manifest at `path` say.

    Raises FileError if any byte was changed, ConfigurationError if a newer version wrote it.
    """
    body = data.partition(b"\n")[2]
    if data != _FIRST_LINE.format(checksum(body)).encode() + body:
        raise FileError(f"{path} is damaged: its checksum does not match its content: shard the source again")
    try:
        fields = json.loads(data)
        version = fields["version"]
        if version == FORMAT_VERSION and fields["format"] == FORMAT_NAME:
            return _decode_fields(fields)
    except FieldError as error:
        raise FileError(f"{path} is damaged: {error}: shard the source again") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is no manifest of a shard set: {error!r}") from error
    raise ConfigurationError(
        f"{path} has format {fields.get('format')!r} version {version!r}, this program reads {FORMAT_NAME!r} version "
        f"{FORMAT_VERSION}: update mpi-tp, or shard the source again"
    )


def _decode_fields(fields: Mapping[str, Any]) -> Manifest:
    files = manifest_fields.rank_files(fields)
    return Manifest(
        set_id=manifest_fields.text(fields["set_id"], "set_id"),
        created_by=manifest_fields.text(fields["created_by"], "created_by"),
        options=manifest_fields.set_options(fields),
        tensors=manifest_fields.tensors(fields, len(files)),
        files=files,
        tokenizer=manifest_fields.tokenizer_files(fields),
    )
