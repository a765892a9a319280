"""GGUF tokenizers against llama.cpp's own token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.tokenizer import Tokenizer
from sharder.formats.gguf_header import parse_header
from sharder.formats.gguf_tokenizer import write_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2_tokens.json").read_text())["cases"]
PRE_TOKENIZERS = json.loads((GOLDEN / "pre_tokenizers.json").read_text())
SENTENCEPIECE = json.loads((GOLDEN / "sentencepiece_tokens.json").read_text())
NAMES = [(name, group["ids"]) for group in PRE_TOKENIZERS["groups"] for name in group["names"]]


@pytest.fixture(scope="session")
def demo_fields(demo_gguf: Path) -> dict[str, Any]:
    with demo_gguf.open("rb") as file:
        return dict(parse_header(file, demo_gguf.stat().st_size, demo_gguf).metadata)


@pytest.fixture(scope="session")
def demo_folder(demo_fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo_tokenizer")
    write_tokenizer(demo_fields, folder)
    return folder


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    """A small byte-level BPE; the last two tokens are a control and a user-defined one."""
    bos = len(PRE_TOKENIZERS["tokens"]) - 2
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": PRE_TOKENIZERS["tokens"],
        "token_type": PRE_TOKENIZERS["token_types"],
        "merges": PRE_TOKENIZERS["merges"],
        "bos_token_id": bos,
        "eos_token_id": bos,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": SENTENCEPIECE["tokens"],
        "scores": SENTENCEPIECE["scores"],
        "token_type": SENTENCEPIECE["token_types"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def load(fields: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer(fields, folder)
    return Tokenizer.load(folder)


def test_demo_model_gives_the_ids_of_llama_cpp(demo_folder: Path) -> None:
    tokenizer = Tokenizer.load(demo_folder)
    assert [tokenizer.encode(case["text"]) for case in SMOLLM2] == [case["ids"] for case in SMOLLM2]
    assert tokenizer.encode("  1") == [256, 33]


def test_demo_model_ends_at_its_eos(demo_folder: Path) -> None:
    tokenizer = Tokenizer.load(demo_folder)
    assert tokenizer.eos_token_ids == {2}


def test_demo_chat_prompt_as_transformers_builds_it(demo_folder: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi <b>"},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": ""},
    ]
    oracle = transformers.AutoTokenizer.from_pretrained(demo_folder)
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(demo_folder).encode_chat(messages) == expected


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=[name for name, _ in NAMES])
def test_pre_tokenizer_gives_the_ids_of_llama_cpp(name: str, expected: list[list[int]], tmp_path: Path) -> None:
    tokenizer = load(byte_level_fields(pre=name), tmp_path)
    assert [tokenizer.encode(text) for text in PRE_TOKENIZERS["texts"]] == expected


@pytest.mark.parametrize(("space_prefix", "key"), [(None, "ids"), (True, "ids"), (False, "ids_without_space_prefix")])
def test_sentencepiece_gives_the_ids_of_llama_cpp(space_prefix: bool | None, key: str, tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_fields(add_space_prefix=space_prefix), tmp_path)
    cases = SENTENCEPIECE["cases"]
    assert [tokenizer.encode(case["text"]) for case in cases] == [case[key] for case in cases]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_decodes_what_it_encodes(space_prefix: bool, tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_fields(add_space_prefix=space_prefix), tmp_path)
    texts = ["", " ", "  two  spaces ", "日本語", "🙂", "line\n\tnext"]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_file_decides_on_bos_and_eos(tmp_path: Path) -> None:
    bos, x = len(PRE_TOKENIZERS["tokens"]) - 2, PRE_TOKENIZERS["tokens"].index("x")
    assert load(byte_level_fields(), tmp_path).encode("x") == [x]
    assert load(byte_level_fields(add_bos_token=True), tmp_path).encode("x") == [bos, x]
    assert load(byte_level_fields(add_eos_token=True), tmp_path).encode("x") == [x, bos]
    assert load(byte_level_fields(pre="llama-bpe", add_bos_token=False), tmp_path).encode("x") == [x]
    assert load(sentencepiece_fields(add_bos_token=False), tmp_path).encode("")[:1] != [1]


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = load(byte_level_fields(), tmp_path)
    assert tokenizer.decode(tokenizer.encode("a<user>b<s>c")) == "a<user>bc"


def test_chat_model_also_ends_at_its_end_of_turn(tmp_path: Path) -> None:
    tokens, types = PRE_TOKENIZERS["tokens"], PRE_TOKENIZERS["token_types"]
    fields = byte_level_fields(
        tokens=[*tokens, "<|eot_id|>", "<|im_end|>", "<|other|>"],
        token_type=[*types, 3, 1, 3],  # a text that merely looks like an end of turn does not count
        eom_token_id=len(tokens) + 2,
    )
    assert load(fields, tmp_path).eos_token_ids == {len(tokens) - 2, len(tokens), len(tokens) + 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (byte_level_fields(pre="martian"), "pre-tokeniser 'martian'"),
        (byte_level_fields(pre=None), "tokenizer.ggml.pre"),
        (byte_level_fields(model="t5"), "kind 't5'"),
        (byte_level_fields(merges=None), "tokenizer.ggml.merges"),
        (sentencepiece_fields(scores=None), "tokenizer.ggml.scores"),
        ({}, "tokenizer.ggml.tokens"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        write_tokenizer(fields, tmp_path)
    assert "--tokenizer DIR" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (byte_level_fields(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "1 of its 3 tokens"),
        (byte_level_fields(merges=["not there"]), "out of vocabulary"),
        (byte_level_fields(merges=["ab"]), "the merge 'ab' has no two parts"),
        (byte_level_fields(bos_token_id=None, add_bos_token=True), "bos_token_id"),
        (byte_level_fields(eos_token_id=10**6), r"eos_token_id is 1000000, its tokens are 0 to \d+"),
        (byte_level_fields(eot_token_id=10**6), "eot_token_id is 1000000"),
        (byte_level_fields(padding_token_id="0"), "padding_token_id is '0', not int"),
        (byte_level_fields(token_type=[3]), r"token_type has 1 items for \d+ tokens"),
        (byte_level_fields(tokens=[1, 2], token_type=None), "tokens is no array of str"),
        (byte_level_fields(add_bos_token=1), "add_bos_token is 1, not bool"),
        (byte_level_fields() | {"tokenizer.chat_template": 7}, "chat_template is 7, not str"),
        (sentencepiece_fields(unknown_token_id=10**6), "unknown_token_id is 1000000"),
        (sentencepiece_fields(scores=[*SENTENCEPIECE["scores"], 0.0]), r"scores has \d+ items for \d+ tokens"),
        (sentencepiece_fields(scores=SENTENCEPIECE["scores"][1:]), r"scores has \d+ items for \d+ tokens"),
    ],
)
def test_damage_is_noticed(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=message):
        write_tokenizer(fields, tmp_path)
    assert not list(tmp_path.iterdir())
