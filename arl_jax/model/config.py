"""Shape and arithmetic of a policy, as data."""

import dataclasses
from typing import NamedTuple


# Not frozen, since flags override fields; hashable by value, since it is a
# static argument of compiled functions. It is not changed after parsing.
@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class RopeConfig:
  """Rotary position embedding.

  Attributes:
    theta: base of the frequencies.
    kind: "plain"; "llama3" (long wavelengths divided by `factor`) or "yarn"
      (arXiv 2309.00071), which both stretch a trained context.
    factor: by which the context is stretched.
    original_length: tokens of the context before stretching.
    low: llama3's low_freq_factor, YaRN's beta_slow.
    high: llama3's high_freq_factor, YaRN's beta_fast.
    truncate: whether YaRN's correction range is rounded to whole dimensions.
    amplitude: multiplies cosine and sine (YaRN's attention factor).
    interleaved: neighbouring dimensions are pairs, not the two halves.
  """

  theta: float = 10_000.0
  kind: str = "plain"
  factor: float = 1.0
  original_length: int = 0
  low: float = 1.0
  high: float = 1.0
  truncate: bool = True
  amplitude: float = 1.0
  interleaved: bool = False


class Layer(NamedTuple):
  """What distinguishes a layer: `window` 0 sees everything before it."""

  moe: bool
  window: int


