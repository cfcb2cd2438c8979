"""What a run's processes ask of a Ray cluster. Imports neither jax nor ray."""

import dataclasses
import math
import re

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,99}")


@dataclasses.dataclass(kw_only=True, slots=True)
class RayConfig:
  """Where `--engine=ray` starts each role of a run.

  Resources of a process are like "CPU=4", "CPU=8,GPU=8" or
  "TPU=4,TPU-v6e-8-head=1": what Ray counts, how much of it. Each process is on
  one node.

  Attributes:
    address: of a cluster, as "10.0.0.7:6379" or "auto". Empty takes that in
      RAY_ADDRESS, or else starts Ray on this machine for this run.
    object_store: groups stay on the nodes of their actors until the learner
      takes them; otherwise they go through the queue's process.
    queue: resources of the queue.
    learner: of the learner.
    server: of each replica that samples.
    actor: of each process that runs episodes.
    evaluator: of the evaluator.
  """

  address: str = ""
  object_store: bool = True
  queue: str = "CPU=0"
  learner: str = "CPU=1"
  server: str = "CPU=1"
  actor: str = "CPU=1"
  evaluator: str = "CPU=1"

  def resources(self, role: str) -> dict[str, float]:
    """Of a process of a role, by their names in Ray.

    Raises:
      ValueError: names the field, and the part of it that can't be.
    """
    text, found = getattr(self, role), dict[str, float]()
    for part in filter(None, (p.strip() for p in text.split(","))):
      name, _, number = part.partition("=")
      try:
        amount = float(number)
      except ValueError:
        amount = math.nan
      # Only fractions of one device can be shared.
      whole = amount <= 1 or amount == int(amount) if amount < 1e9 else False
      if not _NAME.fullmatch(name) or name in found or not amount >= 0:
        whole = False
      if not whole:
        raise ValueError(
          f"cluster.ray.{role} has {part!r}; resources are like"
          " CPU=8,GPU=1: each once, an integer or a fraction of one"
        )
      found[name] = amount
    return found

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for role in ("queue", "learner", "server", "actor", "evaluator"):
      self.resources(role)
    if "://" in self.address:
      raise ValueError(
        f"cluster.ray.address is {self.address!r}; Ray's client protocol can't"
        " host a run: give the head's host:port, on a node of its cluster"
      )
