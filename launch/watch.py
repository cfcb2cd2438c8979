"""Shows a run while it goes on.

python -m launch.watch RUN_DIR
python -m launch.watch RUN_DIR --queue=http://10.0.0.7:7000 --once
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.live import Live

from arl_jax.evaluation import scores
from arl_jax.observability.live import View, planned
from arl_jax.observability.metrics_tail import MetricsTail
from arl_jax.observability.queue_probe import ask
from arl_jax.serving.config import read_token

_QUEUE = flags.DEFINE_string(
  "queue", None, "Address of the run's queue; by default as it's configured."
)
_TOKEN_FILE = flags.DEFINE_string(
  "token_file", None, "Holds the queue's token; by default as configured."
)
_ONCE = flags.DEFINE_bool("once", False, "Print one frame and end.")
_SECONDS = flags.DEFINE_float(
  "seconds", 2.0, "Between two looks.", lower_bound=0.1
)


class Watch:
  """Looks at a run's folder, and asks its queue if there is one."""

  def __init__(self, run_dir: str):
    """Raises ValueError or OSError if the folder or the token can't be used."""
    self._path = pathlib.Path(run_dir)
    if not self._path.is_dir():
      raise ValueError(f"{run_dir} is no folder; name that of a run")
    config = _config(self._path)
    cluster = config.get("cluster")
    cluster = cluster if isinstance(cluster, Mapping) else {}
    self._url = _QUEUE.value or str(cluster.get("queue") or "")
    token_file = _TOKEN_FILE.value or str(cluster.get("token_file") or "")
    self._token = read_token(token_file) if self._url else ""
    self._tail = MetricsTail(self._path / "metrics.jsonl")
    self.view = View(self._path.resolve().name, planned(config))

  def look(self) -> None:
    """Takes in what is new. Raises OSError or ValueError for a bad file."""
    news = self._tail.read()
    self.view.add(news.lines, anew=news.anew)
    path = scores.path_of(self._path)
    found = scores.valid(scores.read(path)) if path.is_file() else []
    if found and "reward" in found[-1].scores:
      self.view.score(found[-1].version, found[-1].scores["reward"])
    if self._url:
      try:
        status, roles = (
          ask(self._url, path, token=self._token)
          for path in ("/status", "/roles")
        )
        self.view.queue(status, roles)
      except OSError as error:
        self.view.queue(None, None, str(error))


def _config(path: pathlib.Path) -> Mapping[str, Any]:
  """The run's configuration; nothing while it can't be read."""
  try:
    config = json.loads((path / "config.json").read_text("utf-8"))["config"]
  except (OSError, ValueError, KeyError, TypeError):
    return {}
  return config if isinstance(config, Mapping) else {}


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2:
    print("error: give one run directory, as RUN_DIR", file=sys.stderr)
    sys.exit(2)
  console = Console()
  try:
    watch = Watch(argv[1])
    watch.look()
    if _ONCE.value:
      console.print(watch.view.frame())
      return
    with Live(watch.view.frame(), console=console) as live:
      while True:
        time.sleep(_SECONDS.value)
        watch.look()
        live.update(watch.view.frame(), refresh=True)
  except KeyboardInterrupt:
    return
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
