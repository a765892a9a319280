"""Tensor names of a checkpoint matched to those of the model family."""

from collections.abc import Callable, Iterable

from mpi_tp.errors import ConfigurationError

DATA_PARALLEL = "module."
BASE_MODEL = "model."
COMPILED = "_orig_mod."  # torch.compile, of the whole model or of each layer

# Buffers that older checkpoints hold although they are computed, not learned. Nothing else is ever left out.
NON_WEIGHTS = ("rotary_emb.inv_freq", "attn.masked_bias")


def canonical_names(names: Iterable[str], is_known: Callable[[str], bool]) -> dict[str, str]:
    """Map each source name to the family's name of the same tensor; `is_known` tells the family's names.

    A name that is known as it stands is kept. Else the prefixes `module.` and `model.` in front and `_orig_mod.`
    wherever it stands are taken away, and `model.` is put back where the family has it. Non-weights (`NON_WEIGHTS`)
    are left out. Raises ConfigurationError for a name that matches nothing or more than one thing, and for two of
    one tensor.
    """
    canonical: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        known = _matches(name, is_known)
        if not known and _is_non_weight(name):
            continue
        if len(known) != 1:
            reason = f"could be {' or '.join(known)}" if known else "is not one of this model family"
            raise ConfigurationError(f"tensor {name} {reason}; does the config belong to this checkpoint?")
        target = known[0]
        if target in sources:
            raise ConfigurationError(f"tensors {sources[target]} and {name} are both {target}; remove one of them")
        sources[target] = name
        canonical[name] = target
    return canonical


def _matches(name: str, is_known: Callable[[str], bool]) -> list[str]:
    """Return the family's names that `name` can stand for."""
    if is_known(name):
        return [name]
    core = _without_prefixes(name)
    return [candidate for candidate in (core, BASE_MODEL + core) if is_known(candidate)]


def _without_prefixes(name: str) -> str:
    """Take all prefixes away, in any order and number."""
    name = name.replace(COMPILED, "")
    while name.startswith((DATA_PARALLEL, BASE_MODEL)):
        name = name.partition(".")[2]
    return name


def _is_non_weight(name: str) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in NON_WEIGHTS)
