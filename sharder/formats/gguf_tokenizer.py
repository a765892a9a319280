"""The tokenizer inside a GGUF file, written as the Hugging Face files that the `tokenizers` package loads.

Two kinds are known: `gpt2`, a byte-level BPE with its merges, and `llama`, SentencePiece's BPE, which has scores
instead. Both must give the ids that llama.cpp gives.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.model_files import CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from sharder.formats.pre_tokenizers import PreTokenizer, find_pre_tokenizer

Fields = Mapping[str, Any]
Json = dict[str, Any]

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

# A chat model ends its turn with one of these; the EOS of the file may be another token.
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")


class _Vocabulary(NamedTuple):
    tokens: list[str]
    types: Sequence[int]
    ids: dict[str, int]


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, if there is one, the chat template.

    `fields` holds the metadata of the GGUF file under its own keys, as Python values. `directory` must exist.
    Raises ConfigurationError for a tokenizer or pre-tokeniser that is not known, FileError when the metadata are of
    wrong types or contradict themselves.
    """
    vocabulary = _read_vocabulary(fields)
    kind = _require(fields, "model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(fields, vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(fields, vocabulary)
    else:
        raise ConfigurationError(
            f"the GGUF file has a tokenizer of kind '{kind}', but only 'gpt2' and 'llama' can be read: "
            "give the model's Hugging Face tokenizer with --tokenizer DIR"
        )
    files = {
        TOKENIZER_FILE: _checked(json.dumps(tokenizer, ensure_ascii=False)),
        TOKENIZER_CONFIG_FILE: _json_text(_tokenizer_config(fields, vocabulary)),
        GENERATION_CONFIG_FILE: _json_text(_generation_config(fields, vocabulary)),
    }
    if template := _value(fields, "tokenizer.chat_template", str, ""):
        files[CHAT_TEMPLATE_FILE] = template
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def _checked(text: str) -> str:
    """Return the tokenizer.json after the `tokenizers` package has read it."""
    try:
        tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise _damaged(error) from error
    return text


def _byte_level_bpe(fields: Fields, vocabulary: _Vocabulary) -> Json:
    pre_tokenizer = find_pre_tokenizer(str(_require(fields, "pre")))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "ignore_merges": pre_tokenizer.ignore_merges,
        "vocab": vocabulary.ids,
        # The first of the two parts may itself begin with a space.
        "merges": [_split_merge(merge) for merge in _array(fields, "merges", str)],
    }
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_splits(pre_tokenizer), byte_level]},
        "post_processor": _post_processor(fields, vocabulary, add_bos=pre_tokenizer.add_bos),
        "decoder": byte_level,
        "model": model,
    }


def _splits(pre_tokenizer: PreTokenizer) -> list[Json]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]


def _split_merge(merge: str) -> list[str]:
    at = merge.find(" ", 1)
    if at < 0:
        raise _damaged(f"the merge {merge!r} has no two parts")
    return [merge[:at], merge[at + 1 :]]


