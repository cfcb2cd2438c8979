"""The configuration of a server; every field is a flag."""

import dataclasses
import math

from arl_jax.chat.formats import FORMATS
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.serving.config import ServingConfig
from arl_jax.sharding import MeshConfig

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(kw_only=True, slots=True)
class ServeConfig:
  """What is served, and how.

  Attributes:
    checkpoint: folder in Hugging Face layout, or .gguf file.
    tokenizer: the same of the tokenizer; empty takes the checkpoint's.
    dtype: of parameters and caches.
    max_length: tokens a slot can hold, prompt and samples.
    chat_format: one of `chat.formats.FORMATS`.
    first_version_seconds: to wait for the first published version at most.
    serve_mesh: of the devices that parameters and caches are split over; by
      default there is one.
    engine: static shapes.
    scheduler: its limits.
    serving: addresses and limits.
  """

  checkpoint: str = ""
  tokenizer: str = ""
  dtype: str = "float32"
  max_length: int = 2048
  chat_format: str = "auto"
  first_version_seconds: float = 600.0
  serve_mesh: MeshConfig = dataclasses.field(
    default_factory=lambda: MeshConfig(fsdp=1)
  )
  engine: EngineConfig = dataclasses.field(
    default_factory=lambda: EngineConfig(
      max_concurrent_decodes=16, prefill_chunk=128, prefill_rows=4
    )
  )
  scheduler: SchedulerConfig = dataclasses.field(
    default_factory=SchedulerConfig
  )
  serving: ServingConfig = dataclasses.field(default_factory=ServingConfig)

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    if not self.checkpoint:
      raise ValueError("checkpoint is empty; name a folder or a .gguf file")
    for name, values in (("dtype", DTYPES), ("chat_format", FORMATS)):
      if getattr(self, name) not in values:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}, not one of {', '.join(values)}"
        )
    if not isinstance(self.max_length, int) or self.max_length < 2:
      raise ValueError(f"max_length is {self.max_length!r}, not >= 2")
    if not 0 < self.first_version_seconds < math.inf:
      raise ValueError(
        f"first_version_seconds is {self.first_version_seconds}, not > 0"
      )
    self.serve_mesh.validate("serve_mesh")
    self.engine.validate()
    self.scheduler.validate()
    self.serving.validate()
