"""A GPT over bytes, small enough to read and of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, both pre-normalised and residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps activations of shape (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        q, k, v = self.query_key_value(self.attention_norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, context, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, context, width)
        x = x + F.dropout(self.attention_out(attended), self.dropout, self.training)
        hidden = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, vocabulary: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps int64 tokens of shape (batch, context) to (batch, context, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return F.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """Activations into one logit per byte value."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context, width) to logits of shape (batch, context, vocabulary)."""
        logits: torch.Tensor = self.out(self.norm(x))
        return logits


class GPT(nn.Sequential):
    """Embedding, blocks, head: a sequence, so that a pipeline can cut it anywhere."""

    def __init__(self, vocabulary: int, layers: int, width: int, context: int, heads: int = 4, dropout: float = 0.1):
        super().__init__(
            Embedding(vocabulary, width, context, dropout),
            *(Block(width, heads, dropout) for _ in range(layers)),
            Head(vocabulary, width),
        )


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte."""
    loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss
