"""Requests to a rollout engine: what they ask for and how far they are."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arl_jax.rollout.stop_strings import StopStrings
from arl_jax.types import Sample

# Beyond these float32 has no room for what is computed with them.
_TEMPERATURES = (1e-3, 1e3)
_LARGEST_BIAS = 1e4


class Overloaded(RuntimeError):
  """Too many requests wait; raised at once, before the request is taken."""


class RequestTimeout(TimeoutError):
  """The request wasn't done in time."""


class RequestFailed(RuntimeError):
  """The engine can't compute this request; others aren't affected."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
  """How one request samples.

  Attributes:
    max_tokens: sampled tokens, at most.
    temperature: 0 takes the most probable token.
    top_k: most probable tokens that are kept; 0 keeps all.
    top_p: probability mass of the most probable tokens that are kept.
    min_p: least probability that is kept, as a part of the largest.
    seed: the stream of random numbers depends on it alone.
    stop_ids: token ids that end the request; the result includes them.
    stop_strings: texts that end it, in what the sampled tokens say.
    logit_bias: token id -> what is added to its logit.
    forbidden: token ids that are never sampled.
  """

  max_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  forbidden: tuple[int, ...] = ()

  @property
  def filtered(self) -> bool:
    """Whether tokens come from another distribution than the policy's."""
    return bool(
      self.temperature == 0
      or self.top_k
      or self.top_p < 1
      or self.min_p
      or self.logit_bias
      or self.forbidden
    )

  def choice(self, index: int) -> Sampling:
    """How the n-th of several samples of one prompt samples.

    The first has the seed itself; the others' are hashes of seed and index,
    so that requests with neighbouring seeds share none.
    """
    if not index:
      return self
    text = f"{self.seed}/{index}".encode()
    digest = hashlib.blake2b(text, digest_size=4).digest()
    return dataclasses.replace(self, seed=int.from_bytes(digest, "big") >> 1)

  def validate(self, vocab_size: int) -> None:
    """Raises ValueError naming the field that can't be."""
    self._check_types()
    self._check("max_tokens", 1 <= self.max_tokens < 2**31, ">= 1")
    low, high = _TEMPERATURES
    warm = self.temperature == 0 or low <= self.temperature <= high
    self._check("temperature", warm, f"0 or in {low}..{high}")
    self._check(
      "top_k",
      0 <= self.top_k <= vocab_size,
      f"in 0..{vocab_size} (0 keeps all tokens)",
    )
    self._check("top_p", 0 < self.top_p <= 1, "> 0 and <= 1")
    self._check("min_p", 0 <= self.min_p <= 1, "in 0..1")
    self._check("seed", 0 <= self.seed < 2**31, "in 0..2**31 - 1")
    known = f"of ids in 0..{vocab_size - 1}"
    for name in ("stop_ids", "forbidden", "logit_bias"):
      inside = all(0 <= i < vocab_size for i in getattr(self, name))
      self._check(name, inside, known)
    left = len(set(self.forbidden)) < vocab_size
    self._check("forbidden", left, "short of the whole vocabulary")
    # Not a comparison that NaN would pass.
    small = all(abs(b) <= _LARGEST_BIAS for b in self.logit_bias.values())
    self._check("logit_bias", small, f"of values in ±{_LARGEST_BIAS}")

  def _check_types(self) -> None:
    for name in ("max_tokens", "top_k", "seed"):
      self._check(name, _is_integer(getattr(self, name)), "an integer")
    for name in ("temperature", "top_p", "min_p"):
      self._check(name, _is_number(getattr(self, name)), "a number")
    for name in ("stop_ids", "forbidden"):
      found = getattr(self, name)
      right = isinstance(found, tuple | list) and all(map(_is_integer, found))
      self._check(name, right, "a tuple of token ids")
    bias = self.logit_bias
    right = isinstance(bias, Mapping) and all(
      _is_integer(i) and _is_number(b) for i, b in bias.items()
    )
    self._check("logit_bias", right, "token ids with numbers")
    # A single string would be taken apart into characters.
    texts = isinstance(self.stop_strings, tuple | list) and all(
      isinstance(t, str) and t for t in self.stop_strings
    )
    self._check("stop_strings", texts, "a tuple of texts that aren't empty")

  def refuse_filtered(self) -> None:
    """Raises ValueError if the samples can't be trained on."""
    if not self.filtered:
      return
    named = ("top_k", "top_p", "min_p", "logit_bias", "forbidden")
    plain = Sampling(max_tokens=self.max_tokens)
    changed = [n for n in named if getattr(self, n) != getattr(plain, n)]
    if self.temperature == 0:
      changed.append("temperature")
    values = ", ".join(f"{n} {getattr(self, n)}" for n in changed)
    raise ValueError(
      f"training needs samples of the unfiltered distribution, not {values};"
      " leave it out, or ask with training=False"
    )

  def _check(self, name: str, right: bool, wanted: str) -> None:
    if not right:
      raise ValueError(f"{name} is {getattr(self, name)!r}, not {wanted}")


