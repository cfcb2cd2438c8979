"""What a training run carries from step to step."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from arl_jax import sharding
from arl_jax.learner.packing import Leaf
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig


class TrainState(struct.PyTreeNode):
  """A pytree; `train_step` takes and returns it, donated.

  Attributes:
    params: of the policy.
    opt_state: of the optimizer.
    step: [] int32, updates tried in the current phase.
    version: [] int32, policy version: publications so far.
    skipped: [] int32, updates refused because a gradient wasn't finite.
    rng: [2] uint32, data of the key of the learner's own random choices (the
      order of rows); a new one with each update tried.
  """

  params: Leaf
  opt_state: Leaf
  step: Leaf
  version: Leaf
  skipped: Leaf
  rng: Leaf


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """Optimizer with a linear warm-up and a linear decay.

  Attributes:
    name: "adamw", or "muon": orthogonalised momentum for the matrices of the
      trunk (Muon, https://kellerjordan.github.io/posts/muon), AdamW for
      embeddings, heads, routers, vectors and whatever is stacked (experts,
      scanned layers).
    learning_rate: of AdamW, at the top.
    muon_learning_rate: of Muon, at the top.
    warmup_steps: updates until the top is reached.
    decay_steps: updates until `final_share` of it is reached, warm-up
      included; 0 keeps it constant.
    final_share: of the learning rate that remains.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    weight_decay: decoupled.
    moment_dtype: what the optimizer's moments are kept in, "float32" or
      "bfloat16"; updates are computed in float32.
    frozen: regular expression; parameters whose path ("layers/000/moe/router")
      it is found in are not trained and have no moments. Selection biases of
      routers never are, as they have no gradient; those that it is found in
      stay as they are whatever `StepConfig.bias_rate` is.
  """

  name: str = "adamw"
  learning_rate: float = 3e-3
  muon_learning_rate: float = 0.02
  warmup_steps: int = 20
  decay_steps: int = 0
  final_share: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  moment_dtype: str = "float32"
  frozen: str = ""

  def validate(self, where: str) -> None:
    """Raises ValueError naming the field below `where` that can't be."""
    if self.name not in ("adamw", "muon"):
      raise ValueError(f"{where}.name is {self.name!r}, not 'adamw' or 'muon'")
    if self.moment_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"{where}.moment_dtype is {self.moment_dtype!r}, not 'float32' or"
        " 'bfloat16'"
      )
    try:
      re.compile(self.frozen)
    except re.error as error:
      raise ValueError(
        f"{where}.frozen {self.frozen!r} is no regular expression: {error}"
      ) from error
    for name in ("learning_rate", "muon_learning_rate"):
      if not 0 < getattr(self, name) < float("inf"):
        raise ValueError(f"{where}.{name} is {getattr(self, name)}, not > 0")
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f"{where}.{name} is {getattr(self, name)}, not [0, 1)")
    for name in ("weight_decay", "final_share", "warmup_steps", "decay_steps"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise ValueError(f"{where}.{name} is {getattr(self, name)}, not >= 0")


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """A plain optax transform; clipping is the train step's, which reports it."""
  tx = _float32_optimizer(config)
  return tx if config.moment_dtype == "float32" else _kept_as_bfloat16(tx)


def _kept_as_bfloat16(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """The same, with a state of half the size between updates."""

  def cast(state: Any, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(new) if x.dtype == old else x, state)

  def init(params: Any) -> Any:
    return cast(tx.init(params), jnp.float32, jnp.bfloat16)

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    wide = cast(state, jnp.bfloat16, jnp.float32)
    updates, wide = tx.update(updates, wide, params)
    return updates, cast(wide, jnp.float32, jnp.bfloat16)

  return optax.GradientTransformation(init, update)


def _float32_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  adamw = optax.adamw(
    _schedule(config, config.learning_rate),
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
  )
  if config.name == "adamw":
    return adamw
  muon = optax.contrib.muon(
    _schedule(config, config.muon_learning_rate),
    weight_decay=config.weight_decay,
  )
  return optax.partition({"muon": muon, "adamw": adamw}, _muon_labels)


def _muon_labels(params: Any) -> Any:
  """Which of the two optimizers each parameter belongs to."""

  def label(path: Any, x: Any) -> str:
    alone = x.ndim == 2 and path[-1].key in _MATRICES
    return "muon" if alone else "adamw"

  return jax.tree_util.tree_map_with_path(label, params)


# Matrices of the trunk and of the MTP module.
_MATRICES = frozenset({
  *("q", "k", "v", "out", "q_latent", "latent", "expand"),
  *("gate", "up", "down", "project"),
})  # fmt: skip


def _schedule(config: OptimizerConfig, peak: float) -> optax.Schedule:
  warmup = max(config.warmup_steps, 1)
  up = optax.linear_schedule(peak / warmup, peak, warmup)
  end = peak * config.final_share if config.decay_steps else peak
  down = optax.linear_schedule(peak, end, max(config.decay_steps - warmup, 1))
  return optax.join_schedules([up, down], [warmup])


def is_frozen(name: str, frozen: str) -> bool:
  """Whether `OptimizerConfig.frozen` is found in the path of a parameter."""
  return bool(frozen and re.search(frozen, name))


def split(params: Any, frozen: str = "") -> tuple[Any, Any]:
  """Parameters that are trained and those that aren't.

  Returns:
    Two trees as `params`, each with None in the other's places.
  """

  def trained(path: Any) -> bool:
    name = "/".join(str(key.key) for key in path)
    return path[-1].key != "choice_bias" and not is_frozen(name, frozen)

  def pick(wanted: bool) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if trained(path) == wanted else None, params
    )

  return pick(True), pick(False)


def merge(trained: Any, frozen: Any) -> Any:
  """Inverse of `split`."""
  return jax.tree.map(
    lambda a, b: b if a is None else a,
    trained,
    frozen,
    is_leaf=lambda x: x is None,
  )


def check_params(model: ModelConfig, params: Any, name: str) -> None:
  """Raises ValueError for parameters that aren't float32 ones of the model."""
  wanted, found = (
    {
      jax.tree_util.keystr(path, simple=True, separator="/"): x
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for tree in (sharding.shapes(transformer.specs(model)), params)
  )
  if odd := sorted(wanted.keys() ^ found.keys()):
    which = "lacks" if odd[0] in wanted else "has a surplus"
    raise ValueError(f"{name} {which} {odd[0]!r}, going by the configuration")
  for path, x in wanted.items():
    if (found[path].shape, found[path].dtype) != (x.shape, x.dtype):
      raise ValueError(
        f"{name}[{path!r}] is {found[path].dtype}{list(found[path].shape)}, the"
        f" configuration says {x.dtype}{list(x.shape)}; master weights are"
        " float32"
      )


def with_optimizer(
  params: Any,
  tx: optax.GradientTransformation,
  *,
  frozen: str = "",
  seed: int = 0,
  version: int = 0,
) -> TrainState:
  """A state that goes on from `params` with a fresh optimizer.

  Raises:
    ValueError: `frozen` leaves nothing to train.
  """
  trained, kept = split(params, frozen)
  if not jax.tree.leaves(trained):
    raise ValueError(f"optimizer.frozen {frozen!r} leaves nothing to train")
  if frozen and not jax.tree.leaves(kept):
    raise ValueError(f"optimizer.frozen {frozen!r} matches no parameter")
  return TrainState(
    params=params,
    opt_state=jax.jit(tx.init)(trained),
    step=jnp.zeros((), jnp.int32),
    version=jnp.asarray(version, jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
    rng=jax.random.key_data(jax.random.key(seed)),
  )


def abstract(
  model: ModelConfig,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  rules: Mapping[str, tuple[str, ...]] = sharding.RULES,
  *,
  frozen: str = "",
) -> TrainState:
  """Shapes and shardings of a state on a mesh; moments lie with their weights.

  Returns:
    A state of `jax.ShapeDtypeStruct`.
  """
  specs = transformer.specs(model)
  places = sharding.shardings(specs, mesh, rules)
  whole = NamedSharding(mesh, PartitionSpec())
  params = jax.tree.map(_placed, sharding.shapes(specs), places)
  of_weights = {
    path: x.sharding for path, x in jax.tree_util.tree_leaves_with_path(params)
  }

  def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # A moment stands in the state under the keys of its weight.
    ends = (path[i:] for i in range(len(path)))
    return _placed(
      x, next((of_weights[e] for e in ends if e in of_weights), whole)
    )

  opt_state = jax.tree_util.tree_map_with_path(
    place, jax.eval_shape(tx.init, split(params, frozen)[0])
  )
  number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  return TrainState(
    params=params,
    opt_state=opt_state,
    step=number,
    version=number,
    skipped=number,
    rng=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole),
  )


def _placed(x: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
