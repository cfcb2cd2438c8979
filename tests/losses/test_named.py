import functools
import sys
import types

import numpy as np
import pytest

from arl_jax import losses
from arl_jax.losses import accepted, by_name, is_supervised


def _plain(logp, behaviour_logp, advantage, mask, *, tau=0.1):
  return -tau * advantage * logp, {}


def _takes_all(logp, behaviour_logp, advantage, mask, **arrays):
  return logp, arrays


def _proximal(logp, behaviour_logp, advantage, mask, *, proximal_logp=None):
  return logp, {}


def _needs_more(logp, behaviour_logp, advantage, mask, *, tau):
  return logp, {}


@functools.wraps(_plain)
def _wrapped(*arrays, **hyper):
  return _plain(*arrays, **hyper)


@pytest.fixture(autouse=True)
def own(monkeypatch):
  """A module "own_losses" as a user would write one."""
  module = types.ModuleType("own_losses")
  module.plain, module.wrapped, module.takes_all = _plain, _wrapped, _takes_all
  module.needs_more, module.number = _needs_more, 3
  monkeypatch.setitem(sys.modules, "own_losses", module)


@pytest.mark.parametrize(
  "name", ["cispo", "grpo", "gspo", "kimi_k2_5", "policy_gradient", "sft"]
)
def test_losses_of_this_package_have_names(name):
  assert by_name(name) is getattr(losses, name)


def test_own_loss_is_named_by_module_and_function():
  assert by_name("own_losses:plain") is _plain
  assert by_name("arl_jax.losses.policy:grpo") is losses.grpo


@pytest.mark.parametrize(
  ("name", "want"),
  [
    ("grpo(ratio_max=1.28)", {"ratio_max": 1.28}),
    ("grpo (\n ratio_max = 2, )", {"ratio_max": 2}),
    ("kimi_k2_5(log_ratio_min=-1e-1)", {"log_ratio_min": -0.1}),
    ("cispo(importance_max=3)", {"importance_max": 3}),
    ("own_losses:plain(tau=0.5)", {"tau": 0.5}),
    ("own_losses:wrapped(tau=0.5)", {"tau": 0.5}),
    ("gspo()", {}),
  ],
)
def test_hyperparameters_follow_in_parentheses(name, want):
  assert by_name(name).keywords == want


def test_hyperparameters_reach_the_loss(run, batch):
  arrays = batch(1)
  got = run(by_name("grpo(ratio_min=0.5, ratio_max=1.5)"), *arrays)
  want = run("grpo", *arrays, hyper={"ratio_min": 0.5, "ratio_max": 1.5})
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  assert (got.per_token != run("grpo", *arrays).per_token).any()


@pytest.mark.parametrize(
  ("name", "match"),
  [
    ("ppo", "'ppo' is neither one of"),
    ("", "is neither one of"),
    (":grpo", "is neither one of"),
    ("no_such_module:x", "No module named 'no_such_module'"),
    ("own_losses:missing", "has no attribute 'missing'"),
    ("own_losses", "is neither one of"),
    ("own_losses:number", "is a int, no function"),
    ("math:sqrt", "does not take logp, behaviour_logp, advantage, mask"),
    ("own_losses:needs_more", "missing a required argument: 'tau'"),
    ("grpo(clip=1)", r"no hyper-parameter 'clip'; it has \['ratio_min'"),
    ("sft(tau=1)", "no hyper-parameter 'tau'; it has none"),
    # Arrays, and what isn't by keyword only, are no hyper-parameters.
    ("grpo(proximal_logp=1)", "no hyper-parameter 'proximal_logp'"),
    ("grpo(segment_ids=None)", "no hyper-parameter 'segment_ids'"),
    ("grpo(mask=1)", "no hyper-parameter 'mask'"),
    ("own_losses:takes_all(x=1)", "no hyper-parameter 'x'"),
  ],
)
def test_bad_names_are_refused(name, match):
  with pytest.raises(ValueError, match=match):
    by_name(name)


@pytest.mark.parametrize(
  "arguments",
  [
    "(1.28)",
    "(*[1])",
    "(**{'ratio_max': 1})",
    "(ratio_max)",
    "(ratio_max=x)",
    "(ratio_max=1.28",
    "(ratio_max=1, ratio_max=2)",
    "(ratio_max={[]: 1})",
    "(ratio_max=1 if True else 2)",
    "(ratio_max=lambda: 1)",
    "(ratio_max=2**9**9**9)",
    "(ratio_max=1)(ratio_min=2)",
    "(ratio_max=1).__call__(ratio_min=2)",
    "(ratio_max=1) or f(ratio_max=2)",
    "(__import__('os'))",
    "(ratio_max=__import__('os').getpid())",
    "(ratio_max=(x := 1))",
    "(ratio_max=[i for i in (1,)])",
    "(ratio_max=f'{1}')",
    "(ratio_max=1); import os",
    "(\0)",
  ],
)
def test_only_keywords_with_plain_values_are_read(arguments):
  with pytest.raises(ValueError, match="hyper-parameters are keywords with"):
    by_name(f"grpo{arguments}")


_BOTH = {"proximal_logp", "segment_ids"}


@pytest.mark.parametrize(
  ("loss", "want"),
  [
    (losses.grpo, _BOTH),
    (losses.gspo, _BOTH),
    (losses.sft, set()),
    (_plain, set()),
    (_proximal, {"proximal_logp"}),
    (_takes_all, _BOTH),
    (functools.partial(losses.grpo, ratio_max=2.0), _BOTH),
  ],
)
def test_arrays_that_a_loss_takes(loss, want):
  assert set(accepted(loss)) == want


def test_cross_entropy_alone_is_supervised():
  assert is_supervised(losses.sft)
  assert is_supervised(by_name("sft"))
  assert is_supervised(by_name("arl_jax.losses:sft"))
  assert is_supervised(functools.partial(losses.sft))
  assert is_supervised(by_name("sft()"))
  for loss in (losses.policy_gradient, by_name("grpo(ratio_max=2)"), _plain):
    assert not is_supervised(loss)
