"""Tokenizer, chat templates, incremental text; tokenizers of both kinds are made here."""

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mpi_tp.detokenizer import StopChecker
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.tokenizer import Tokenizer

LETTERS = ["▁", "t", "h", "e", "c", "a", "é", "\n"]
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("c", "at"), ("▁", "cat"), ("▁", "▁"), ("▁", "a")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "[{{ message.role }}]{{ message.content | tojson }}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ strftime_now('%Y') }}"
)
MESSAGES = [{"role": "system", "content": "<é>"}, {"role": "user", "content": "a\n'b'"}]


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama-2's form: byte fallback, a space in front of the first word, BOS before the prompt."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *map("".join, MERGES)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_level_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


BACKENDS = {"sentencepiece": sentencepiece_backend, "byte-level": byte_level_backend}


def save(folder: Path, kind: str = "sentencepiece", **config: Any) -> Path:
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(save(tmp_path, request.param))


def test_prompt_as_transformers_encodes_it(tmp_path: Path) -> None:
    folder = save(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    for text in ("", " the cat", "cats 🙂", "the</s>cat"):
        ids = tokenizer.encode(text)
        assert ids == oracle(text)["input_ids"]
        assert ids[0] == 1
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("abcd")) == 4


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, {2}),
        ({"eos_token_id": 7}, {2, 7}),
        ({"eos_token_id": [7, 8]}, {2, 7, 8}),
        ({"eos_token_id": None}, {2}),
    ],
)
def test_all_end_of_sequence_ids_are_found(generation_config: Any, expected: set[int], tmp_path: Path) -> None:
    save(tmp_path)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_end_of_sequence_is_never_text(tmp_path: Path) -> None:
    save(tmp_path, "byte-level")
    eos = Tokenizer.load(tmp_path).encode("!")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a!b")) == "ab"


def test_id_without_token_gives_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode([*ids, 10**6]) == "the cat"


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": "\xff"}'])
def test_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (save(tmp_path) / name).write_bytes(content)
    with pytest.raises(FileError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"eos_token": {"lstrip": false}}', "the content of eos_token is None"),
        ("tokenizer_config.json", r'{"eos_token": "\ud800"}', r"the content of eos_token is '\\ud800'"),
        ("tokenizer_config.json", '{"chat_template": {"default": "x"}}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat_template is neither"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2'"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', "eos_token_id is"),
    ],
)
def test_fields_of_the_wrong_kind_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (save(tmp_path) / name).write_text(content)
    with pytest.raises(FileError, match=rf"{name} is damaged: .*{message}"):
        Tokenizer.load(tmp_path)


