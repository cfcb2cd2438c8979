"""What each process of a run is started with, for launchers of jobs."""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple

from arl_jax.cluster.local_processes import assign_addresses
from arl_jax.cluster.supervisor import processes_of
from arl_jax.runtime.config import Config, explain_field
from arl_jax.serving.config import is_loopback

_ROLES = ("queue", "learner", "server", "actor", "evaluator")
# Of queue and servers, and of coordinators, that have a machine each.
_PORT, _COORDINATOR_PORT = 7000, 7001


class Run(NamedTuple):
  """A work unit: the flags of its processes, and what they make together."""

  flags: list[str]
  config: Config


def sweep(texts: list[str], config: Config, given: list[str]) -> list[Run]:
  """The runs of a product of values, each in a folder of its own.

  Args:
    texts: like "config.seed=1,2".
    config: of all runs, not resolved.
    given: flags that made it.

  Raises:
    ValueError: a part that can't be.
  """
  axes = [_axis(text) for text in texts]
  points = list(itertools.product(*axes))
  runs = []
  for number, point in enumerate(points, 1):
    made, more = copy.deepcopy(config), []
    if len(points) > 1:
      folder = f"{config.run_dir}-{number}"
      point = (*point, ("run_dir", folder))
    for field, value in point:
      _set(made, field, value)
      more.append(f"--config.{field}={value}")
    made.resolve()
    runs.append(Run([*given, *more], made))
  return runs


def _axis(text: str) -> list[tuple[str, str]]:
  """A field with each of its values."""
  name, _, values = text.lstrip("-").partition("=")
  kind, _, field = name.partition(".")
  parts = values.split(",")
  if kind != "config" or not field or not all(parts):
    raise ValueError(
      f"--sweep={text} isn't like config.rl.optimizer.learning_rate=1e-3,1e-4"
    )
  if len({*parts}) < len(parts):
    raise ValueError(f"--sweep={text} has a value twice")
  return [(field, part) for part in parts]


def _set(config: Config, field: str, text: str) -> None:
  """Sets a field as its flag would."""
  if reason := explain_field(config, field):
    raise ValueError(f"--sweep=config.{field}: {reason}")
  *path, last = field.split(".")
  owner: object = config
  for name in path:
    owner = getattr(owner, name)
  kind = type(getattr(owner, last))
  try:
    if kind is bool:
      value: object = {"true": True, "false": False}[text.lower()]
    elif kind in (int, float, str):
      value = kind(text)
    else:
      raise ValueError(f"it is a {kind.__name__}")
  except (KeyError, ValueError) as error:
    raise ValueError(
      f"--sweep=config.{field}={text} is no {kind.__name__}; what can be swept"
      " are numbers, words, true and false"
    ) from error
  setattr(owner, last, value)


def jobs(
  run: Run, *, domain: str = "", resume: bool = False
) -> dict[str, list[str]]:
  """Arguments of Python by job, such as "actor_0".

  Args:
    run: whose.
    domain: like "7-1-{}.experiments", which a process's name, as "queue-0",
      makes the address of its pod; without one, all have ports of this machine.
    resume: the learner goes on with the run in its folder.

  Raises:
    ValueError: a pod would listen where others can't reach it.
  """
  cluster, more = run.config.cluster, ["--resume"] if resume else []
  if not cluster.actors:
    return {"learner_0": ["-m", "launch.train", *run.flags, *more]}
  if domain:
    if is_loopback(cluster.host):
      raise ValueError(
        f"cluster.host is {cluster.host!r}; pods reach each other with"
        " --config.cluster.host=0.0.0.0 and a --config.cluster.token_file"
      )
    hosts = cluster.server_hosts
    firsts = [f"server-{i * hosts}" for i in range(cluster.servers)]
    urls = [
      f"http://{domain.format(name)}:{_PORT}" for name in ("queue-0", *firsts)
    ]
    cluster.queue, cluster.replicas = urls[0], ",".join(urls[1:])
    if cluster.learners > 1:
      first = domain.format("learner-0")
      cluster.coordinator = f"{first}:{_COORDINATOR_PORT}"
    if hosts > 1:
      cluster.server_coordinators = ",".join(
        f"{domain.format(name)}:{_COORDINATOR_PORT}" for name in firsts
      )
  else:
    assign_addresses(cluster)
  shared = [
    *("-m", "launch.train", *run.flags),
    f"--config.cluster.queue={cluster.queue}",
    f"--config.cluster.replicas={cluster.replicas}",
  ]
  if cluster.learners > 1:
    shared.append(f"--config.cluster.coordinator={cluster.coordinator}")
  if cluster.server_hosts > 1:
    coordinators = cluster.server_coordinators
    shared.append(f"--config.cluster.server_coordinators={coordinators}")
  return {
    f"{role}_{index}": [
      *(*shared, f"--role={role}", f"--index={index}"),
      *(more if role == "learner" else ()),
    ]
    for role, index in processes_of(cluster)
  }


def requirements(texts: list[str]) -> dict[str, dict[str, str]]:
  """By role, resources with their amounts, from "learner:H100=8,CPU=64".

  Raises:
    ValueError: a part that can't be.
  """
  found: dict[str, dict[str, str]] = {}
  for text in texts:
    role, _, rest = text.partition(":")
    parts = [part.partition("=") for part in rest.split(",")]
    if role not in _ROLES or (
      not all(name and value for name, _, value in parts)
    ):
      raise ValueError(
        f"--requirements={text} isn't like learner:H100=8,CPU=64"
      )
    found[role] = {name: value for name, _, value in parts}
  return found
