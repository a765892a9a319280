"""Rotary position embedding (Su et al., 2021), with Llama 3's and linear frequency scaling.

positions [T]    cos, sin [T, D], the two halves equal    D head dimension
"""

import math

import torch

from mpi_tp.config import ModelConfig, RopeScaling


class RotaryEmbedding:
    """The cosines and sines of every position, computed once, in float32."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        if config.rope_scaling is not None:
            frequencies = scale_frequencies(frequencies, config.rope_scaling)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each float32 [T, D]."""
        return self._cos[positions], self._sin[positions]


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return rotary frequencies [D/2] stretched for long contexts.

    `linear` divides all by the factor; `llama3` only those whose wavelength is long against the original context, with
    a smooth passage between (Llama 3.1's reference implementation).
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)