def _is_integer(x: Any) -> bool:
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def validate(ids: Sequence[int], sampling: Sampling, engine: Any) -> None:
  """Raises ValueError if an engine can't serve such a request."""
  if not ids:
    raise ValueError("ids is empty; a request needs at least one token")
  strange = [i for i in ids if not 0 <= i < engine.vocab_size]
  if strange:
    raise ValueError(
      f"ids has {strange[0]}, which isn't in the vocabulary of"
      f" {engine.vocab_size}"
    )
  sampling.validate(engine.vocab_size)
  if len(ids) + sampling.max_tokens > engine.max_length:
    raise ValueError(
      f"{len(ids)} ids with max_tokens {sampling.max_tokens} must fit into"
      f" {engine.max_length} tokens"
    )
  if len(sampling.stop_ids) > engine.max_stop_ids:
    raise ValueError(
      f"stop_ids has {len(sampling.stop_ids)} ids; a request may have"
      f" {engine.max_stop_ids}"
    )
  biased = len(sampling.logit_bias) + len(sampling.forbidden)
  if biased > engine.max_biased:
    raise ValueError(
      f"logit_bias and forbidden have {biased} ids; a request may have"
      f" {engine.max_biased}"
    )


class Phase(enum.Enum):
  """How far a request is, in words for messages."""

  WAITING = "waiting for a slot"
  PREFILL = "in prefill"
  DECODING = "decoding"
  DONE = "done"


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Request:
  """A scheduler's record of one request.

  When it is done, either `result` or `error` is set, or it was cancelled.

  Attributes:
    session: whose slot it may use again.
    ids: the prompt.
    sampling: how it samples.
    timeout: seconds it may take.
    deadline: when they are over, on the scheduler's clock.
    version: that computes it.
    pinned: whether that stays so when weights change.
    stops: what looks for stop strings, None without.
    context: prompt and sampled tokens.
    slot: index of its slot, -1 without one.
    placed: whether `cached` says what its slot's cache is worth. Else the
      prefix has to be looked for (again).
    cached: tokens of `context` in the slot's cache.
    oldest: oldest version that computed any of it.
    leader: request that computes a prefix which this one waits to copy.
    wanted: tokens of that prefix.
    suspect: whether the engine failed and this may be why: it is tried alone.
  """

  session: str
  ids: list[int]
  sampling: Sampling
  timeout: float
  deadline: float
  version: int
  pinned: bool = False
  stops: StopStrings | None = None
  context: list[int] = dataclasses.field(init=False)
  phase: Phase = Phase.WAITING
  slot: int = -1
  placed: bool = False
  cached: int = 0
  oldest: int = -1
  leader: Request | None = None
  wanted: int = 0
  suspect: bool = False
  result: Sample | None = None
  error: Exception | None = None
  cancelled: bool = False
  _logp: list[float] = dataclasses.field(default_factory=list)
  _sampled_logp: list[float] = dataclasses.field(default_factory=list)
  _versions: list[int] = dataclasses.field(default_factory=list)
  _cache_versions: list[int] = dataclasses.field(default_factory=list)
  _experts: list[np.ndarray] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    self.context = list(self.ids)

  @property
  def sampled(self) -> int:
    return len(self.context) - len(self.ids)

  def restart(self) -> None:
    """Nothing in a cache is worth anything any more; tokens stay."""
    self.placed, self.cached, self.leader = False, 0, None

  def timed_out(self) -> RequestTimeout:
    return RequestTimeout(
      f"request of session {self.session!r} took more than {self.timeout} s:"
      f" it was {self.phase.value}, with {self.sampled} of"
      f" {self.sampling.max_tokens} tokens"
    )

  def failure(self, why: Any) -> RequestFailed:
    """Args: why: what the engine raised, or what was wrong in words."""
    error = RequestFailed(
      f"request of session {self.session!r} failed {self.phase.value}: {why}"
    )
    error.__cause__ = why if isinstance(why, Exception) else None
    return error

  def absorb(self, burst: Any) -> tuple[int, str | None]:
    """Takes what one generate call sampled for it.

    Args:
      burst: the engine's ResultTokens.

    Returns:
      Tokens that were kept, and why the request ends: "stop_id",
      "stop_string", "length", or None if it goes on.
    """
    row, n = self.slot, int(burst.lengths[self.slot])
    self.context += burst.tokens[row, :n].tolist()
    kept, finish = n, None
    if not burst.active[row]:
      finish = "stop_id" if burst.stopped[row] else "length"
    if self.stops is not None:
      surplus = self.stops.surplus(self.context[len(self.ids) :], n)
      if surplus is not None and (surplus or finish != "stop_id"):
        kept, finish = n - surplus, "stop_string"
        del self.context[len(self.context) - surplus :]
    self._logp += burst.log_prob[row, :kept].tolist()
    self._sampled_logp += burst.sampled_logp[row, :kept].tolist()
    self._versions += [self.version] * kept
    self._cache_versions += [self.oldest] * kept
    if burst.experts is not None:
      # A view would keep every slot's row.
      self._experts.append(burst.experts[row, :kept].copy())
    return kept, finish

  def sample(self, finish: str | None, first: int = 0) -> Sample:
    """What was sampled.

    Args:
      finish: why the request ended, None while it goes on.
      first: tokens from this one on.
    """
    experts = self._experts_from(first) if self._experts else None
    return Sample(
      ids=np.array(self.context[len(self.ids) + first :], np.int32),
      logp=np.array(self._logp[first:], np.float32),
      versions=np.array(self._versions[first:], np.int32),
      stopped=finish not in (None, "length"),
      sampled_logp=np.array(self._sampled_logp[first:], np.float32),
      experts=experts,
      cache_versions=np.array(self._cache_versions[first:], np.int32),
      finish=finish,
    )

  def _experts_from(self, first: int) -> np.ndarray:
    """Reads from the end, so that a stream's parts take linear time in all."""
    wanted = self.sampled - first
    parts, found = [self._experts[-1][:0]], 0
    for burst in reversed(self._experts):
      if found >= wanted:
        break
      parts.append(burst)
      found += len(burst)
    return np.concatenate(parts[::-1])[found - wanted :]
