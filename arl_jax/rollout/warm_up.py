"""Every program of an engine compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.request import Sampling

if TYPE_CHECKING:
  from arl_jax.rollout.slot_engine import SlotEngine


def warm_up(engine: SlotEngine, params: Any) -> None:
  """Calls each program of the methods on slots, with tokens of no request.

  Args:
    engine: whose.
    params: from `SlotEngine.place`.
  """
  state = engine.init_decode_state()
  shapes = {
    engine.prefill_shape(rows, tokens, engine.slots)
    for rows in (1, engine.prefill_rows)
    for tokens in (1, engine.prefill_chunk)
  }
  spans = {engine.span(n) for n in range(1, engine.max_length + 1)}
  for span in sorted(spans):
    for rows, tokens in sorted(shapes):
      if tokens <= span:
        row = (span - tokens, [0] * tokens)
        state = engine.extend(params, state, dict.fromkeys(range(rows), row))
    for k in range(engine.config.draft_tokens + 1):
      state = _generated(engine, params, state, span, k)
  if engine.slots > 1:
    state = engine.copy_prefix(state, 0, 1, 1)
  engine.clear(state, 0)


def _generated(
  engine: SlotEngine, params: Any, state: DecodeState, span: int, k: int
) -> DecodeState:
  """Runs one generate program twice: to compile it, and for its cost."""
  steps = engine.config.decode_steps
  stay = max(0, min(span, engine.max_length) - steps * (k + 1) - 1)
  for _ in range(2):
    state = engine.extend(params, state, {0: (stay, [0])})
    state = engine.start(state, 0, Sampling(max_tokens=engine.max_length))
    state, _result = engine.burst(params, state, [0], steps=steps, k=k)
    state = engine.free_resource(0, state)
  return state
