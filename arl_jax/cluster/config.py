"""Processes of a run, and where they find each other. Imports no jax."""

import dataclasses
import math
import urllib.parse

from arl_jax.cluster.ray_config import RayConfig
from arl_jax.serving.config import is_loopback


@dataclasses.dataclass(kw_only=True, slots=True)
class ClusterConfig:
  """How many processes a run has of each role, and where they are.

  Without actors a run is one process: each step's groups are rolled out by the
  weights that the step then updates.

  Attributes:
    actors: processes that run episodes; 0 for a run in one process.
    learners: processes of the learner, each with the accelerators of one host.
    servers: replicas that sample for them.
    server_hosts: processes of each replica, each with the accelerators of one
      host. Process p of role "server" is that of host p % server_hosts of
      replica p // server_hosts.
    evaluators: processes that score versions on held-out tasks, 0 or 1.
    environment_workers: processes of each actor that environments and rewards
      run in; 0 runs them in the actor itself.
    episodes: in flight in each actor, at most.
    queue: address of the group queue, as "http://10.0.0.7:7000". Empty where
      one machine runs all roles: they get free ports then.
    replicas: addresses of the servers, separated by commas; empty likewise.
    coordinator: where the learner's first process has the others find it, as
      "10.0.0.8:7001"; empty likewise, or if there is one.
    server_coordinators: the same of each replica, separated by commas.
    host: address that a role listens on.
    token_file: holds the bearer token of queue and servers; empty asks for
      none, which only a loopback address may do.
    beat_seconds: between two signs of life of a process.
    lost_seconds: without one, after which it counts as lost: what it rolled out
      is handed out again, and it is started anew.
    stall_seconds: in which a process must get on with its work; compiling may
      take minutes.
    call_seconds: that one call of an environment or a reward may take.
    patience: seconds that one process waits for another to come (back).
    restarts: of one process, after which the run gives up.
    evaluate_every: versions from one that the evaluator scores to the next.
    ray: what processes ask for with `--engine=ray`.
  """

  actors: int = 0
  learners: int = 1
  servers: int = 1
  server_hosts: int = 1
  evaluators: int = 0
  environment_workers: int = 0
  episodes: int = 64
  queue: str = ""
  replicas: str = ""
  coordinator: str = ""
  server_coordinators: str = ""
  host: str = "127.0.0.1"
  token_file: str = ""
  beat_seconds: float = 2.0
  lost_seconds: float = 20.0
  stall_seconds: float = 900.0
  call_seconds: float = 120.0
  patience: float = 600.0
  restarts: int = 100
  evaluate_every: int = 5
  ray: RayConfig = dataclasses.field(default_factory=RayConfig)

  @property
  def replica_urls(self) -> tuple[str, ...]:
    return _listed(self.replicas)

  @property
  def replica_coordinators(self) -> tuple[str, ...]:
    return _listed(self.server_coordinators)

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    self.ray.validate()
    for name, low, high in (
      ("actors", 0, math.inf),
      ("learners", 1, math.inf),
      ("servers", 1, math.inf),
      ("server_hosts", 1, math.inf),
      ("evaluators", 0, 1),
      ("environment_workers", 0, math.inf),
      ("episodes", 1, math.inf),
      ("restarts", 0, math.inf),
      ("evaluate_every", 1, math.inf),
    ):
      value = getattr(self, name)
      if not low <= value <= high:
        wanted = f"in {low}..{high}" if high < math.inf else f">= {low}"
        raise ValueError(f"cluster.{name} is {value}, not {wanted}")
    for name in (
      *("beat_seconds", "lost_seconds", "stall_seconds"),
      *("call_seconds", "patience"),
    ):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f"cluster.{name} is {getattr(self, name)}, not a number of seconds"
          " > 0"
        )
    if not self.lost_seconds > 2 * self.beat_seconds:
      raise ValueError(
        f"cluster.lost_seconds is {self.lost_seconds}; with a sign of life"
        f" every cluster.beat_seconds {self.beat_seconds} it must be above"
        f" {2 * self.beat_seconds}"
      )
    for name, url in (
      ("queue", self.queue),
      *(("replicas", url) for url in self.replica_urls),
    ):
      if url and not _is_address(url):
        raise ValueError(
          f"cluster.{name} has {url!r}; an address is like http://10.0.0.7:7000"
        )
    self._validate_coordinators()
    if not self.token_file and not is_loopback(self.host):
      raise ValueError(
        f"cluster.host is {self.host!r}, which others can reach; set"
        " cluster.token_file, so that not everybody may use queue and servers"
      )

  def _validate_coordinators(self) -> None:
    for name in ("learners", "server_hosts"):
      if getattr(self, name) > 1 and not self.actors:
        raise ValueError(
          f"cluster.{name} is {getattr(self, name)}, but without"
          " cluster.actors a run is one process; it must be 1"
        )
    given, urls = self.replica_coordinators, self.replica_urls
    if given and len(given) != self.servers:
      raise ValueError(
        f"cluster.server_coordinators has {len(given)} addresses for"
        f" cluster.servers {self.servers}; give one for each, or none"
      )
    taken = {urllib.parse.urlsplit(url).netloc: "replicas" for url in urls}
    taken[urllib.parse.urlsplit(self.queue).netloc] = "queue"
    for name, address in (
      ("coordinator", self.coordinator),
      *(("server_coordinators", address) for address in given),
    ):
      if not address:
        continue
      if not _is_host_and_port(address):
        raise ValueError(
          f"cluster.{name} has {address!r}, not like 10.0.0.8:7001"
        )
      if address in taken:
        raise ValueError(
          f"cluster.{name} has {address!r}, which is that of"
          f" cluster.{taken[address]}, too; each needs a port of its own"
        )
      taken[address] = name


def _listed(text: str) -> tuple[str, ...]:
  return tuple(part.strip() for part in text.split(",") if part.strip())


def _is_host_and_port(address: str) -> bool:
  try:
    url = urllib.parse.urlsplit(f"//{address}")
    return bool(url.hostname and url.port and url.netloc == address)
  except ValueError:
    return False


def _is_address(url: str) -> bool:
  try:
    parts = urllib.parse.urlsplit(url)
    port = parts.port
  except ValueError:
    return False
  known = parts.scheme in ("http", "https")
  return known and bool(parts.hostname) and port != 0
