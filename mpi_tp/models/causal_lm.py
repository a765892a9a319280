"""A decoder-only transformer with pre-normalisation: Llama, Mistral, Qwen2 and Qwen3 differ in its config alone.

It reads like a single-device model: what is split, and what the ranks exchange, is the layers' own business.

  T = packed tokens of all sequences in the step    R = rows whose next token is wanted    K = model dimension
"""

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.kernels.base import AttentionInputs, Cache
from mpi_tp.layers.attention import Attention
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mpi_tp.layers.mlp import GatedMLP
from mpi_tp.layers.norm import RMSNorm
from mpi_tp.layers.rotary import RotaryEmbedding


class DecoderLayer:
    """Attention and MLP, each on the normalised stream and added back to it."""

    def __init__(self, context: LayerContext, name: str, config: ModelConfig) -> None:
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", config.rms_norm_eps)
        self.self_attn = Attention(context, f"{name}.self_attn", config)
        self.post_attention_layernorm = RMSNorm(context, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.mlp = GatedMLP(context, f"{name}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        inputs: AttentionInputs,
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream [T, K] and what is to be added to it; `delta` is what the layer before left to add."""
        x, normed = self.input_layernorm.add(x, delta)
        x, normed = self.post_attention_layernorm.add(x, self.self_attn(normed, rotation, inputs, cache))
        return x, self.mlp(normed)


class CausalLM:
    """Token ids to hidden states to logits."""

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        self.embed_tokens = VocabParallelEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(config, context.device)
        self.layers = [DecoderLayer(context, f"model.layers.{i}", config) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(context, "model.norm", config.rms_norm_eps)
        self.lm_head = ParallelLMHead(context, self.embed_tokens, "lm_head")

    def __call__(
        self, ids: torch.Tensor, inputs: AttentionInputs, caches: list[Cache], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the step's tokens, ids [T], against the cache of each layer; return hidden states [R, K] of `rows` [R].

        `rows` None is all of them.
        """
        rotation = self.rotary(inputs.positions)
        x: torch.Tensor = self.embed_tokens(ids)
        delta: torch.Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, delta = layer(x, delta, rotation, inputs, cache)
        if rows is not None:
            x, delta = x[rows], None if delta is None else delta[rows]
        return self.norm.add(x, delta)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits [R, vocabulary] of hidden states [R, K], the same on every rank."""
        return self.lm_head(hidden)

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest next token [R] int64 of hidden states [R, K]; -1 where the logits are not finite."""
        return self.lm_head.greedy(hidden)
