"""A Llama-like policy in PyTorch, for comparison (see `learner_cpu`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from arl_jax.model.config import ModelConfig


class _Block(nn.Module):
  """One layer: grouped-query attention and SwiGLU."""

  def __init__(self, c: ModelConfig):
    super().__init__()
    d, h, g, k = c.width, c.heads, c.kv_heads, c.head_dim
    self.shape = h, g, k
    self.norms = nn.ModuleList(nn.RMSNorm(d, eps=c.norm_eps) for _ in range(2))
    self.qkv = nn.Linear(d, (h + 2 * g) * k, bias=False)
    self.out = nn.Linear(h * k, d, bias=False)
    self.gate_up = nn.Linear(d, 2 * c.dense_width, bias=False)
    self.down = nn.Linear(c.dense_width, d, bias=False)

  def forward(self, x, cos, sin):
    h, g, k = self.shape
    b, t, _ = x.shape
    heads = self.qkv(self.norms[0](x)).view(b, t, h + 2 * g, k).transpose(1, 2)
    q, key, v = heads.split((h, g, g), 1)
    q, key = _rotate(q, cos, sin), _rotate(key, cos, sin)
    y = F.scaled_dot_product_attention(
      q, key, v, is_causal=True, enable_gqa=True
    )
    x = x + self.out(y.transpose(1, 2).reshape(b, t, h * k))
    gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
    return x + self.down(F.silu(gate) * up)


def _rotate(x, cos, sin):
  a, b = x.chunk(2, -1)
  return x * cos + torch.cat((-b, a), -1) * sin


class Policy(nn.Module):
  """Tied embeddings; as many parameters as the configuration says."""

  def __init__(self, c: ModelConfig):
    super().__init__()
    self.embed = nn.Embedding(c.vocab_size, c.width)
    nn.init.normal_(self.embed.weight, std=0.02)
    self.blocks = nn.ModuleList(_Block(c) for _ in range(c.layers))
    self.norm = nn.RMSNorm(c.width, eps=c.norm_eps)
    steps = torch.arange(0, c.head_dim, 2) / c.head_dim
    self.frequencies = c.rope.theta**-steps

  def forward(self, ids):
    angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
    angles = torch.cat((angles, angles), -1)
    x = self.embed(ids)
    for block in self.blocks:
      x = block(x, angles.cos(), angles.sin())
    return F.linear(self.norm(x), self.embed.weight)


def cispo(policy, ids, advantage):
  """The mean over tokens of −sg(min(ρ, 5)) A log π."""
  logits = policy(ids)[:, :-1]
  logp = -F.cross_entropy(
    logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
  ).view(ids.shape[0], -1)
  ratio = (logp.detach() + 10.8).exp().clamp(max=5)
  return -(ratio * advantage * logp).mean()
