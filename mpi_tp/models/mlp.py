"""A plain stack of linear layers: config, tensor table, and how to recognise one by its state dict."""

import re
from collections.abc import Mapping
from typing import Any

from mpi_tp.config import ACTIVATIONS, Fields, MLPConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.models.transformer_table import first_of_pair, second_of_pair
from mpi_tp.partition.plan import TensorRow
from mpi_tp.partition.ranges import Blocks

_LAYER = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*(?P<index>[0-9]{1,9}))\.(?:weight|bias)")


def parse_mlp(config: Mapping[str, Any]) -> MLPConfig:
    """Return the MLPConfig of a `config` as `mlp_config` makes it; ConfigurationError for any other."""
    fields = Fields(config)
    names, sizes, biases = fields.texts("layer_names"), fields.integers("layer_sizes"), fields.flags("layer_biases")
    if not names or len(sizes) != len(names) + 1 or len(biases) != len(names):
        raise ConfigurationError(
            f"config: {len(names)} layer_names go with {len(sizes)} layer_sizes and {len(biases)} layer_biases: "
            "it must be one size more than names, and as many biases"
        )
    return MLPConfig(names, sizes, biases, fields.choice("activation", ACTIVATIONS))


def is_mlp(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Say whether the tensors, by name, are those of numbered linear layers and of nothing else."""
    matches = [_LAYER.fullmatch(name) for name in shapes]
    prefixes = {match["name"].rpartition(".")[0] for match in matches if match}
    return bool(matches) and all(matches) and len(prefixes) == 1


def mlp_config(shapes: Mapping[str, tuple[int, ...]], activation: str) -> dict[str, Any]:
    """Return the config of the stack whose tensors have these `shapes`; layers run in order of their number.

    Raises ConfigurationError if a layer's input is not the output of the one before it.
    """
    names = sorted({name.rpartition(".")[0] for name in shapes}, key=lambda name: int(name.rpartition(".")[2]))
    sizes: list[int] = []
    for name in names:
        weight = shapes.get(name + ".weight", ())
        if len(weight) != 2:
            raise ConfigurationError(f"{name}.weight has shape {list(weight)}: a linear layer's has two axes")
        if sizes and sizes[-1] != weight[1]:
            raise ConfigurationError(f"{name}.weight takes {weight[1]} features but the layer before gives {sizes[-1]}")
        sizes += [weight[0]] if sizes else [weight[1], weight[0]]
    return {
        "model_type": "mlp",
        "layer_names": names,
        "layer_sizes": sizes,
        "layer_biases": [name + ".bias" in shapes for name in names],
        "activation": activation,
    }


def mlp_table(config: MLPConfig) -> list[TensorRow]:
    """Return one row a tensor; `paired` couples layers 0 and 1, 2 and 3, …; a last odd one is gathered."""
    rows: list[TensorRow] = []
    for index, name in enumerate(config.layer_names):
        inputs, outputs = config.layer_sizes[index : index + 2]
        bias = config.layer_biases[index]
        if index % 2:
            rows += second_of_pair(name, outputs, inputs, Blocks(inputs), bias)
        else:
            rows += first_of_pair(name, outputs, inputs, Blocks(outputs), bias)
    return rows