def _sentencepiece_bpe(fields: Fields, vocabulary: _Vocabulary) -> Json:
    """Without a pre-tokeniser: words are joined by visible spaces, and merges may run across them."""
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    show_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    normalizers, decoders = [replace_spaces], [show_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if _value(fields, "tokenizer.ggml.add_space_prefix", bool, True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown_id = _special_id(fields, vocabulary, "unknown")
    assert unknown_id is not None, "SentencePiece has a default"
    scores = _array(fields, "scores", float, len(vocabulary.tokens))
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(fields, vocabulary, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[unknown_id],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids,
            "merges": list(_merges_from_scores(vocabulary, scores)),
        },
    }


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make a token, the best-scored token first: SentencePiece merges in this order."""
    ids = vocabulary.ids
    for token_id in sorted(range(len(scores)), key=lambda token_id: -scores[token_id]):
        token = vocabulary.tokens[token_id]
        parts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in parts if left in ids and right in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    """The tokens found in a text before it is split; special ones are left out of decoded text."""
    return [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, kind in enumerate(vocabulary.types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(fields: Fields, vocabulary: _Vocabulary, add_bos: bool) -> Json:
    """Puts BOS and EOS around a prompt, as the file says; `add_bos` is what holds when it says nothing."""
    text: Json = {"Sequence": {"id": "A", "type_id": 0}}
    single, special_tokens = [text], {}
    for name, wanted, at in (("bos", add_bos, 0), ("eos", False, 2)):
        if not _value(fields, f"tokenizer.ggml.add_{name}_token", bool, wanted):
            continue
        token_id = _special_id(fields, vocabulary, name)
        if token_id is None:
            raise FileError(
                f"the GGUF file puts a {name.upper()} around prompts but has no tokenizer.ggml.{name}_token_id: "
                "give the model's Hugging Face tokenizer with --tokenizer DIR"
            )
        token = vocabulary.tokens[token_id]
        single.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
        special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens}


def _tokenizer_config(fields: Fields, vocabulary: _Vocabulary) -> Json:
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _special_id(fields, vocabulary, key)
        if token_id is not None:
            config[f"{name}_token"] = vocabulary.tokens[token_id]
    return config


def _generation_config(fields: Fields, vocabulary: _Vocabulary) -> Json:
    ends = [_special_id(fields, vocabulary, name) for name in ("eos", "eot", "eom")]
    ends += [
        vocabulary.ids[token]
        for token in _END_OF_TURN
        if token in vocabulary.ids and vocabulary.types[vocabulary.ids[token]] == CONTROL
    ]
    config: Json = {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}
    if (bos := _special_id(fields, vocabulary, "bos")) is not None:
        config["bos_token_id"] = bos
    return config


def _special_id(fields: Fields, vocabulary: _Vocabulary, name: str) -> int | None:
    """The id of a special token; SentencePiece has ids of its own for those that the file does not name."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if fields["tokenizer.ggml.model"] == "llama" else {}
    key = f"tokenizer.ggml.{name}_token_id"
    token_id: int | None = _value(fields, key, int, defaults.get(name))
    if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
        raise _damaged(f"{key} is {token_id}, its tokens are 0 to {len(vocabulary.tokens) - 1}")
    return token_id


def _read_vocabulary(fields: Fields) -> _Vocabulary:
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(_array(fields, "tokens", str))]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise _damaged(f"{len(tokens) - len(ids)} of its {len(tokens)} tokens are there twice")
    has_types = "tokenizer.ggml.token_type" in fields
    types = _array(fields, "token_type", int, len(tokens)) if has_types else [NORMAL] * len(tokens)
    return _Vocabulary(tokens, types, ids)


def _array(fields: Fields, name: str, kind: type, length: int | None = None) -> list[Any]:
    """Return an array of the metadata after a check of its items' type and, where one is given, of its length."""
    items = _require(fields, name)
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise _damaged(f"tokenizer.ggml.{name} is no array of {kind.__name__}")
    if length is not None and len(items) != length:
        raise _damaged(f"tokenizer.ggml.{name} has {len(items)} items for {length} tokens")
    return items


def _value(fields: Fields, key: str, kind: type, default: Any) -> Any:
    """Return a single value of the metadata after a check of its type; `default` if it is not there."""
    if key not in fields:
        return default
    if type(fields[key]) is not kind:
        raise _damaged(f"{key} is {fields[key]!r:.40}, not {kind.__name__}")
    return fields[key]


def _require(fields: Fields, name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in fields:
        raise ConfigurationError(
            f"the GGUF file has no {key}: give the model's Hugging Face tokenizer with --tokenizer DIR"
        )
    return fields[key]


def _damaged(what: object) -> FileError:
    return FileError(f"the tokenizer in the GGUF file is damaged: {what}; give another with --tokenizer DIR")


def _json_text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