class Stack(NamedTuple):
  """Layers that are run together.

  Attributes:
    first: depth of the first one.
    layers: one period of the pattern.
    repeats: how often the period is scanned over; 0 = not scanned, so its
      parameters have no leading axis.
  """

  first: int
  layers: tuple[Layer, ...]
  repeats: int

  def names(self) -> tuple[str, ...]:
    """Keys in params["layers"] of each layer of the period."""
    return tuple(f"{self.first + i:03d}" for i in range(len(self.layers)))


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class ModelConfig:
  """A decoder-only transformer; the families differ in these fields only.

  Attributes:
    vocab_size: V; 0 means the tokenizer's.
    width: D, of the residual stream.
    layers: L.
    heads: H, query heads.
    kv_heads: G, key/value heads; divides `heads`.
    head_dim: of queries and keys.
    value_dim: of values; 0 means `head_dim`.
    rope_dim: last dimensions of a head that are rotated, in latent attention;
      0 elsewhere, where all are.
    latent_rank: of the latent that keys and values are expanded from
      (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434); 0 means
      grouped-query attention.
    query_rank: of the queries' latent; 0 means a full projection.
    qk_norm: RMSNorm of each query and key head.
    attention_bias: on the four projections.
    sinks: a learned logit a head that takes part in the softmax.
    windows: keys that a layer sees, itself included; the pattern repeats over
      the layers and 0 means all.
    score_scale: multiplies 1/sqrt(head_dim).
    dense_layers: leading layers with a dense feed-forward network.
    dense_width: hidden units of those.
    experts: E, routed experts of each other layer; 0 makes every layer dense.
    experts_per_token: K.
    expert_width: hidden units of an expert (SwiGLU).
    shared_experts: experts that see every token, as one of their joint width.
    expert_bias: on the projections of experts.
    router: "softmax", or "sigmoid" with a bias that takes part in the choice
      only (DeepSeek-V3, arXiv 2412.19437).
    router_bias: on the router's logits.
    normalise_gates: gates of a token sum to 1 before `gate_scale`.
    gate_scale: multiplies the gates.
    expert_groups: groups of experts of the sigmoid router.
    groups_kept: groups that a token may choose from.
    swiglu_limit: clamps gate and linear part, gate·σ(1.702·gate)·(linear + 1);
      0 is plain SwiGLU.
    dispatch_tokens: tokens of a device that are computed, and travel to experts
      on others, at a time; bounds the buffers to 1.25 · K rows for each.
    mtp_heads: multi-token-prediction modules after the trunk: 0 or 1.
    rope: rotary embedding.
    norm_eps: of RMSNorm.
    tied: the embedding table is also the head.
    scaled_embedding: embeddings are multiplied by sqrt(width).
    context_length: tokens the model was made for; 0 = unknown.
    scan_layers: layers of one kind are stacked and scanned over: compile time
      and code no longer grow with depth.
    remat: what the backward pass recomputes: "none", "block" (a layer from its
      input) or "dots" (all but matrix products).
  """

  vocab_size: int = 0
  width: int = 128
  layers: int = 2
  heads: int = 2
  kv_heads: int = 1
  head_dim: int = 64
  value_dim: int = 0
  rope_dim: int = 0
  latent_rank: int = 0
  query_rank: int = 0
  qk_norm: bool = True
  attention_bias: bool = False
  sinks: bool = False
  windows: tuple[int, ...] = (0,)
  score_scale: float = 1.0
  dense_layers: int = 0
  dense_width: int = 0
  experts: int = 4
  experts_per_token: int = 2
  expert_width: int = 48
  shared_experts: int = 0
  expert_bias: bool = False
  router: str = "softmax"
  router_bias: bool = False
  normalise_gates: bool = True
  gate_scale: float = 1.0
  expert_groups: int = 1
  groups_kept: int = 1
  swiglu_limit: float = 0.0
  dispatch_tokens: int = 2048
  mtp_heads: int = 1
  rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
  norm_eps: float = 1e-6
  tied: bool = True
  scaled_embedding: bool = False
  context_length: int = 0
  scan_layers: bool = False
  remat: str = "none"

  @property
  def values(self) -> int:
    """Dimensions of a value head."""
    return self.value_dim or self.head_dim

  @property
  def moe_layers(self) -> int:
    """Layers that have experts; they come after the dense ones."""
    return self.layers - self.dense_layers if self.experts else 0

  def layer(self, depth: int) -> Layer:
    moe = bool(self.experts) and depth >= self.dense_layers
    return Layer(moe, self.windows[depth % len(self.windows)])

  def stacks(self) -> tuple[Stack, ...]:
    """Layers in order of depth, grouped as they are run."""
    if not self.scan_layers:
      return tuple(Stack(i, (self.layer(i),), 0) for i in range(self.layers))
    stacks = []
    lead = self.dense_layers if self.experts else 0
    for first, end in ((0, lead), (lead, self.layers)):
      while first < end:
        # What is left of a pattern is a stack of its own.
        period = min(len(self.windows), end - first)
        repeats = (end - first) // period
        layers = tuple(self.layer(first + i) for i in range(period))
        stacks.append(Stack(first, layers, repeats))
        first += period * repeats
    return tuple(stacks)

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    positive = ["width", "layers", "heads", "kv_heads", "head_dim"]
    if self.experts:
      positive += ["experts", "expert_width", "dispatch_tokens"]
    if self.dense_layers or not self.experts:
      positive.append("dense_width")
    for name in positive:
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name} is {getattr(self, name)}, not >= 1")
    for name in _NOT_NEGATIVE:
      if not getattr(self, name) >= 0:
        raise ValueError(f"model.{name} is {getattr(self, name)}, not >= 0")
    for name, known in _CHOICES.items():
      if getattr(self, name) not in known:
        raise ValueError(
          f"model.{name} is {getattr(self, name)!r}, not one of {known}"
        )
    if self.rope.kind not in ("plain", "llama3", "yarn"):
      raise ValueError(
        f"model.rope.kind is {self.rope.kind!r}, not plain, llama3 or yarn"
      )
    if self.rope.kind != "plain" and self.rope.original_length < 1:
      raise ValueError(
        f"model.rope.original_length is {self.rope.original_length};"
        f" {self.rope.kind} needs the length before stretching"
      )
    if self.heads % self.kv_heads:
      raise ValueError(
        f"model.kv_heads {self.kv_heads} does not divide heads {self.heads}"
      )
    rotated = self.rope_dim or self.head_dim
    if rotated % 2 or rotated > self.head_dim:
      name = "rope_dim" if self.rope_dim else "head_dim"
      raise ValueError(
        f"model.{name} {rotated} is not an even number of dimensions of a head"
        f" of {self.head_dim}; rope rotates pairs"
      )
    if bool(self.rope_dim) != bool(self.latent_rank):
      raise ValueError(
        f"model.rope_dim is {self.rope_dim} and model.latent_rank"
        f" {self.latent_rank}: latent attention, and no other, rotates a part"
        " of a head"
      )
    if self.latent_rank:
      self._validate_latent()
    if not self.windows or min(self.windows) < 0:
      raise ValueError(f"model.windows is {self.windows}; 0 means everything")
    if self.mtp_heads not in (0, 1):
      raise ValueError(f"model.mtp_heads is {self.mtp_heads}, not 0 or 1")
    self._validate_experts()

  def _validate_latent(self) -> None:
    for name in ("qk_norm", "attention_bias", "sinks"):
      if getattr(self, name):
        raise ValueError(f"model.{name} is not part of latent attention")
    if self.kv_heads != self.heads:
      raise ValueError(
        f"model.kv_heads {self.kv_heads} is not heads {self.heads}: in latent"
        " attention each head has keys of its own"
      )

  def _validate_experts(self) -> None:
    if not 0 <= self.dense_layers <= self.layers:
      raise ValueError(
        f"model.dense_layers {self.dense_layers} is not in 0..{self.layers}"
        " (model.layers)"
      )
    if not self.experts:
      return
    if not 1 <= self.experts_per_token <= self.experts:
      raise ValueError(
        f"model.experts_per_token {self.experts_per_token} is not in"
        f" 1..{self.experts} (model.experts)"
      )
    groups, kept = self.expert_groups, self.groups_kept
    if groups < 1 or self.experts % groups or not 1 <= kept <= groups:
      raise ValueError(
        f"model.groups_kept {kept} of model.expert_groups {groups}: the groups"
        f" must divide the {self.experts} experts"
      )
    if kept * (self.experts // groups) < self.experts_per_token:
      raise ValueError(
        f"model.groups_kept {kept} leaves fewer experts than"
        f" experts_per_token {self.experts_per_token}"
      )
    if groups > 1 and self.experts // groups < 2:
      raise ValueError(
        f"model.expert_groups {groups}: a group is ranked by its two best"
        f" experts and has {self.experts // groups}"
      )
    if groups > 1 and self.router != "sigmoid":
      raise ValueError("model.expert_groups needs model.router 'sigmoid'")


_NOT_NEGATIVE = (
  *("value_dim", "rope_dim", "latent_rank", "query_rank", "score_scale"),
  *("dense_layers", "dense_width", "experts", "shared_experts"),
  *("swiglu_limit", "gate_scale", "context_length", "norm_eps"),
)

_CHOICES = {
  "router": ("softmax", "sigmoid"),
  "remat": ("none", "block", "dots"),
}
