"""Text files: input lines, plain and packed, and tokenizers with their chat template."""

import gzip
import json
import random
from pathlib import Path

from mpi_tp.engine.request import SamplingParams
from mpi_tp.records import BadLine, InputLine, read_lines
from mpi_tp.tokenizer import Tokenizer
from tests.fuzz.mutations import change_bytes, change_json, json_bytes
from tests.fuzz.subjects import Finding, Subject, change
from tests.support.engines import save_tokenizer

LINES = (
    {"id": 1, "prompt": "one", "temperature": 0.5, "stop": ["a"]},
    {"id": "b", "messages": [{"role": "user", "content": [{"type": "text", "text": "two"}]}], "n": 2},
    {"prompt_token_ids": [1, 2, 3], "seed": 7, "logprobs": True},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "four"}},
)


class JsonLines(Subject):
    """Lines of every form: each gives one item, and none changes what the others say."""

    kind = "jsonl"

    def __init__(self, base: Path, scratch: Path) -> None:
        super().__init__(base, scratch)
        base.mkdir(parents=True, exist_ok=True)
        self._packed = False

    def make(self, rng: random.Random) -> bool:
        lines = [json_bytes(change_json(rng, line)) if rng.random() < 0.5 else json_bytes(line) for line in LINES]
        if rng.random() < 0.5:
            at = rng.randrange(len(lines))
            lines[at] = change_bytes(rng, lines[at])
        self._content = b"\n".join(lines)
        self._packed = rng.random() < 0.3
        data = gzip.compress(self._content) if self._packed else self._content
        (self.scratch / "in.jsonl").write_bytes(change_bytes(rng, data) if self._packed else data)
        return False

    def read(self) -> str:
        items = list(read_lines(self.scratch / "in.jsonl", SamplingParams()))
        filled = [number for number, line in enumerate(self._content.split(b"\n"), 1) if line.strip()]
        if not self._packed and [item.number for item in items] != filled:
            raise Finding(f"lines {filled} gave {[item.number for item in items]}")
        for item in items:
            if isinstance(item, BadLine):
                json.dumps([item.id, item.type, item.message], allow_nan=False)
        return "read" if all(isinstance(item, InputLine) for item in items) else "error records"


class TokenizerFiles(Subject):
    """tokenizer.json, tokenizer_config.json, generation_config.json and the chat template."""

    kind = "tokenizer"

    def __init__(self, base: Path, scratch: Path) -> None:
        super().__init__(base, scratch)
        if not base.exists():
            base.mkdir(parents=True)
            save_tokenizer(base)
            (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
            (base / "chat_template.jinja").write_text(
                "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}"
            )

    def make(self, rng: random.Random) -> bool:
        path = rng.choice(sorted(self.scratch.iterdir()))
        if path.suffix == ".json" and rng.random() < 0.7:
            return change(path, lambda data: json_bytes(change_json(rng, json.loads(data))))
        return change(path, lambda data: change_bytes(rng, data))

    def read(self) -> str:
        tokenizer = Tokenizer.load(self.scratch)
        try:
            ids = tokenizer.encode_chat([{"role": "user", "content": "some text"}])
        except ValueError:  # what a template may raise: an error record
            ids = tokenizer.encode("some text")
        tokenizer.decode(ids)
        return "read"
