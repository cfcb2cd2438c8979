"""Losses with one fault each, and good ones that look unusual."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from arl_jax.losses.ratio import segment_mean


def _wide(advantage, logp):
  advantage = advantage[:, None] if advantage.ndim == 1 else advantage
  return jnp.broadcast_to(advantage, logp.shape)


def _masked(mask, *arrays):
  mask = mask.astype(bool)
  return (jnp.where(mask, x, 0.0) for x in arrays)


def _stats(mask):
  return {"ratio": mask.astype(float), "clipped": jnp.zeros(mask.shape)}


def _ratio(logp, behaviour_logp):
  return jnp.exp(jnp.clip(logp - behaviour_logp, -35.0, 35.0))


def good(logp, behaviour_logp, advantage, mask):
  """−ρA, the base of the bad ones."""
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  return -_ratio(logp, behaviour_logp) * advantage, _stats(mask)


@functools.partial(jax.jit, static_argnames="power")
def good_compiled(logp, behaviour_logp, advantage, mask, *, power=1):
  """Stopped gradients inside compiled, rematerialised and custom functions."""
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )

  @jax.checkpoint
  def weight(x):
    return jax.lax.stop_gradient(_ratio(x, behaviour_logp) ** power)

  @jax.custom_jvp
  def twice(x):
    return x + jax.lax.stop_gradient(x)

  # As the rule of x + sg(x) is.
  twice.defjvp(lambda primals, tangents: (2 * primals[0], tangents[0]))
  return -weight(logp) * advantage * twice(logp), _stats(mask)


def good_positives_only(logp, behaviour_logp, advantage, mask):
  """Imitates what was better than expected; no gradient elsewhere."""
  return good(logp, behaviour_logp, jnp.maximum(advantage, 0.0), mask)


def good_weighted_regression(logp, behaviour_logp, advantage, mask):
  """−exp(A/β) log π: raises what was worse than expected too, but less."""
  advantage = _wide(advantage, logp)
  logp, advantage = _masked(mask, logp, advantage)
  return -jnp.exp(jnp.clip(advantage, -10.0, 10.0)) * logp, _stats(mask)


def good_in_a_loop(logp, behaviour_logp, advantage, mask):
  """A stopped gradient where it can't be followed."""
  advantage = _wide(advantage, logp)
  logp, advantage = _masked(mask, logp, advantage)

  def token(carry, x):
    return carry, -x[1] * (x[0] + jax.lax.stop_gradient(x[0]))

  _, per_token = jax.lax.scan(token, 0.0, (logp.T, advantage.T))
  return per_token.T, _stats(mask)


def _in_float32(loss, logp, *rest):
  per_token, stats = loss(*(x.astype(jnp.float32) for x in (logp, *rest)))
  return per_token.astype(logp.dtype), stats


def good_in_float32(logp, behaviour_logp, advantage, mask):
  """Whatever the type of logp, but the result has that type."""
  return _in_float32(good, logp, behaviour_logp, advantage, mask)


def multiplied_by_mask(logp, behaviour_logp, advantage, mask):
  ratio = _ratio(logp, behaviour_logp)
  per_token = -ratio * _wide(advantage, logp) * mask
  return per_token, _stats(mask)


def masked_at_the_end(logp, behaviour_logp, advantage, mask):
  ratio = jnp.sqrt(_ratio(logp, behaviour_logp))
  per_token = -ratio * _wide(advantage, logp)
  return jnp.where(mask.astype(bool), per_token, 0.0), _stats(mask)


def unmasked(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, advantage, jnp.ones_like(mask))


def unmasked_stats(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, advantage, mask)[0], _stats(logp == logp)


def inverted_number(logp, behaviour_logp, advantage, mask):
  """~1 is −2, so a mask of integers selects everything."""
  return good(logp, behaviour_logp, advantage, ~(~mask).astype(bool))


