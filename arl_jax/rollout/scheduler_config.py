"""Limits of a scheduler."""

import dataclasses
import math


@dataclasses.dataclass(kw_only=True, slots=True)
class SchedulerConfig:
  """Limits of a scheduler.

  Attributes:
    max_waiting: requests that may wait beyond those that find a slot at once.
    timeout: seconds that a request may take if it doesn't say itself.
    prefill_patience: generate calls that may pass while a prefill waits for
      others to share its call.
  """

  max_waiting: int = 1024
  timeout: float = 3600.0
  prefill_patience: int = 2

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name in ("max_waiting", "prefill_patience"):
      if getattr(self, name) < 0:
        raise ValueError(f"scheduler.{name} is {getattr(self, name)}, not >= 0")
    if not 0 < self.timeout < math.inf:
      raise ValueError(
        f"scheduler.timeout is {self.timeout}, not a number of seconds > 0"
      )
