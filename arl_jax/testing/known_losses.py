"""Losses of publications, and the numbers that independent code gives them."""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import json
from typing import Any

import numpy as np

from arl_jax.testing.cases import Batch, Outcome, evaluate
from arl_jax.testing.faults import Fault, Tolerance, number, place, worst
from arl_jax.types import LossFn

# Name -> the formula, to be printed where a loss differs.
KNOWN = {
  "cispo": "−sg(min(max(ρ, ratio_min), ratio_max)) · A · logπ, ρ = π/μ, sg ="
  " jax.lax.stop_gradient around the whole weight",
  "grpo": "−min(ρA, clip(ρ, ratio_min, ratio_max) A), ρ = π/μ",
  "gspo": "−min(ρA, clip(ρ, ratio_min, ratio_max) A), ρ = exp(mean of log π/μ"
  " over the trained tokens of the segment), at each of its trained tokens",
  "kimi_k2_5": "−clip(ρ)A + τ(log ρ)², ρ = π/μ; no gradient of the first term"
  " where log ρ is outside [log_ratio_min, log_ratio_max], whatever the sign of"
  " A; that of the second everywhere",
  "policy_gradient": "−A · logπ",
}

# Entry of the file -> known loss, and whether each row counts as its mean.
_ENTRIES = {
  "cispo": ("cispo", False),
  "cispo_two_sided": ("cispo", False),
  "grpo_clip_token_mean": ("grpo", False),
  "grpo_clip_constant_length": ("grpo", False),
  "grpo_clip_sequence_mean": ("grpo", True),
  "policy_gradient": ("policy_gradient", False),
  "kimi_k2_5": ("kimi_k2_5", False),
  "gspo": ("gspo", True),
}
# Belongs to the reduction, which is no part of a loss.
_NO_HYPERPARAMETERS = {"constant_length"}

# One shape for all batches of the file, so that a loss is compiled once.
_SHAPE = (5, 8)

_TOLERANCES: dict[str, Tolerance] = {
  "float64": (1e-6, 1e-8),
  "float32": (1e-5, 1e-5),
}


def require(name: str) -> None:
  """Raises ValueError if no known loss has that name."""
  if name not in KNOWN:
    raise ValueError(f"like={name!r} is none of {sorted(KNOWN)}")


def known_values(loss: LossFn, like: str | None = None) -> str | None:
  """Values, gradients and stats of a loss that is like a known one."""
  own = getattr(inspect.unwrap(getattr(loss, "func", loss)), "__name__", "")
  namesake = like is None
  like = like or own
  if like not in KNOWN:
    return f"nothing to compare with; like= takes one of {sorted(KNOWN)}"
  for hyper, cases in _by_hyperparameters(like).items():
    given, note = _given(loss, dict(hyper))
    for dtype in ("float64", "float32"):
      for case in cases:
        _compare(given, like, dict(hyper), case, dtype, note, namesake)
  return None


def _by_hyperparameters(like: str) -> dict[tuple, list[tuple[dict, str]]]:
  """(batch, entry) by what they are computed with."""
  text = importlib.resources.files(__package__) / "known_losses.json"
  batches = json.loads(text.read_text("utf-8"))
  found: dict[tuple, list[tuple[dict, str]]] = {}
  for batch in batches:
    for entry, (name, _) in _ENTRIES.items():
      if name == like:
        hyper = batch["expected"][entry]["hyperparameters"]
        key = (kv for kv in hyper.items() if kv[0] not in _NO_HYPERPARAMETERS)
        found.setdefault(tuple(sorted(key)), []).append((batch, entry))
  return found


def _given(loss: LossFn, hyper: dict[str, float]) -> tuple[LossFn, str]:
  """The loss with what it takes of `hyper`, and a word on the rest."""
  parameters = inspect.signature(loss).parameters
  anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  kept = {k: v for k, v in hyper.items() if anything or k in parameters}
  missing = {k: v for k, v in hyper.items() if k not in kept}
  note = ""
  if missing:
    values = ", ".join(f"{k}={v:.6g}" for k, v in missing.items())
    note = (
      f" Your loss has no keyword {' and no '.join(missing)}; these numbers are"
      f" those of {values}. If its own constants differ, make them keywords"
      " with defaults, and they are set."
    )
  return functools.partial(loss, **kept), note


def _batch(data: dict[str, Any], row_means: bool) -> Batch:
  def padded(name, dtype=np.float64):
    array = np.array(data[name], dtype)
    missing = (n - m for n, m in zip(_SHAPE, array.shape, strict=False))
    return np.pad(array, [(0, n) for n in missing])

  mask = padded("mask", bool)
  weights = mask.astype(np.float64)
  if row_means:
    weights /= np.maximum(mask.sum(1, keepdims=True), 1)
  return Batch(
    logp=padded("logp"),
    behaviour_logp=padded("behaviour_logp"),
    advantage=padded("advantage"),
    mask=mask,
    weights=weights,
  )


def _expected_stats(
  like: str, batch: Batch, hyper: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
  """Ratios, and where a bound changes the term or its gradient."""
  mask = batch.mask
  advantage = batch.advantage[:, None]
  log_ratio = np.where(mask, batch.logp - batch.behaviour_logp, 0.0)
  if like == "gspo":
    count = np.maximum(mask.sum(1, keepdims=True), 1)
    log_ratio = np.where(mask, log_ratio.sum(1, keepdims=True) / count, 0.0)
  ratio = np.exp(log_ratio)
  if like == "policy_gradient":
    clipped = np.zeros_like(mask)
  elif like == "kimi_k2_5":
    low, high = hyper["log_ratio_min"], hyper["log_ratio_max"]
    clipped = (log_ratio < low) | (log_ratio > high)
  else:
    bounded = np.clip(ratio, hyper["ratio_min"], hyper["ratio_max"])
    clipped = bounded != ratio
    if like in ("grpo", "gspo"):
      clipped = bounded * advantage < ratio * advantage
  return np.where(mask, ratio, 0.0), clipped & mask


def _compare(loss, like, hyper, case, dtype, note, namesake):
  data, entry = case
  expected = data["expected"][entry]
  batch = _batch(data, _ENTRIES[entry][1])
  outcome = evaluate(loss, batch, np.dtype(dtype))
  values = ", ".join(f"{k}={v:.6g}" for k, v in hyper.items())
  why = f"{like} is {KNOWN[like]}.{note}"
  if namesake:
    why += f" It is compared because its name is {like}; another loss"
    why += " deserves another name."
  for name, got, want in _numbers(outcome, batch, expected, like, hyper):
    at = worst(got, want, _TOLERANCES[dtype])
    if at is not None:
      raise Fault(
        f"the {name}{place(at) if at else ''} is {number(got[at])}, that of"
        f" {like}({values}) is {number(want[at])} ({dtype})",
        why,
      )


def _numbers(
  outcome: Outcome,
  batch: Batch,
  expected: dict[str, Any],
  like: str,
  hyper: dict[str, float],
):
  """Names, what the loss gives and what it should."""
  assert batch.weights is not None
  gradient = np.array(expected["grad_numerator"])
  rows, columns = gradient.shape
  yield "gradient by logp", outcome.gradient[:rows, :columns], gradient
  total = np.sum(batch.weights * outcome.per_token, dtype=np.float64)
  yield "sum of terms", total, np.asarray(expected["numerator"])
  ratio, clipped = _expected_stats(like, batch, hyper)
  yield 'stats["ratio"]', outcome.ratio, ratio
  yield 'stats["clipped"]', outcome.clipped, clipped
