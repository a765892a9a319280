"""How a byte-level BPE tokenizer of a GGUF file cuts text into words, by the name in `tokenizer.ggml.pre`.

A GGUF file holds vocabulary and merges, but of the pre-tokeniser only a name. What a name means is fixed by llama.cpp:
a chain of regular expressions; each splits what the ones before it left, and what lies between two matches is a word
too. A wrong one does not fail: it gives other tokens, and a slightly worse model. So a name that is not in this table
is refused.

Case: llama.cpp's regular expressions know upper and lower case of ASCII letters only,
so the models that cut words at a change of case are treated so here too.
"""

from dataclasses import dataclass

from mpi_tp.errors import ConfigurationError


@dataclass(frozen=True)
class PreTokenizer:
    """What a name stands for.

    `ignore_merges`: a word that is a token itself is taken whole, even if no merges lead to it.
    `add_bos`: a BOS is put in front unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokeniser called `name`; raise ConfigurationError for one that is not known."""
    if name not in _PRE_TOKENIZERS:
        raise ConfigurationError(
            f"the GGUF file asks for the pre-tokeniser '{name}', which is not known here: "
            "give the model's Hugging Face tokenizer with --tokenizer DIR"
        )
    return _PRE_TOKENIZERS[name]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"

# Runs of white space in halving lengths.
_JAIS2_SPACE = "|".join([*(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|{_JAIS2_SPACE}"

# A word ends where a lower-case letter is followed by an upper-case one.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTION})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)

# The letters with case that DeepSeek's first tokenizer knows, a list of its own.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
# llama.cpp matches white space with \s alone, never as a part of a range.
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\S]+"
_CJK_AND_KANA = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_ASCII_PUNCTUATION = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"

_DEEPSEEK3 = (
    rf"[{_ASCII_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LLAMA3_CHAIN = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_GPT2_CHAIN = PreTokenizer((_GPT2,))
_DIGITS_CHAIN = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2_CHAIN = PreTokenizer((_QWEN2,))
_DEEPSEEK3_CHAIN = PreTokenizer((r"\p{N}{1,3}", rf"[{_CJK_AND_KANA}]+", _DEEPSEEK3))
_GPT4O_CHAIN = PreTokenizer((_GPT4O,))
_BLOOM_CHAIN = PreTokenizer((_BLOOM,))

_PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "qwen35": PreTokenizer((_QWEN35,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "minicpm5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACE}",
        ),
        ignore_merges=True,
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_CHAIN
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        _GPT2_CHAIN,
    ),
    "exaone4": _GPT2_CHAIN,
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _DIGITS_CHAIN,
    ),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
            *("bailingmoe", "bailingmoe2", "llada-moe"),  # written otherwise there, but it matches the same
        ),
        _QWEN2_CHAIN,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_CHAIN),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_CHAIN),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM_CHAIN),
}
