"""Text to token ids and back, from the tokenizer files of a shard set or of a Hugging Face folder."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpi_tp.chat import ChatTemplate, Message, find_template
from mpi_tp.detokenizer import Detokenizer
from mpi_tp.errors import ConfigurationError, FileError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MODEL_CONFIG_FILE = "config.json"

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model's tokenizer, its end-of-sequence ids and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        eos_token_ids: frozenset[int],
        chat_template: str | None,
    ) -> None:
        """`special_tokens` are names as `bos_token` with their text; see `load`."""
        self._backend = backend
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._byte_ids = frozenset(id for token, id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        added_tokens = backend.get_added_tokens_decoder()
        # Some models forget to mark the token that ends their answers as a special one.
        self._hidden_ids = eos_token_ids | {id for id, token in added_tokens.items() if token.special}
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(vocabulary.values()) + 1

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and, where they exist, the files beside it.

        Raises FileError when tokenizer.json is missing or a file cannot be read, ConfigurationError for a chat
        template that cannot be used.
        """
        config = _read_json(directory / TOKENIZER_CONFIG_FILE)
        backend = _load_backend(directory / TOKENIZER_FILE)
        special_tokens = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, (str, dict))
        }
        return cls(
            backend,
            special_tokens,
            _find_eos_token_ids(directory, backend, special_tokens.get("eos_token")),
            find_template(directory, config),
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the BOS in front if the model's tokenizer puts one there."""
        return self._backend.encode(text).ids

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, by the model's chat template; a BOS comes from the template alone.

        Raises ConfigurationError when the model has no chat template, ValueError when it refuses the messages.
        """
        if self._chat_template is None:
            raise ConfigurationError(
                "this model has no chat template: send a prompt instead of messages, or put chat_template.jinja "
                "beside its tokenizer.json"
            )
        text = self._chat_template.render(messages, add_generation_prompt)
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens and EOS; an id that has no token gives no text."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self._backend.decode(shown, skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental decoder, for one sequence."""
        return Detokenizer(self.decode, self._hidden_ids, self._byte_ids)


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError, naming the first culprit, unless all ids are in [0, vocab_size)."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"token id {token_id} at position {position} is outside the vocabulary: "
                f"ids go from 0 to {vocab_size - 1}"
            )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise FileError(
            f"{path} is missing: without it only prompt_token_ids can be served; "
            "shard again with --tokenizer DIR to have it"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise FileError(f"{path} cannot be read: {error}") from error
    # A file may carry the settings of its training; prompts are never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _find_eos_token_ids(directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    """All ids that end a sequence: by generation_config.json, config.json and the tokenizer's own EOS."""
    configs = [_read_json(directory / name) for name in (GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE)]
    own_id = backend.token_to_id(eos_token) if eos_token is not None else None
    ids: set[int] = set()
    for entry in [*(config.get("eos_token_id") for config in configs), own_id]:
        if entry is not None:
            ids.update(entry if isinstance(entry, list) else [entry])
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{path} is no valid JSON: {error}") from error
