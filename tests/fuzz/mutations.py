"""Seeded changes to bytes and to JSON values."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

INTEGERS = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 10**15, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = ("", ".", "..", "../x", "/etc/passwd", "a\nb", "\x1b[2J", "\x00", "\ud800", "x" * 5000, "é", "float32", "llama")
VALUES: Sequence[Any] = (
    *(None, True, False, -1, 0.5, 1e300, float("inf"), float("nan"), 10**400, [], {}, [[]], [{}], [None], {"a": {}}),
    *INTEGERS,
    *TEXTS,
)


def change_bytes(rng: random.Random, data: bytes, start: int = 0, stop: int | None = None) -> bytes:
    """Change one to four places between `start` and `stop`."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        last = min(len(changed), len(changed) if stop is None else stop)
        position = rng.randrange(start, max(last, start + 1))
        changed = rng.choice(_CHANGES)(rng, changed, position)
    return bytes(changed)


def _flip(rng: random.Random, data: bytearray, position: int) -> bytearray:
    data[position : position + 1] = bytes([(data[position] if position < len(data) else 0) ^ 1 << rng.randrange(8)])
    return data


def _overwrite(rng: random.Random, data: bytearray, position: int) -> bytearray:
    noise = rng.randbytes(rng.choice((1, 2, 8)))
    data[position : position + len(noise)] = noise
    return data


def _number(rng: random.Random, data: bytearray, position: int) -> bytearray:
    size = rng.choice((1, 2, 4, 8))
    data[position : position + size] = (rng.choice(INTEGERS) % 2 ** (8 * size)).to_bytes(size, "little")
    return data


def _cut(rng: random.Random, data: bytearray, position: int) -> bytearray:
    return data[:position]


def _delete(rng: random.Random, data: bytearray, position: int) -> bytearray:
    del data[position : position + rng.choice((1, 4, 8, 100))]
    return data


def _repeat(rng: random.Random, data: bytearray, position: int) -> bytearray:
    data[position:position] = data[position : position + rng.choice((1, 8, 64, 1000))]
    return data


def _extend(rng: random.Random, data: bytearray, position: int) -> bytearray:
    return data + rng.randbytes(rng.choice((1, 8, 5000)))


_CHANGES = (_flip, _flip, _flip, _overwrite, _number, _number, _cut, _delete, _repeat, _extend)


def change_json(rng: random.Random, value: Any) -> Any:
    """Return a copy with one to three values replaced, removed, repeated or renamed, anywhere in it."""
    changed = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        containers = list(_containers(changed))
        if not containers:
            return copy.deepcopy(rng.choice(VALUES))
        container = rng.choice(containers)
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if keys:
            _change_item(rng, container, rng.choice(keys))
    return changed


def _containers(value: Any) -> Any:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _change_item(rng: random.Random, container: Any, key: Any) -> None:
    action = rng.randrange(6)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[rng.choice(TEXTS)] = copy.deepcopy(container[key])
    elif action == 1:
        container.append(copy.deepcopy(container[key]))
    elif action == 2 and type(container[key]) is int:
        container[key] += rng.choice((-1, 1, 10**6, 10**15))
    elif action == 3:
        container[key] = _nested(rng.choice((3, 50, 100_000)))
    else:
        container[key] = copy.deepcopy(rng.choice(VALUES))


def _nested(depth: int) -> str:
    return f"@nested {depth}@"


def json_bytes(value: Any) -> bytes:
    """Return JSON, with what `change_json` marked as nested spelled out."""
    text = json.dumps(value)
    for depth in (3, 50, 100_000):
        text = text.replace(f'"@nested {depth}@"', "[" * depth + "]" * depth)
    return text.encode()
