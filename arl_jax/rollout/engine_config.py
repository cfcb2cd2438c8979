"""Static shapes of a rollout engine, as data."""

import dataclasses


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineConfig:
  """Static shapes of an engine.

  Attributes:
    max_concurrent_decodes: S, slots at most; 0 takes as many as `cache_bytes`
      holds.
    cache_bytes: budget of all slots' caches; 0 sets none.
    prefill_rows: slots that one prefill call extends at most.
    prefill_chunk: tokens a slot that one prefill call appends at most.
    decode_steps: steps of one generate call at most; each samples a token a
      slot, and as many more as drafts are accepted.
    draft_tokens: tokens that the MTP module drafts in a step at most.
    draft_adaptive: fewer are drafted, or none, where that is faster.
  """

  max_concurrent_decodes: int = 64
  cache_bytes: int = 0
  prefill_rows: int = 16
  prefill_chunk: int = 32
  decode_steps: int = 8
  draft_tokens: int = 0
  draft_adaptive: bool = True

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name in _INTEGERS:
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"engine.{name} is {value!r}, not an integer")
    for name in ("prefill_rows", "prefill_chunk", "decode_steps"):
      if getattr(self, name) < 1:
        raise ValueError(f"engine.{name} is {getattr(self, name)}, not >= 1")
    for name in ("max_concurrent_decodes", "cache_bytes", "draft_tokens"):
      if getattr(self, name) < 0:
        raise ValueError(f"engine.{name} is {getattr(self, name)}, not >= 0")
    if not (self.max_concurrent_decodes or self.cache_bytes):
      raise ValueError(
        "engine.max_concurrent_decodes and engine.cache_bytes are both 0; one"
        " of them must say how many slots there are"
      )


_INTEGERS = (
  *("max_concurrent_decodes", "cache_bytes", "prefill_rows", "prefill_chunk"),
  *("decode_steps", "draft_tokens"),
)
