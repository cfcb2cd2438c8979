"""An engine of numpy that notices every wrong use of its caches."""

import dataclasses
import hashlib
import types
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Params:
  version: int


def next_token(version, prefix, seed, index, vocab_size=64):
  """A hash of everything that a token may depend on."""
  text = repr((version, [int(i) for i in prefix], seed, index)).encode()
  return hashlib.blake2b(text, digest_size=4).digest()[0] % vocab_size


def alone(ids, sampling, version=0):
  """The tokens that a request gets if nothing disturbs it."""
  tokens = []
  while len(tokens) < sampling.max_tokens:
    tokens.append(
      next_token(version, [*ids, *tokens], sampling.seed, len(tokens))
    )
    if tokens[-1] in sampling.stop_ids:
      break
  return tokens


@dataclasses.dataclass
class _Row:
  # (token, version that computed its entry) of each position.
  full: list = dataclasses.field(default_factory=list)
  # What a layer with a window has: ring index -> (position, token).
  ring: dict = dataclasses.field(default_factory=dict)
  # What drafts have: position -> tokens up to there.
  pairs: dict = dataclasses.field(default_factory=dict)
  # Tokens up to the one whose hidden state is there.
  hidden_at: int = -1
  sampling: object = None
  sampled: int = 0
  ended: bool = True


class _State:
  def __init__(self, rows):
    self.rows, self.donated = rows, False


class FakeEngine:
  """Next token = hash of prefix, seed and index, if `sample` isn't another.

  A behaviour log-prob is minus the oldest version among the cache entries that
  the token depends on, `sampled_logp` minus the newest. `on_call(name,
  argument)` may raise. Layers with a window forget; drafts need each token's
  pair with the hidden state before it.
  """

  max_stop_ids, max_biased, vocab_size = 4, 4, 64

  def __init__(
    self,
    *,
    slots=4,
    max_length=48,
    prefill_rows=2,
    prefill_chunk=4,
    burst=3,
    window=0,
    drafts=False,
    on_call: Callable = lambda name, argument: None,
    sample: Callable = next_token,
  ):
    self.slots, self.max_length = slots, max_length
    self.prefill_rows, self.prefill_chunk = prefill_rows, prefill_chunk
    self.burst, self.window, self.on_call = burst, window, on_call
    self.drafts, self.sample = drafts, sample
    self.calls = []
    self.violations = []
    # Tokens whose presence makes logits not finite.
    self.poison: set[int] = set()

  def _demand(self, right, what):
    if not right:
      self.violations.append(what)
      raise AssertionError(what)

  def _taken(self, state, name, argument):
    self._demand(not state.donated, f"{name}: the state was donated")
    state.donated = True
    self.calls.append((name, argument))
    self.on_call(name, argument)
    return _State(state.rows)

  def of(self, name):
    return [argument for call, argument in self.calls if call == name]

  def init_decode_state(self):
    self.calls.append(("init", None))
    self.on_call("init", None)
    return _State([_Row() for _ in range(self.slots)])

  def check_placed(self, params):
    if not isinstance(params, Params):
      raise ValueError(f"weights are {params!r}")

  def clear(self, state, slot):
    state = self._taken(state, "clear", slot)
    state.rows[slot] = _Row()
    return state

  def reusable(self, held, wanted):
    assert 0 <= wanted <= held
    if held == wanted:
      return wanted
    kept = max(wanted - self.drafts, 0)
    # The ring has room for a window and a chunk.
    forgotten = held - (self.window + self.prefill_chunk)
    lost = self.window and max(0, kept - self.window) < forgotten
    return 0 if lost else kept

  def _write(self, row, token, version):
    at = len(row.full)
    self._demand(at < self.max_length, "a slot is full")
    if self.window:
      for position in range(max(0, at - self.window), at):
        index = position % (self.window + self.prefill_chunk)
        known = row.ring.get(index)
        expected = (position, *row.full[position])
        self._demand(known == expected, f"forgotten: {known}, not {expected}")
      index = at % (self.window + self.prefill_chunk)
      row.ring[index] = (at, token, version)
    prefix = (*(t for t, _ in row.full), token)
    if row.hidden_at == at:
      row.pairs[at] = prefix
    elif self.drafts and at:
      self._demand(row.pairs.get(at) == prefix, "no pair for drafts")
    row.full.append((token, version))
    row.hidden_at = len(row.full)

  def extend(self, params, state, rows):
    state = self._taken(state, "extend", dict(rows))
    self._demand(1 <= len(rows) <= self.prefill_rows, "rows")
    for slot, (stay, ids) in rows.items():
      row = state.rows[slot]
      self._demand(row.sampling is None, "a sampling slot is extended")
      self._demand(1 <= len(ids) <= self.prefill_chunk, "chunk")
      self._demand(0 <= stay <= len(row.full), "more stays than is there")
      del row.full[stay:]
      for token in ids:
        self._write(row, int(token), params.version)
    return state

  def start(self, state, slot, sampling, sampled=0):
    state = self._taken(state, "start", slot)
    row = state.rows[slot]
    self._demand(row.hidden_at == len(row.full) > 0, "no hidden state")
    row.sampling, row.sampled, row.ended = sampling, sampled, False
    return state

  def free_resource(self, slot, state):
    state = self._taken(state, "free", slot)
    state.rows[slot].sampling, state.rows[slot].ended = None, True
    return state

  def copy_prefix(self, state, source, target, length):
    state = self._taken(state, "copy", (source, target, length))
    a, b = state.rows[source], state.rows[target]
    self._demand(source != target and b.sampling is None, "target of a copy")
    self._demand(0 < length <= len(a.full), "more is copied than is there")
    b.full, b.ring, b.pairs = a.full[:length], dict(a.ring), dict(a.pairs)
    b.hidden_at = length if length == a.hidden_at else -1
    return state

  def generate(self, params, state, slots):
    state = self._taken(state, "generate", list(slots))
    shape = (self.slots, self.burst)
    out = types.SimpleNamespace(
      tokens=np.zeros(shape, np.int32),
      log_prob=np.zeros(shape, np.float32),
      sampled_logp=np.zeros(shape, np.float32),
      experts=np.zeros((*shape, 2, 2), np.int32),
      lengths=np.zeros(self.slots, np.int32),
      active=np.zeros(self.slots, bool),
      stopped=np.zeros(self.slots, bool),
      finite=np.ones(self.slots, bool),
    )
    self._demand(len(slots) > 0, "nothing to generate")
    for slot in slots:
      self._burst(params, state.rows[slot], slot, out)
    return state, out

  def _burst(self, params, row, slot, out):
    self._demand(not row.ended, "a slot that doesn't sample")
    sampling = row.sampling
    out.finite[slot] = not self.poison & {t for t, _ in row.full}
    # As with drafts: one to `burst` tokens.
    length = 1 + len(row.full) % self.burst
    for i in range(length):
      prefix = [t for t, _ in row.full]
      token = self.sample(params.version, prefix, sampling.seed, row.sampled)
      out.log_prob[slot, i] = -min(v for _, v in row.full)
      out.sampled_logp[slot, i] = -max(v for _, v in row.full)
      out.experts[slot, i] = token
      out.tokens[slot, i] = token
      self._write(row, token, params.version)
      row.sampled += 1
      out.lengths[slot] += 1
      out.stopped[slot] = token in sampling.stop_ids
      row.ended = bool(out.stopped[slot] or row.sampled >= sampling.max_tokens)
      if row.ended:
        row.sampling = None
        break
    out.active[slot] = not row.ended
