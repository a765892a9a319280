"""Checkpoints: safetensors, GGUF and torch.save files and Hugging Face folders, changed in structure.

These formats have no checksums over the weights: a changed weight is another checkpoint. What is read must have the
shapes and dtypes that were announced, or be refused.
"""

import json
import random
import zipfile
from pathlib import Path

from mpi_tp.models.families import parse_config
from sharder.formats import open_checkpoint
from sharder.source import SourceOptions, open_source
from sharder.tokenizer_files import collect_tokenizer
from tests.fuzz.mutations import change_bytes, change_json, json_bytes
from tests.fuzz.subjects import Finding, Subject, change
from tests.support.checkpoints import write_gguf, write_model_and_config, write_safetensors, write_sharded_folder
from tests.support.engines import save_tokenizer
from tests.support.tiny import hf_config, tiny_model

MODEL = "llama-tied-biases"


class _Source(Subject):
    """One checkpoint, at `source` inside the folder, with what lies beside it."""

    source = ""

    def __init__(self, base: Path, scratch: Path) -> None:
        super().__init__(base, scratch)
        if not base.exists():
            base.mkdir(parents=True)
            model = tiny_model(MODEL)
            (base / "config.json").write_text(json.dumps(hf_config(model)))
            save_tokenizer(base)
            self.write(model, base)

    def write(self, model: object, base: Path) -> None:
        """Write the sound checkpoint into `base`."""
        raise NotImplementedError

    def read(self) -> str:
        path = self.scratch / self.source
        with open_checkpoint(path) as reader:
            for name in reader.names():
                reader.spec(name)
        target = self.scratch / "collected"
        target.mkdir()
        with open_source(path, SourceOptions()) as source:
            parse_config(source.config)
            source.fingerprint()
            for row in source.rows:
                tensor = source.read(row.name)
                if tuple(tensor.shape) != row.shape or not tensor.is_contiguous():
                    raise Finding(f"{row.name} has shape {tuple(tensor.shape)}, announced {row.shape}")
            collect_tokenizer(source.reader, None, target)
        return "read"


class Safetensors(_Source):
    """The header of a .safetensors file: its bytes, or its JSON with a length that fits."""

    kind, source = "safetensors", "weights.safetensors"

    def write(self, model: object, base: Path) -> None:
        write_safetensors(model, base)

    def make(self, rng: random.Random) -> bool:
        return change(self.scratch / self.source, lambda data: self._change(rng, data))

    @staticmethod
    def _change(rng: random.Random, data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if rng.random() < 0.5:
            return change_bytes(rng, data, 0, 8 + length)
        header = json_bytes(change_json(rng, json.loads(data[8 : 8 + length])))
        return len(header).to_bytes(8, "little") + header + data[8 + length :]


class Gguf(_Source):
    """The header of a .gguf file, with a tokenizer in it and quantised blocks behind it."""

    kind, source = "gguf", "model.gguf"

    def write(self, model: object, base: Path) -> None:
        tokens = [f"t{index}" for index in range(255)] + ["<s>", "</s>"]
        extra = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["t 1", "t 2"],
            "tokenizer.ggml.bos_token_id": 255,
            "tokenizer.ggml.eos_token_id": 256,
            "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        }
        write_gguf(model, base / self.source, extra=extra)
        with open_checkpoint(base / self.source) as reader:
            (base / "length").write_text(str(min(entry.offset for entry in reader._entries.values())))

    def make(self, rng: random.Random) -> bool:
        length = int((self.base / "length").read_text())
        return change(self.scratch / self.source, lambda data: change_bytes(rng, data, 0, length))


class TorchZip(_Source):
    """A torch.save file: the zip's own bytes, or the pickle in an archive whose checksums are right."""

    kind, source = "zip", "both.pt"

    def write(self, model: object, base: Path) -> None:
        write_model_and_config(model, base)

    def make(self, rng: random.Random) -> bool:
        path = self.scratch / self.source
        if rng.random() < 0.5:
            return change(path, lambda data: self._change_headers(rng, data))
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        pickled = next(name for name in records if name.endswith("/data.pkl"))
        before = records[pickled]
        records[pickled] = change_bytes(rng, before)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in records.items():
                archive.writestr(name, content)
        return records[pickled] == before

    @staticmethod
    def _change_headers(rng: random.Random, data: bytes) -> bytes:
        """Change a byte near a local header, or in the directory at the end."""
        headers = [
            at for at in range(len(data) - 4) if data[at : at + 3] in (b"PK\x03", b"PK\x01", b"PK\x05", b"PK\x06")
        ]
        start = rng.choice(headers)
        return change_bytes(rng, data, start, start + 60)


class Folder(_Source):
    """A Hugging Face folder of several files: its config, its index, its tokenizer's files."""

    kind, source = "folder", "sharded"

    def write(self, model: object, base: Path) -> None:
        write_sharded_folder(model, base)
        save_tokenizer(base / self.source)
        (base / self.source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')

    def make(self, rng: random.Random) -> bool:
        path = rng.choice(sorted((self.scratch / self.source).glob("*.json")))
        if rng.random() < 0.3:
            return change(path, lambda data: change_bytes(rng, data))
        return change(path, lambda data: json_bytes(change_json(rng, json.loads(data))))
