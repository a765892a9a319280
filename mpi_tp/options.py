"""Command lines that a file can fill in: `--config FILE.yaml`, and argument types that several programs share.

The file holds sections and, beside them, keys for the flags that belong to none:

    shards: llama-3-8b/
    sampling:
      temperature: 0.7
      stop: ["###", "END"]
    communication: {backend: nccl}

A value is read as its text, just as if it stood on the command line; `-` and `_` in a key are the same; true and false
(yes, no, on, off) are for flags without a value; an empty value or null leaves the flag at its default.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from mpi_tp.errors import FileError, UsageError

Sections = Mapping[str, Mapping[str, str]]
_Actions = Mapping[str, argparse.Action]

_TYPE_NAMES: Mapping[Any, str] = {int: "a whole number", float: "a number"}
_NULL = "tag:yaml.org,2002:null"
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?) *(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], sections: Sections) -> argparse.Namespace:
    """Parse `argv`, with what it leaves out from the file that its `--config` names, and the defaults last.

    `sections` maps each section's keys to the destinations of the parser's flags; the flags that it does not mention
    are keys of the file's top level. The parser has a `--config` flag and no subcommands, and serves once.

    Raises UsageError for a file that is not YAML or holds an unknown key or a wrong value, FileError for one that
    cannot be read. As argparse does, it exits with 2 for a wrong command line.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    # --help and --version have no value, which argparse marks by a suppressed default.
    flags = [action for action in parser._actions if action.option_strings and action.default != argparse.SUPPRESS]
    actions = {action.dest: action for action in flags}
    settings = {} if path is None else _settings(path, actions, sections)
    for dest in settings:
        actions[dest].required = False
    # A flag that stands on the command line never leaves None behind, whatever its default.
    given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(actions)))
    for dest in actions:
        if getattr(given, dest) is None:
            setattr(given, dest, settings.get(dest, parser.get_default(dest)))
    return given


def _settings(path: str, actions: _Actions, sections: Sections) -> dict[str, Any]:
    """Return the values that the file sets, by destination and already converted."""
    keys = _keys(actions, sections)
    settings = {}
    for name, value in _flatten(path, _load(path), sections):
        if name not in keys:
            raise UsageError(f"{path}: unknown key {name}{_suggestion(name, [*sections, *keys])}")
        if value is not None:
            settings[keys[name]] = _convert(f"{path}: {name}", actions[keys[name]], value)
    return settings


def _keys(actions: _Actions, sections: Sections) -> dict[str, str]:
    """Map every key, as `section.key` or `key`, to the destination that it sets."""
    keys = {f"{section}.{key}": dest for section, names in sections.items() for key, dest in names.items()}
    for dest in actions.keys() - set(keys.values()) - {"config"}:
        keys[dest] = dest
    return keys


def _flatten(path: str, content: Mapping[str, Any], sections: Sections) -> list[tuple[str, Any]]:
    values = []
    for key, value in content.items():
        if key not in sections:
            values.append((key, value))
        elif isinstance(value, dict):
            values += [(f"{key}.{inner}", inner_value) for inner, inner_value in value.items()]
        elif value is not None:
            raise UsageError(f"{path}: {key} is {value!r}: it is a section and must hold keys")
    return values


def _suggestion(name: str, keys: Iterable[str]) -> str:
    """Say which key or section was meant, by its last word: it may stand in the wrong section."""
    by_word = {key.rpartition(".")[2]: key for key in keys}
    alike = difflib.get_close_matches(name.rpartition(".")[2], by_word, n=1, cutoff=0.5)
    return f": did you mean {by_word[alike[0]]}?" if alike else f": the keys are {', '.join(sorted(keys))}"


def _convert(where: str, action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:
        if not isinstance(value, str) or value.lower() not in _SWITCH:
            raise UsageError(f"{where} is {value!r}: it must be true or false")
        return _SWITCH[value.lower()]
    if isinstance(action, argparse._AppendAction):
        return [_convert_one(where, action, item) for item in (value if isinstance(value, list) else [value])]
    return _convert_one(where, action, value)


def _convert_one(where: str, action: argparse.Action, value: Any) -> Any:
    if not isinstance(value, str):
        hint = (
            f": write {','.join(value)!r}" if isinstance(value, list) and all(isinstance(i, str) for i in value) else ""
        )
        raise UsageError(f"{where} is {value!r}: it must be one value{hint}")
    convert: Any = action.type or str
    try:
        converted = convert(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{where}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{where} is {value!r}: it must be {_TYPE_NAMES.get(convert, convert.__name__)}") from error
    if action.choices is not None and converted not in action.choices:
        raise UsageError(f"{where} is {value!r}: it must be one of {', '.join(map(str, action.choices))}")
    return converted


class _TextLoader(yaml.BaseLoader):
    """Reads every value as text, but null, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value.replace("-", "_") if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key in mapping:
                problem = "a key must be one word" if key is None else f"the key {key} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_TextLoader.add_implicit_resolver(_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_constructor(_NULL, lambda loader, node: None)


def _load(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = yaml.load(file, _TextLoader)
    except OSError as error:
        raise FileError(f"cannot read the configuration file {path}: {os.strerror(error.errno or 0)}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold keys and values, but it is {str(content)[:40]!r}")
    return content


def size(text: str) -> int:
    """Read a number of bytes, for argparse: 2e9, 512M, 4GiB, 80GB.

    K, M, G, T alone and with iB count in 1024s, as in Slurm; with B, in 1000s.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes or a unit, like 2e9, 512M, 4GiB or 80GB")
    number, unit, suffix = match.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    count = float(number) * base ** (" kmgt".index(unit.lower()) if unit else 0)
    if not 1 <= count < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: it must be at least one byte and below 2^63")
    return round(count)


def positive_int(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """Read a finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
