"""A small Llama in torch; `train` fits it, `check` measures it.

The parameters are named as in Hugging Face's Llama, without the leading `model.`.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training import tokenizer

__all__ = ["Llama", "Shape"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults give just under a million parameters."""

    vocabulary: int = tokenizer.VOCABULARY
    layers: int = 4
    hidden: int = 128
    heads: int = 2
    """Attention heads, and as many for keys and values, so that two ranks can share the model."""
    feed_forward: int = 384
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    context: int = 16_384
    """What the files announce. Training sees at most 512 tokens; beyond them no sense is promised."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


class Llama(nn.Module):
    """Tokens in, logits out: rotary positions, RMS norms, gated feed-forward, tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.apply(_initialise)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Logits (n, vocabulary) after each of the n `ids` that `wanted` marks; both are (batch, length)."""
        cosine, sine = _rotations(ids.shape[1], self.shape)
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        logits: Tensor = functional.linear(self.norm(hidden[wanted]), self.embed_tokens.weight)
        return logits


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = _FeedForward(shape)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        # Batches are padded on the right, where a causal mask is all that is needed.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class _FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


def _rotations(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
