"""Where a run publishes its weights."""

import dataclasses

_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(kw_only=True, slots=True)
class WeightsConfig:
  """Publication of every policy version, for servers elsewhere.

  Attributes:
    folder: local, or gs:// or s3://; empty publishes nothing.
    base_every: publications from one whole version to the next; those between
      are differences. 1 makes all whole.
    quota_bytes: that all versions there may take; 0 sets no bound. Two whole
      versions must fit, as the next is written before the last goes.
    dtype: that weights are rounded to, "bfloat16" or "float16"; "float32"
      publishes them as the learner has them. Selection biases of routers are
      never rounded.
  """

  folder: str = ""
  base_every: int = 25
  quota_bytes: int = 0
  dtype: str = "bfloat16"

  def validate(self, where: str) -> None:
    """Raises ValueError naming the field below `where` that can't be."""
    if self.base_every < 1:
      raise ValueError(f"{where}.base_every is {self.base_every}, not >= 1")
    if self.quota_bytes < 0:
      raise ValueError(f"{where}.quota_bytes is {self.quota_bytes}, not >= 0")
    if self.dtype not in _DTYPES:
      raise ValueError(
        f"{where}.dtype is {self.dtype!r}, none of {', '.join(_DTYPES)}"
      )
