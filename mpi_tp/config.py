"""The model's hyperparameters, under the names of Hugging Face's `config.json`."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mpi_tp.errors import ConfigurationError

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "none")
"""What can stand between the layers of an MLP."""

MAX_INTEGER = 2**31 - 1
"""No size or count of a model is larger; one that is would only be found out by what it makes us allocate."""

MAX_NUMBER = 1e30

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts: `linear`, or `llama3` (by wavelength)."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    `attention_bias` is that of q, k and v; `output_bias` that of o. `qk_norm` puts an RMSNorm on each head of q and k.
    `sliding_window` w lets a token see itself and the w - 1 tokens before it; None is unlimited.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def max_ranks(self) -> int:
        """The largest useful number of ranks: one query head each."""
        return self.num_attention_heads


@dataclass(frozen=True)
class MLPConfig:
    """A stack of linear layers with one activation between them (none after the last).

    Layer i stands under `layer_names[i]` in the checkpoint and maps `layer_sizes[i]` features to `layer_sizes[i + 1]`;
    `layer_biases[i]` says whether it has a bias.
    """

    layer_names: tuple[str, ...]
    layer_sizes: tuple[int, ...]
    layer_biases: tuple[bool, ...]
    activation: str
    model_type: str = "mlp"

    @property
    def max_ranks(self) -> int:
        """The largest useful number of ranks: one output feature of the narrowest layer each."""
        return min(self.layer_sizes[1:])


class Fields:
    """A `config.json` read field by field; a missing field or one of the wrong type is a ConfigurationError."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_INTEGER) -> int:
        """Return a positive whole number."""
        return _integer(name, self._value(name, default), maximum)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise _wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return _flag(name, self._value(name, default))

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of these texts."""
        value = self._value(name, default)
        if value not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        return self._items(name, _text)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of positive whole numbers."""
        return self._items(name, _integer)

    def flags(self, name: str) -> tuple[bool, ...]:
        """Return a list of true and false."""
        return self._items(name, _flag)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object's raw values, none if it is missing or null."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return value or {}

    def optional(self, name: str) -> Any:
        """Return the raw value, None if it is missing or null."""
        return self._values.get(name)

    def _items(self, name: str, read: Callable[[str, Any], _Item]) -> tuple[_Item, ...]:
        values = self._value(name, None)
        if not isinstance(values, list | tuple):
            raise _wrong(name, values, "a list")
        return tuple(read(f"{name}[{index}]", value) for index, value in enumerate(values))

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigurationError(f"config: {name} is missing: add it to config.json or pass --model-config FILE")
        return value


def _integer(name: str, value: Any, maximum: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "a whole number above 0")
    if value > maximum:
        raise _wrong(name, value, f"at most {maximum}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"config: {name} is {reprlib.repr(value)}: it must be {wanted}")
