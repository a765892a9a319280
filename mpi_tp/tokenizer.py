"""Text to token ids and back, from the tokenizer files of a shard set or of a Hugging Face folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpi_tp.chat import ChatTemplate, Message, find_template
from mpi_tp.detokenizer import Detokenizer
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.model_files import GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, read_json

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell one, no tokenizer can read it
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
        self._longest_token = max(map(len, vocabulary), default=0)
        self._byte_ids = frozenset(id for token, id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        added_tokens = backend.get_added_tokens_decoder()
        # Some models forget to mark the token that ends their answers as a special one.
        self._hidden_ids = eos_token_ids | {id for id, token in added_tokens.items() if token.special}
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and, where they exist, the files beside it.

        Raises FileError when tokenizer.json is missing or a file is damaged or cannot be read, ConfigurationError for
        a chat template that cannot be used.
        """
        config_file = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_file) if config_file.is_file() else {}
        backend = _load_backend(directory / TOKENIZER_FILE)
        special_tokens = _special_tokens(config, config_file)
        own_eos_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
        eos_token_ids = read_eos_token_ids(directory / GENERATION_CONFIG_FILE)
        return cls(
            backend,
            special_tokens,
            eos_token_ids if own_eos_id is None else eos_token_ids | {own_eos_id},
            find_template(directory, config),
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the BOS in front if the model's tokenizer puts one there."""
        return self._backend.encode(text).ids

    def is_surely_longer(self, text: str, num_tokens: int) -> bool:
        """Say, at once, whether a text is too long for so many tokens even if each were the longest one.

        Encoding megabytes takes seconds, during which no other thread of the process runs.
        """
        return len(text) > num_tokens * self._longest_token

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the answer begins, by the model's chat template.

        A BOS comes from the template alone.

        Raises ConfigurationError when the model has no chat template, ValueError when it refuses the messages.
        """
        if self._chat_template is None:
            raise ConfigurationError(
                "this model has no chat template: send a prompt instead of messages, or put chat_template.jinja "
                "beside its tokenizer.json"
            )
        text = self._chat_template.render(messages)
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens and EOS; an id that has no token gives no text."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self._backend.decode(shown, skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental decoder, for one sequence."""
        return Detokenizer(self.decode, self._hidden_ids, self._byte_ids)


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Return all ids that end a sequence by the generation_config.json at `path`, none if there is no such file.

    Raises FileError if it cannot be read or its `eos_token_id` is neither an id nor a list of ids.
    """
    entry = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise FileError(f"{path} is damaged: eos_token_id is {entry!r}: it must be a token id or a list of them")
    return frozenset(ids)


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json by name: each is a text, or an object with its content."""
    tokens: dict[str, str] = {}
    for name, token in config.items():
        if name.endswith("_token") and isinstance(token, str | dict):
            text = token if isinstance(token, str) else token.get("content")
            if not isinstance(text, str) or _SURROGATE.search(text):
                raise FileError(f"{path} is damaged: the content of {name} is {text!r}: it must be text")
            tokens[name] = text
    return tokens


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
