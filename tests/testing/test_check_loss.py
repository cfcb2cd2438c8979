import functools
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses
from arl_jax.testing import CHECKS, check, frozen_gradients
from arl_jax.testing.known_losses import known_values

_HERE = pathlib.Path(__file__).parent
_OWN = ("cispo", "grpo", "gspo", "kimi_k2_5", "policy_gradient", "sft")


def _load(name):
  spec = importlib.util.spec_from_file_location(name, _HERE / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


bad_losses = _load("bad_losses")
_ALL = {**vars(_load("bad_corrections")), **vars(bad_losses)}


def _failed(loss, **options):
  return {r.name: r.message for r in check(loss, **options) if not r.passed}


@pytest.mark.parametrize("loss", _OWN)
@pytest.mark.parametrize("name", CHECKS)
def test_own_losses_pass(loss, name):
  note = CHECKS[name](losses.by_name(loss))
  left_out = {("sft", "known_values"), ("sft", "proximal")}
  assert note is None or (loss, name) in left_out


def test_examples_pass():
  assert not _failed(losses.by_name("examples.own_loss:tight_cispo"))


@pytest.mark.parametrize(
  "name",
  [
    "good_compiled",
    "good_positives_only",
    "good_in_float32",
    "good_weighted_regression",
    "good_icepop",
    "good_other_keywords",
  ],
)
def test_unusual_losses_pass(name):
  assert not _failed(_ALL[name])


# Loss -> the check that must catch it, and what its message must say.
_CAUGHT = {
  "multiplied_by_mask": ("poison", "nan in logp outside the mask", "0 · NaN"),
  "masked_at_the_end": ("poison", "gradient by logp", "Select the inputs"),
  "unmasked": ("mask", "only token [1, 3] is trained, but the loss at", "jnp"),
  "unmasked_stats": ("mask", 'outside the mask the stats["ratio"]'),
  "inverted_number": ("mask", "mask of int32", "mask.astype(bool)"),
  "scalar_mean": ("result", "shape [], not that of logp, [4, 8]", "reduce"),
  "divided_by_count": (
    "microbatches",
    "for row 0 alone, the loss at [0,",
    "every term by the same factor, 2.428571",
    "arl_jax.losses.reduce",
  ),
  "divided_by_length": (
    "microbatches",
    "three more columns of padding",
    "factor, 0.7272727",
  ),
  "divided_by_row": ("packing", "alone in a row it is", "segment_ids"),
  "divided_by_nothing": ("mask", "is nan, not 0", "jnp.maximum(count, 1)"),
  "normalised_advantage": ("microbatches", "for row 0 alone", "group"),
  "spread_of_nothing": ("empty", "if all advantages are 0, the loss"),
  "flipped": ("sign", "so is every other", "The sign is flipped"),
  "stopped": ("sign", "as it is everywhere", "stop_gradient"),
  "infinite_branch": ("sign", "the gradient by logp at [0, 0] is nan", "taken"),
  "divided_by_gap": ("sign", "if logp equals behaviour_logp, the loss", "nan"),
  "overflowing": (
    "extreme_ratios",
    "for logp -0.1, behaviour_logp -100.1 and advantage",
    "the loss at [1, 0] is inf",
    "bounded_exp",
  ),
  "row_ratio": ("packing", "segment 1", "takes the keyword segment_ids=None"),
  "ignored_segments": ("packing", "segment 1", "same row and segment_ids"),
  "mean_over_untrained": (
    "packing",
    "if one more token of its segment is outside the mask",
    "not one of ones",
  ),
  "first_segments_only": (
    "packing",
    "in segment 2, but 0 if the same segment is numbered 3",
    "never with a constant",
  ),
  "inverse_ratio": (
    "result",
    'but stats["ratio"] at [0, 0] is 0.818730',
    "exp(logp − behaviour_logp) is 1.221403: that is its inverse",
  ),
  "logged_log_ratio": ("result", "; exp(", "that is its logarithm"),
  "corrected_twice": (
    "proximal",
    'logp equals proximal_logp, but stats["ratio"] at',
    "it is π/μ",
    "made twice",
  ),
  "not_weighted": (
    "proximal",
    "proximal/μ = 0.5 at every token, the loss at",
    "nothing is weighted",
    "arl_jax.losses.truncated_importance",
  ),
  "weight_without_cap": (
    "proximal",
    "proximal/μ = 20.08554",
    "more than 2 times that is too much",
    "keyword importance_max",
  ),
  "halved_by_proximal": (
    "proximal",
    "with proximal_logp equal to behaviour_logp the loss at",
    "nothing may change",
  ),
  "size_of_advantage": ("sign", "made more likely", "|A| or A²?"),
  "only_tokens": (
    "result",
    "shape [B] it raises ValueError",
    "advantage[:, None]",
  ),
  "transposed_rows": ("result", "with advantage of shape [B] the loss"),
  "shifted": ("mask", "gradient by logp at [1, 2]", "shifted by one"),
  "wrong_rule": ("gradient", "finite differences", "jax.custom_vjp"),
  "wrong_rule_in_float32": ("gradient", "jax.custom_vjp"),
  "rounded": ("gradient", "computes in float16", "logp.dtype"),
  "no_pair": ("result", "returns an array, not (per_token, stats)"),
  "no_array": ("result", "the loss per token is a float, no array"),
  "no_stats": ("result", "stats hold ['kl'] but no 'ratio'", "ones_like"),
  "stats_of_a_batch": ("result", "stats['ratio'] has shape [], not that"),
  "stats_none": ("result", "stats are a NoneType, not a dict"),
  "random": ("result", "called twice with the same arrays", "random numbers"),
  "widened": ("result", "logp of type float32 gives a loss of type float64"),
  "narrowed": ("result", "logp of type float64 gives a loss of type float32"),
  "integer": ("result", "logp of type float32 gives a loss of type int"),
}


@pytest.mark.parametrize("name", _CAUGHT)
def test_bad_losses_are_caught_by_name(name):
  culprit, *words = _CAUGHT[name]
  loss = _ALL[name]
  with pytest.raises(AssertionError) as caught:
    CHECKS[culprit](loss)
  for word in words:
    assert word in str(caught.value)


# Loss -> what must be said of what it raises.
_RAISING = {
  "raising": ("ValueError: Incompatible shapes", "return logp + jnp.ones(3)"),
  "asserting": ("AssertionError: one row only", "assert logp.shape[0] == 1"),
  "branching": (
    "TracerBoolConversionError",
    "if advantage.mean() > 0:",
    "jnp.where",
  ),
  "on_the_host": ("TracerArrayConversionError", "under jax.jit"),
}


@pytest.mark.parametrize("name", _RAISING)
def test_what_a_loss_raises_is_a_failed_check(name):
  message = _failed(getattr(bad_losses, name))["result"]
  assert message.startswith("raises ")
  assert "\nbad_losses.py:" in message
  for word in _RAISING[name]:
    assert word in message


def test_every_bad_loss_is_tried():
  functions = {
    name
    for name, value in _ALL.items()
    if getattr(value, "__module__", "").startswith("bad_")
    and not name.startswith(("_", "good"))
  }
  tried = {*_CAUGHT, *_RAISING, "cispo_without_stop", "few_arguments"}
  assert functions == tried


@pytest.mark.parametrize(
  "name",
  ["divided_by_row", "wrong_rule", "no_stats"],
)
def test_one_fault_fails_one_check(name):
  assert list(_failed(getattr(bad_losses, name))) == [_CAUGHT[name][0]]


def test_one_fault_is_told_at_length_once():
  first, *others = _failed(bad_losses.raising).values()
  assert "\n" in first
  # Two have nothing to compare with.
  assert len(others) == len(CHECKS) - 3
  assert set(others) == {"as `result`"}


def test_a_gradient_that_should_stop_is_caught():
  failed = _failed(bad_losses.cispo_without_stop, like="cispo")
  assert list(failed) == ["sign", "known_values"]
  assert "CISPO's does) belongs behind jax.lax.stop_gradient" in failed["sign"]
  message = failed["known_values"]
  assert "that of cispo(ratio_max=5, ratio_min=0) is" in message
  assert "stop_gradient around the whole weight" in message


def _difference(loss, like=None):
  with pytest.raises(AssertionError) as caught:
    known_values(loss, like)
  return str(caught.value)


def test_what_a_loss_has_no_keyword_for_is_named():
  tight = losses.by_name("examples.own_loss:tight_cispo")
  message = _difference(tight, "cispo")
  words = "no keyword ratio_min; these numbers are those of ratio_min="
  assert words in message


def test_stats_of_known_losses_are_compared():
  def loss(*arrays):
    per_token, stats = losses.policy_gradient(*arrays)
    return per_token, {**stats, "ratio": stats["clipped"]}

  message = _difference(loss, "policy_gradient")
  assert message.startswith('the stats["ratio"][')


def test_a_loss_is_compared_with_its_namesake():
  def cispo(*arrays):
    return losses.policy_gradient(*arrays)

  assert "another loss deserves another name" in _difference(cispo)
  assert "another loss" not in _difference(cispo, "grpo")
  assert known_values(cispo, "policy_gradient") is None
  assert known_values(losses.grpo) is None


def test_what_was_left_out_is_said():
  loop = bad_losses.good_in_a_loop
  assert CHECKS["gradient"](loop).endswith("a stop_gradient inside scan")
  assert CHECKS["known_values"](loop).startswith("nothing to compare with")


@pytest.mark.parametrize(
  ("name", "check_name", "words"),
  [
    ("good", "proximal", "takes no proximal_logp"),
    ("good_icepop", "proximal", "drops tokens at proximal/μ = 20.08554"),
    ("good_other_keywords", "proximal", "by ** and ignores it"),
    ("good_weighted_regression", "sign", "raises every sampled token, by a"),
  ],
)
def test_what_is_unusual_is_said(name, check_name, words):
  assert words in CHECKS[check_name](_ALL[name])


@pytest.mark.parametrize("importance_max", [1.0, 5.0, 100.0])
def test_a_cap_of_importance_is_taken_from_its_keyword(importance_max):
  loss = functools.partial(losses.grpo, importance_max=importance_max)
  assert CHECKS["proximal"](loss) is None


def test_unknown_like_is_refused():
  with pytest.raises(ValueError, match=r"'ppo' is none of \['cispo'"):
    check(losses.grpo, like="ppo")


def test_losses_that_cannot_be_hashed_are_checked():
  class Loss:
    __hash__ = None

    def __call__(self, logp, behaviour_logp, advantage, mask):
      return bad_losses.good(logp, behaviour_logp, advantage, mask)

  assert not _failed(Loss())


def test_hyperparameters_of_a_partial_are_kept():
  # Bounds that leave out a ratio of 1, as of somebody who means 1 ± ε.
  loss = functools.partial(losses.grpo, ratio_min=0.1, ratio_max=0.2)
  with pytest.raises(AssertionError, match="absolute"):
    CHECKS["sign"](loss)


def test_frozen_holds_what_is_behind_stop_gradient():
  def f(x):
    inner = jax.jit(lambda y: jnp.exp(jax.lax.stop_gradient(y)) * y)
    return jnp.where(x > 0, inner(x), jax.nn.relu(x)).sum()

  at = jnp.array([1.0, 2.0])
  # exp is held at e and e², the factor y moves.
  want = np.e * 1.5 + np.e**2 * 4
  got = frozen_gradients.frozen(f, at)(jnp.array([1.5, 4.0]))
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_loops_that_stop_nothing_are_followed():
  def f(x):
    return jax.lax.scan(lambda c, y: (c * y, c), 1.0, x)[0]

  at = jnp.array([1.0, 2.0])
  assert frozen_gradients.frozen(f, at)(at * 2) == 8


def _run(*arguments, cwd=_HERE):
  return subprocess.run(
    [sys.executable, "-Werror", "-m", "arl_jax.testing.check_loss", *arguments],
    cwd=cwd,
    capture_output=True,
    text=True,
  )


def test_command_for_a_good_loss():
  done = _run("bad_losses:good")
  assert done.returncode == 0, done.stderr
  assert not done.stderr
  *lines, last = done.stdout.splitlines()
  assert [line.split()[:2] for line in lines] == [["ok", n] for n in CHECKS]
  assert last.startswith("11 of 11 checks passed")


def test_command_for_a_bad_loss():
  done = _run("bad_losses:cispo_without_stop", "--like=cispo")
  assert done.returncode == 1, done.stderr
  assert "\nFAIL  known_values: the gradient by logp[" in done.stdout
  assert "9 of 11 checks passed" in done.stdout
  reasons = [s for s in done.stdout.splitlines() if s.startswith(" ")]
  assert reasons
  assert max(map(len, reasons)) <= 80


@pytest.mark.parametrize(
  ("loss", "words"),
  [
    ("no_such_module:loss", "No module named 'no_such_module'); looked in"),
    ("bad_losses:no_such", "has no attribute 'no_such'"),
    ("bad_losses", "one of your own is named as package.module:function"),
    ("bad_losses:number", "is a int, no function"),
    ("bad_losses:few_arguments", "does not take logp, behaviour_logp"),
    ("broken:loss", "SyntaxError: "),
  ],
)
def test_command_for_no_loss(loss, words, tmp_path):
  for name, text in (
    ("bad_losses", (_HERE / "bad_losses.py").read_text()),
    ("broken", "def loss(:\n"),
  ):
    (tmp_path / f"{name}.py").write_text(text)
  done = _run(loss, cwd=tmp_path)
  assert done.returncode == 2
  assert not done.stdout
  assert done.stderr.startswith("error: ")
  assert done.stderr.count("\n") == 1
  assert words in done.stderr


def test_command_for_an_unknown_like():
  done = _run("cispo", "--like=ppo")
  assert done.returncode == 2
  assert done.stderr.startswith("error: like='ppo' is none of")
