"""Shape and arithmetic of a policy, as data."""

import dataclasses


# Not frozen, since flags override fields; hashable by value, since it is a
# static argument of compiled functions. It is not changed after parsing.
@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class ModelConfig:
  """A decoder-only transformer with mixture-of-experts layers.

  Attributes:
    vocab_size: V; 0 means the tokenizer's.
    width: D, of the residual stream.
    layers: L.
    heads: H, query heads.
    kv_heads: G, key/value heads; divides `heads`.
    head_dim: of each head, even (rotary pairs).
    experts: E, routed experts of each layer.
    experts_per_token: K, chosen by a softmax router, gates renormalised.
    expert_width: hidden units of an expert (SwiGLU).
    mtp_heads: multi-token-prediction modules after the trunk: 0 or 1.
    rope_theta: base of the rotary frequencies.
    norm_eps: of RMSNorm.
  """

  vocab_size: int = 0
  width: int = 128
  layers: int = 2
  heads: int = 2
  kv_heads: int = 1
  head_dim: int = 64
  experts: int = 4
  experts_per_token: int = 2
  expert_width: int = 48
  mtp_heads: int = 1
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    sizes = ("width", "layers", "heads", "kv_heads", "head_dim", "experts")
    for name in (*sizes, "expert_width"):
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name} is {getattr(self, name)}, not >= 1")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"model.kv_heads {self.kv_heads} does not divide heads {self.heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"model.head_dim {self.head_dim} is odd; rope is paired")
    if not 1 <= self.experts_per_token <= self.experts:
      raise ValueError(
        f"model.experts_per_token {self.experts_per_token} is not in"
        f" 1..{self.experts} (model.experts)"
      )
    if self.mtp_heads not in (0, 1):
      raise ValueError(f"model.mtp_heads is {self.mtp_heads}, not 0 or 1")
