"""What is drawn and not trained, as a commit holds it. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.queueing.task_source import Draw, Source, TaskSource
from arl_jax.types import Group


@dataclasses.dataclass(slots=True, eq=False)
class Open:
  """A draw that isn't trained yet: due, with an actor, or ready.

  Attributes:
    draw: of its task.
    attempt: to roll it out, from 1.
    failures: of attempts, for reasons of infrastructure.
    actor: who has its lease, None if nobody.
    expires: the lease, in the clock's seconds.
    group: rolled out.
  """

  draw: Draw
  attempt: int = 1
  failures: int = 0
  actor: str | None = None
  expires: float = 0.0
  group: Group | None = None


def write(source: TaskSource, opened: Mapping[int, Open]) -> dict[str, Any]:
  """The position of a source, and the draws that are open; JSON values."""
  return {
    "source": source.state(),
    "open": [
      [n, o.draw.task_id, o.draw.epoch, o.attempt]
      for n, o in sorted(opened.items())
    ],
  }


def read(
  ledger: Mapping[str, Any], source: TaskSource, sources: Sequence[Source]
) -> dict[int, Open]:
  """Has a source go on where a ledger is; gives what is open in it.

  Raises:
    ValueError: names the field that can't be.
  """
  for name, kind in (("source", Mapping), ("open", Sequence)):
    if not isinstance(ledger.get(name), kind):
      raise ValueError(f"ledger.{name} is {ledger.get(name)!r:.80}")
  source.go_to(ledger["source"])
  task_ids = {task_id for s in sources for task_id in s.task_ids}
  opened: dict[int, Open] = {}
  for row in ledger["open"]:
    match row:
      case [int(number), str(task_id), int(epoch), int(attempt)] if (
        0 <= number < ledger["source"]["drawn"]
        and number not in opened
        and task_id in task_ids
        and epoch >= 0
        and attempt >= 1
      ):
        draw = Draw(number=number, task_id=task_id, epoch=epoch)
        opened[number] = Open(draw, attempt)
      case _:
        raise ValueError(
          f"ledger.open has {row!r:.80}, not the number, task, epoch and"
          " attempt of a draw, each draw once and each task one of the run's"
        )
  return opened