def test_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (save(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FileError, match=r"chat_template\.jinja is damaged: not UTF-8 at byte 0"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
def test_file_that_the_system_refuses_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (save(tmp_path) / name).write_text("{}")
    open_file = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=rf"{name} cannot be read: Permission denied"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("where", ["file", "config", "named"])
def test_chat_prompt_as_transformers_builds_it(where: str, tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    config = {"config": {"chat_template": TEMPLATE}, "named": {"chat_template": named}, "file": {}}[where]
    folder = save(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ids = Tokenizer.load(folder).encode_chat(MESSAGES)
    assert ids == expected
    assert ids.count(1) == 1


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (save(tmp_path, chat_template="cat") / "chat_template.jinja").write_text("the")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "the"


def test_missing_chat_template_is_a_matter_of_configuration(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{% if %}", "broken at line 1"),
        ("{{ 'x' | center(10000000000) }}", "broken at line 1: the number 1e.10 is too large"),
        ([{"name": "rag", "template": "x"}], "names the chat templates rag but not 'default'"),
    ],
)
def test_unusable_template_is_refused(chat_template: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Tokenizer.load(save(tmp_path, chat_template=chat_template))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, "no tools here"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ 1 // (messages | length - 1) }}", "refuses these messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses these messages"),
        ("{{ messages[0].name.first }}", "refuses these messages"),
        ("{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}", "beyond what any"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "refuses these messages"),
        ("{{ 'x' * 10000 * 10000 }}", "beyond what any"),
        ("{{ [0] * 10000 * 10000 }}", "beyond what any"),
        (
            "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "beyond what any",
        ),
        (
            "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
            "beyond what any",
        ),
        ("{{ 999999 ** 999999 }}", "beyond what any"),
        ("{{ '%999999999d' % 1 }}", "beyond what any"),
        ("{{ '{:999999999}'.format(1) }}", "beyond what any"),
        ("{{ 'x'.center(999999 * 9) }}", "beyond what any"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_template_refuses_messages(template: str, message: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_bounds_leave_long_conversations_alone(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content * 2 ~ 1 ~ none }}{% endfor %}"
    tokenizer = Tokenizer.load(save(tmp_path, chat_template=template))
    messages = [{"role": "user", "content": "x" * 100}] * 1000
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == ("<user>" + "x" * 200 + "1None") * 1000


@pytest.mark.parametrize("kind", BACKENDS)
def test_pieces_join_to_the_text_of_all_ids(tmp_path: Path, kind: str) -> None:
    backend = BACKENDS[kind]()
    tokenizer = Tokenizer.load(save(tmp_path, kind))
    generator = random.Random(0)
    likely = [*tokenizer.encode("the cat 🙂 日本 é\n\N{REPLACEMENT CHARACTER}"), 1, 2]
    for _ in range(2000):
        length = generator.randrange(12)
        ids = [
            generator.choice(likely) if generator.random() < 0.7 else generator.randrange(backend.get_vocab_size())
            for _ in range(length)
        ]
        detokenizer = tokenizer.detokenizer()
        pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
        assert "".join(pieces) == tokenizer.decode(ids), ids


def test_no_piece_is_half_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    text = "the 👨‍👩‍👧 cat日本é"
    pieces = [detokenizer.add(token_id) for token_id in tokenizer.encode(text)]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_text_comes_as_soon_as_it_is_final(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, "byte-level"))
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(token_id) for token_id in tokenizer.encode("aé b")] == ["a", "", "é", " ", "b"]


def test_space_after_a_special_token_stays(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    word = tokenizer.encode("the")[1]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(token_id) for token_id in (1, word, 2, word)] == ["", "the", "", " the"]


STOP_CASES = [
    ("one END two", ["END"], "one "),
    ("no stop here", ["END"], None),
    ("EN EN", ["END"], None),
    ("aab", ["ab"], "a"),
    ("xabcd", ["abcd", "bc"], "xa"),  # `bc` is complete first
    ("xabc", ["bc", "abc"], "x"),  # both at once: the longer one leaves less
    ("first\n\nsecond", ["\n\n"], "first"),
    ("🙂🙃", ["🙃"], "🙂"),
    ("anything", [], None),
    ("END", ["END"], ""),
]


@pytest.mark.parametrize(("text", "stop", "before"), STOP_CASES)
@pytest.mark.parametrize("length", [1, 2, 3, 100])
def test_stop_string_cuts_the_text_wherever_pieces_end(
    text: str, stop: list[str], before: str | None, length: int
) -> None:
    checker = StopChecker(stop)
    shown = ""
    for at in range(0, len(text), length):
        shown += checker.add(text[at : at + length])
        assert text.startswith(shown)
        assert before is None or before.startswith(shown)
    assert checker.stopped == (before is not None)
    if before is None:
        held = text[len(shown) :]
        assert not held or any(string.startswith(held) for string in stop), "what cannot become a stop string is held"
    else:
        assert shown == before
        assert checker.add("more") == ""


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["</s>", "<|end|>"])
    assert checker.add("a <") == "a "
    assert checker.add("b") == "<b"
    assert checker.add("<|en") == ""
    assert checker.add("ough") == "<|enough"


def test_a_text_of_megabytes_is_known_to_be_too_long_without_encoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.is_surely_longer("a" * 1_000_000, 1000)
    assert not tokenizer.is_surely_longer("a", 1)
