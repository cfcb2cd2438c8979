"""A loss of one's own: --config.learner.loss=examples.own_loss:tight_cispo."""

from arl_jax.losses import cispo


def tight_cispo(logp, behaviour_logp, advantage, mask, *, ratio_max=2.0):
  """A loss: arrays in, (per_token, stats) out. CISPO with a lower bound."""
  return cispo(logp, behaviour_logp, advantage, mask, ratio_max=ratio_max)
