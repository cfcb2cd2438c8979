"""Groups in files, one a step: what a run recorded. Imports no jax."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

from arl_jax.observability.run_directory import write_atomically
from arl_jax.records import from_json, to_json
from arl_jax.types import Group


def write(
  run_dir: str | os.PathLike[str], step: int, groups: Iterable[Group]
) -> None:
  """Writes a step's groups to `groups/<step>.jsonl`, in place of others.

  Raises:
    OSError: they can't be written.
  """
  folder = pathlib.Path(run_dir) / "groups"
  folder.mkdir(parents=True, exist_ok=True)
  lines = (json.dumps(to_json(group)) + "\n" for group in groups)
  write_atomically(folder / f"{step:06d}.jsonl", "".join(lines))


class RecordedGroups:
  """Reads what `write` has written.

  Attributes:
    steps: in order; at least one.
  """

  def __init__(self, run_dir: str | os.PathLike[str], name: str):
    """Looks for files; reads none yet.

    Args:
      run_dir: of a run with `rl.record_groups`.
      name: of the field or flag that gives it, for errors.

    Raises:
      ValueError: it holds none.
    """
    folder = pathlib.Path(run_dir) / "groups"
    self._paths = {
      int(p.stem): p for p in folder.glob("*.jsonl") if p.stem.isdecimal()
    }
    self.steps = sorted(self._paths)
    if not self.steps:
      raise ValueError(
        f"{name} is {str(run_dir)!r}, but {folder} holds no recorded groups;"
        " record some with --config.rl.record_groups"
      )

  def read(self, step: int) -> tuple[Group, ...]:
    """A step's groups, scored; none if it has no file.

    Raises:
      ValueError: the file holds something else.
      OSError: it can't be read.
    """
    path = self._paths.get(step)
    lines = [] if path is None else path.read_bytes().splitlines()
    return tuple(_group(path, line) for line in lines)


def _group(path: pathlib.Path | None, line: bytes) -> Group:
  try:
    group = from_json(json.loads(line))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} holds what is no group: {error}") from error
  if not isinstance(group, Group):
    raise ValueError(f"{path} holds what is no group")
  if not all(e.reward is not None for e in group.episodes):
    raise ValueError(f"{path} holds group {group.group_id} without rewards")
  return group