def scalar_mean(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token.sum() / mask.sum(), stats


def divided_by_count(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token / jnp.maximum(mask.sum(), 1), stats


def divided_by_length(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token / logp.shape[1], stats


def divided_by_row(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token / jnp.maximum(mask.sum(1, keepdims=True), 1), stats


def divided_by_nothing(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token / mask.sum(1, keepdims=True), stats


def normalised_advantage(logp, behaviour_logp, advantage, mask):
  (advantage,) = _masked(mask, _wide(advantage, logp))
  advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
  return good(logp, behaviour_logp, advantage, mask)


def spread_of_nothing(logp, behaviour_logp, advantage, mask):
  (advantage,) = _masked(mask, _wide(advantage, logp))
  spread = jnp.abs(advantage).max(1, keepdims=True)
  return good(logp, behaviour_logp, advantage / spread, mask)


def cispo_without_stop(
  logp,
  behaviour_logp,
  advantage,
  mask,
  *,
  ratio_min=0.0,
  ratio_max=5.0,
):
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  ratio = _ratio(logp, behaviour_logp)
  weight = jnp.clip(ratio, ratio_min, ratio_max)
  mask = mask.astype(bool)
  stats = {"ratio": jnp.where(mask, ratio, 0), "clipped": weight != ratio}
  return -weight * advantage * logp, stats


def flipped(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, -advantage, mask)


def stopped(logp, behaviour_logp, advantage, mask):
  logp = jax.lax.stop_gradient(logp)
  return good(logp, behaviour_logp, advantage, mask)


def infinite_branch(logp, behaviour_logp, advantage, mask):
  """|log ρ|^½ has an infinite slope at 0, which jnp.where doesn't hide."""
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  logp, behaviour_logp = _masked(mask, logp, behaviour_logp)
  gap = jnp.abs(logp - behaviour_logp)
  return per_token + jnp.where(gap > 1e6, jnp.sqrt(gap), 0.0), stats


def divided_by_gap(logp, behaviour_logp, advantage, mask):
  """0 / 0 on the policy."""
  _, stats = good(logp, behaviour_logp, advantage, mask)
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  gap = jnp.where(mask.astype(bool), logp - behaviour_logp, 1.0)
  term = jnp.expm1(jnp.clip(gap, -35.0, 35.0)) / gap
  return jnp.where(mask.astype(bool), -term * advantage, 0.0), stats


def overflowing(logp, behaviour_logp, advantage, mask):
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  ratio = jnp.exp(logp - behaviour_logp)
  clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
  return -jnp.minimum(ratio * advantage, clipped), _stats(mask)


def row_ratio(logp, behaviour_logp, advantage, mask):
  """The mean over a row where that over a segment is meant."""
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  mean = segment_mean(logp - behaviour_logp, mask.astype(bool), None)
  return -_ratio(mean, 0.0) * advantage, _stats(mask)


def ignored_segments(
  logp, behaviour_logp, advantage, mask, *, segment_ids=None
):
  del segment_ids
  return row_ratio(logp, behaviour_logp, advantage, mask)


def mean_over_untrained(
  logp, behaviour_logp, advantage, mask, *, segment_ids=None
):
  """The mean over all tokens of a segment where trained ones are meant."""
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  every = jnp.ones(mask.shape, bool)
  mean = segment_mean(logp - behaviour_logp, every, segment_ids)
  return -_ratio(mean, 0.0) * advantage, _stats(mask)


def first_segments_only(
  logp, behaviour_logp, advantage, mask, *, segment_ids=None
):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  if segment_ids is not None:
    per_token = jnp.where(segment_ids < 3, per_token, 0.0)
  return per_token, stats


def inverse_ratio(logp, behaviour_logp, advantage, mask):
  """μ/π as the importance weight of a score."""
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  ratio = jax.lax.stop_gradient(_ratio(behaviour_logp, logp))
  shown = jnp.where(mask.astype(bool), ratio, 0.0)
  return -ratio * advantage * logp, {**_stats(mask), "ratio": shown}


def logged_log_ratio(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  logp, behaviour_logp = _masked(mask, logp, behaviour_logp)
  return per_token, {**stats, "ratio": logp - behaviour_logp}


def size_of_advantage(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, jnp.abs(advantage), mask)


def only_tokens(logp, behaviour_logp, advantage, mask):
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  return -_ratio(logp, behaviour_logp) * advantage, _stats(mask)


def transposed_rows(logp, behaviour_logp, advantage, mask):
  """[B] and [B, T] are told apart, and not the same."""
  scale = 2.0 if advantage.ndim == 1 else 1.0
  return good(logp, behaviour_logp, scale * advantage, mask)


def shifted(logp, behaviour_logp, advantage, mask):
  """Log-probs as if entry t were the prediction of token t + 1."""
  logp, behaviour_logp = (
    jnp.roll(x, 1, axis=1) for x in (logp, behaviour_logp)
  )
  return good(logp, behaviour_logp, advantage, mask)


@jax.custom_vjp
def _wrong_exp(x):
  return jnp.exp(x)


_wrong_exp.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g * (1 + x),))


def wrong_rule(logp, behaviour_logp, advantage, mask):
  advantage = _wide(advantage, logp)
  logp, behaviour_logp, advantage = _masked(
    mask, logp, behaviour_logp, advantage
  )
  ratio = _wrong_exp(jnp.clip(logp - behaviour_logp, -35.0, 35.0))
  return -ratio * advantage, _stats(mask)


def wrong_rule_in_float32(logp, behaviour_logp, advantage, mask):
  return _in_float32(wrong_rule, logp, behaviour_logp, advantage, mask)


def rounded(logp, behaviour_logp, advantage, mask):
  half = logp.astype(jnp.float16)
  per_token, stats = good(half, behaviour_logp, advantage, mask)
  return per_token.astype(logp.dtype), stats


def no_pair(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, advantage, mask)[0]


def no_array(logp, behaviour_logp, advantage, mask):
  return 0.0, _stats(mask)


def no_stats(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, advantage, mask)[0], {"kl": logp}


def stats_of_a_batch(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token, {k: v.mean() for k, v in stats.items()}


def stats_none(logp, behaviour_logp, advantage, mask):
  return good(logp, behaviour_logp, advantage, mask)[0], None


def raising(logp, behaviour_logp, advantage, mask):
  return logp + jnp.ones(3), {}


def asserting(logp, behaviour_logp, advantage, mask):
  assert logp.shape[0] == 1, "one row only"
  return good(logp, behaviour_logp, advantage, mask)


def branching(logp, behaviour_logp, advantage, mask):
  if advantage.mean() > 0:
    return good(logp, behaviour_logp, advantage, mask)
  return good(logp, behaviour_logp, 2 * advantage, mask)


def on_the_host(logp, behaviour_logp, advantage, mask):
  return good(jnp.asarray(np.asarray(logp)), behaviour_logp, advantage, mask)


def random(logp, behaviour_logp, advantage, mask):
  noise = np.random.default_rng().uniform(0.5, 1.5)
  return good(logp, behaviour_logp, float(noise) * advantage, mask)


def widened(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token * np.ones(logp.shape), stats


def narrowed(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token.astype(jnp.float32), stats


def integer(logp, behaviour_logp, advantage, mask):
  per_token, stats = good(logp, behaviour_logp, advantage, mask)
  return per_token.astype(int), stats


def few_arguments(logp, advantage):
  return logp * advantage, {}


number = 3
