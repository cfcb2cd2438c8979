"""One process of a run in many, as the supervisor or a cluster starts it.

python -m launch.role --role=actor --index=0 --config_json=PATH

The file holds a resolved configuration, as JSON. What a role doesn't need, such
as jax for actors, isn't imported.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import app, flags, logging

from arl_jax.actors import config as actor_config
from arl_jax.runtime.host_memory import keep_freed_memory
from launch import command


class Role(NamedTuple):
  """What a role is.

  Attributes:
    module: whose `run(config, index, should_stop)` it is.
    jax: whether it imports jax; otherwise it gets an `ActorConfig`, not all of
      the `Config`.
  """

  module: str
  jax: bool


ROLES = {
  "queue": Role("arl_jax.queueing.service", False),
  "learner": Role("launch.learner_role", True),
  "server": Role("arl_jax.runtime.server_role", True),
  "actor": Role("arl_jax.actors.role", False),
  "evaluator": Role("arl_jax.evaluation.evaluator", True),
}
# That a role gets to stop in once its supervisor is gone.
_ORPHAN_SECONDS = 20.0


def main(
  argv: list[str],
  roles: Mapping[str, Role] = ROLES,
  orphan_seconds: float = _ORPHAN_SECONDS,
) -> None:
  """Runs a role until it ends or is asked to stop.

  Args:
    argv: program and flags.
    roles: those there are.
    orphan_seconds: that it gets to stop in once its supervisor is gone.

  Raises:
    ValueError: the configuration isn't one.
    OSError: it can't be read.
  """
  given = _parser(roles).parse_args(argv[1:])
  role = roles[given.role]
  if role.jax:
    # Before any thread, as memory arenas belong to threads.
    keep_freed_memory()
  asked = command.stop_on_signals("stopping")
  orphaned = threading.Event()
  if given.supervised:
    _follow_supervisor(orphaned, orphan_seconds)
  config = read_config(given.config_json, jax=role.jax)
  # A learner's other flags say what to do with the run's folder.
  options = {
    "resume": given.resume,
    "overwrite": given.overwrite,
    "fall_back": given.fall_back,
  }
  importlib.import_module(role.module).run(
    config,
    given.index,
    lambda: asked() or orphaned.is_set(),
    **(options if given.role == "learner" else {}),
  )


def read_config(path: str, *, jax: bool) -> actor_config.ActorConfig:
  """The configuration in a file.

  Args:
    path: of JSON that `dataclasses.asdict` made.
    jax: whether all of it is needed, a `Config`, rather than an `ActorConfig`.

  Raises:
    ValueError: the file holds no configuration.
    OSError: it can't be read.
  """
  try:
    with open(path, encoding="utf-8") as file:
      data = json.load(file)
    if not isinstance(data, dict):
      raise ValueError("it is no JSON object")
    cls: Any = actor_config.ActorConfig
    if jax:
      cls = importlib.import_module("arl_jax.runtime.config").Config
    return actor_config.from_json(cls, data)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"--config_json={path} holds no run's configuration: {error}"
    ) from error


def _parser(roles: Mapping[str, Role]) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "launch.role", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("--role", required=True, choices=sorted(roles))
  parser.add_argument("--index", type=_count, default=0)
  parser.add_argument("--config_json", required=True)
  parser.add_argument(
    "--supervised",
    action="store_true",
    help="stop at the end of standard input, which a supervisor holds open",
  )
  parser.add_argument("--resume", action="store_true")
  parser.add_argument("--overwrite", action="store_true")
  parser.add_argument("--fall_back", action="store_true")
  return parser


def _count(text: str) -> int:
  if not (text.isascii() and text.isdigit()):
    raise argparse.ArgumentTypeError(f"{text!r} is no integer >= 0")
  return int(text)


def _follow_supervisor(orphaned: threading.Event, seconds: float) -> None:
  """Sets an event at the end of standard input, and later ends the process."""
  pipe = os.dup(0)
  with open(os.devnull, "rb") as nothing:
    os.dup2(nothing.fileno(), 0)

  def follow() -> None:
    with contextlib.suppress(OSError):
      while os.read(pipe, 4096):
        pass
    # Nobody else is left to end what this process has started.
    atexit.register(_end_session)
    orphaned.set()
    # The terminal may be gone with the supervisor.
    with contextlib.suppress(OSError):
      print("the supervisor is gone; stopping", file=sys.stderr, flush=True)
    time.sleep(seconds)
    with contextlib.suppress(OSError):
      print(f"not done {seconds:.0f} s later; ended", file=sys.stderr)
    _end_session()
    os._exit(1)

  threading.Thread(target=follow, name="supervisor", daemon=True).start()


def _end_session() -> None:
  """Ends this process and what it has started, if it leads a session."""
  if os.getpgrp() == os.getpid():
    os.killpg(0, signal.SIGKILL)


def run(main: Callable[[list[str]], None] = main) -> None:
  """Known errors are one line and an exit code, as with `command.run`."""
  logging.set_verbosity(logging.WARNING)

  def parse(argv: list[str]) -> list[str]:
    # These flags are no global ones: a role's module may define its own.
    flags.FLAGS(argv[:1])
    return argv

  app.run(lambda argv: command.guarded(main, argv), flags_parser=parse)


if __name__ == "__main__":
  run()
