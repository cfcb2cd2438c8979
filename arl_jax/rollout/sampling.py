"""Drawing tokens, with a random stream per request."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample(
  logits: jax.Array,
  temperature: jax.Array,
  seed: jax.Array,
  index: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """One token a row by inversion of the cumulative distribution.

  The draw depends on (seed, index) alone, not on what shares the batch.

  Args:
    logits: [S, V].
    temperature: [S] > 0.
    seed: [S] int32, of the request.
    index: [S] int32, tokens the request has sampled so far.

  Returns:
    ids [S] int32 and behaviour log-probs [S], nats: log-softmax(logits /
    temperature) of the drawn token.
  """

  def uniform(own_seed, own_index):
    key = jax.random.fold_in(jax.random.key(own_seed), own_index)
    return jax.random.uniform(key)

  logp = jax.nn.log_softmax(logits / temperature[:, None], axis=-1)
  cumulative = jnp.cumsum(jnp.exp(logp), axis=-1)
  threshold = jax.vmap(uniform)(seed, index) * cumulative[:, -1]
  ids = (cumulative <= threshold[:, None]).sum(-1).astype(jnp.int32)
  ids = jnp.minimum(ids, logits.shape[1] - 1)
  # A parallel sum isn't quite monotone, so that the count can be off by one and
  # meet an entry of probability 0; the nearest possible one before it stands.
  possible = jnp.isfinite(logp)
  index = jnp.arange(logits.shape[1], dtype=jnp.int32)
  before = jax.lax.cummax(jnp.where(possible, index, -1), axis=1)
  nearest = jnp.take_along_axis(before, ids[:, None], 1)[:, 0]
  ids = jnp.where(nearest < 0, jnp.argmax(possible, axis=1), nearest)
  return ids, jnp.take_along_axis(logp, ids[:, None], 1)[:, 0]
