"""The learner's side: each policy version goes to a folder or bucket."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from arl_jax.checkpoints.failure import errno_of
from arl_jax.checkpoints.first_process import from_first
from arl_jax.weights import manifest, shards, version_files
from arl_jax.weights.collection import Collector
from arl_jax.weights.config import WeightsConfig
from arl_jax.weights.manifest import Version
from arl_jax.weights.owner import Owner
from arl_jax.weights.readers import Readers
from arl_jax.weights.storage import Place, Storage
from arl_jax.weights.together import Together
from arl_jax.weights.version_files import Content

# Larger boxes are cut, so that threads share the work and readers with other
# meshes read little that they don't need.
PIECE_BYTES = 32 << 20
# Selection biases move by steps that bfloat16 can't hold.
_NEVER_ROUNDED = "choice_bias"
# A slow bucket must not fail a run.
_TIMEOUT_S = 3600.0


class Publisher:
  """Publishes the versions of one run.

  A version is whole (a base) or a difference from the one before. It exists
  from the moment its manifest does, which is written last; a publication that
  fails leaves earlier ones as they are, and the next one is a base. One run at
  a time publishes to a folder. All processes of a `jax.distributed` job call
  each method together, and each writes what lies on its own devices.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    lineage: Sequence[str],
    *,
    base_every: int = 25,
    quota_bytes: int | None = None,
    dtype: str | None = "bfloat16",
    piece_bytes: int = PIECE_BYTES,
    lease_s: float = 30.0,
  ):
    """Claims the folder, which is created if needed.

    Args:
      folder: local, or gs:// or s3://; all processes see it.
      lineage: ids of the runs that led to this one, oldest first, its own last
        (`CheckpointStore.lineage`). It takes over from each of them at once.
      base_every: publications from one base to the next.
      quota_bytes: that all versions may take, None for no limit.
      dtype: that floating-point leaves are rounded to, to nearest and ties to
        even; None publishes them in their own. Selection biases of routers are
        never rounded.
      piece_bytes: that a tensor's boxes have about, at most.
      lease_s: seconds without a sign of life after which another run may take
        over. A run that finds one which hasn't closed waits that long.

    Raises:
      ValueError: an argument that can't be.
      OSError: another run publishes there (EBUSY), or the storage's own.
    """
    for name, value in (
      ("base_every", base_every),
      ("quota_bytes", quota_bytes),
      ("piece_bytes", piece_bytes),
    ):
      if value is not None and value < 1:
        raise ValueError(f"{name} is {value}, must be at least 1")
    if not 0 < lease_s < float("inf"):
      raise ValueError(f"lease_s is {lease_s}, not a number of seconds > 0")
    if dtype is not None and not jnp.issubdtype(
      manifest.dtype(dtype), jnp.floating
    ):
      raise ValueError(f"dtype is {dtype!r}, no floating-point one")
    if not lineage:
      raise ValueError("lineage is empty, must end with an id of this run")
    self._lineage = [manifest.check_lineage(x) for x in lineage]
    self._base_every, self._piece_bytes = base_every, piece_bytes
    self._dtype = dtype
    self._process, self._processes = jax.process_index(), jax.process_count()
    self._storage = Storage(folder)
    self._readers = Readers(self._storage)
    self._collector = Collector(self._storage, self._readers, quota_bytes)
    # Of the last version, and of what it is made from, the base first.
    self._last: Content | None = None
    self._chain: list[Place] = []
    self._number = -1
    self._attempts = 0
    self._base_wanted = False
    self._owner: Owner | None = None
    self._term = from_first(lambda: self._open(lease_s))
    self._background = ThreadPoolExecutor(1, "weights")
    self._workers = ThreadPoolExecutor(
      min(16, os.cpu_count() or 1), "weights-worker"
    )
    self._writing: tuple[int, Future[None]] | None = None

  def _open(self, lease_s: float) -> int:
    self._owner = Owner(
      self._storage, self._lineage, lease_s, at_beat=self._look_at_readers
    )
    self._collector.sweep(self._owner.term)
    return self._owner.term

  @property
  def newest(self) -> Version | None:
    """What was published last by this run, None before that."""
    return None if self._last is None else self._last.version

  def publish(self, params: Any, number: int) -> None:
    """Takes a copy and publishes it in the background.

    Args:
      params: a pytree of arrays; it may be donated afterwards.
      number: policy version, above those that this run published.

    Raises:
      ValueError: a number or leaf that can't be published.
      OSError: the publication before failed, such as on a full disk, beyond
        the quota, or (ESTALE) as another run has taken over. This one isn't
        begun then.
    """
    if number <= self._number or not 0 <= number < 10**10:
      raise ValueError(
        f"number is {number}, must be at least {self._number + 1} and below"
        " 10^10"
      )
    for name, leaf in shards.named(params).items():
      try:
        manifest.dtype(str(leaf.dtype))
      except (AttributeError, ValueError) as error:
        raise ValueError(f"{name} can't be published: {error}") from error
    self.wait()
    base = from_first(self._is_base)
    copies = shards.copies(params, self._dtype, _NEVER_ROUNDED)
    self._attempts += 1
    self._number = number
    job = self._background.submit(self._publish, copies, number, base)
    self._writing = number, job

  def wait(self) -> Version | None:
    """Returns when nothing is being published any more.

    Returns:
      What was published last, None if nothing was, or if that failed.

    Raises:
      OSError: what was being published could not be.
    """
    if self._writing is None:
      return self.newest
    number, job = self._writing
    error = job.exception()
    self._writing = None
    if error is not None:
      self._last = None
      raise OSError(
        errno_of(error),
        f"can't publish version {number} to {self._storage.path}:"
        f" {_reason(error)}",
      ) from error
    return self.newest

  def close(self) -> None:
    """Waits, and lets another run publish. Raises OSError as `wait` does."""
    try:
      self.wait()
    finally:
      self._background.shutdown()
      self._workers.shutdown()
      if self._owner is not None:
        self._owner.release()

  def _is_base(self) -> bool:
    """Whether the next version doesn't build on the last."""
    wanted, self._base_wanted = self._base_wanted, False
    return self._last is None or wanted or len(self._chain) >= self._base_every

  def _look_at_readers(self) -> None:
    """Whether one of them can't get along the newest chain."""
    chain = [*map(str, self._chain)]
    if any(note.damaged in chain for note in self._readers.notes()):
      self._base_wanted = True

  def _publish(
    self, copies: dict[str, jax.Array], number: int, base: bool
  ) -> None:
    """In the background; raises whatever goes wrong."""
    place = Place(self._term, number)
    together = Together(
      self._storage,
      self._storage.version(place),
      process=self._process,
      processes=self._processes,
      attempt=self._attempts,
      timeout_s=_TIMEOUT_S,
    )
    try:
      self._write(copies, place, base, together)
    except BaseException as error:
      self._give_up(place, together, error)
      raise

  def _write(
    self,
    copies: dict[str, jax.Array],
    place: Place,
    base: bool,
    together: Together,
  ) -> None:
    last = None if base else self._last
    pieces = shards.pieces(copies, self._piece_bytes)
    encode = functools.partial(version_files.encode, last=last)
    encoded = [*self._workers.map(encode, pieces)]
    described = together.gather("parts", version_files.describe(encoded))
    if self._process == 0:
      text = self._described(copies, place, last, described)
    together.follow("room")
    folder = self._storage.version(place)
    folder.mkdir(parents=True, exist_ok=True)
    for done in [
      self._workers.submit(self._storage.write_parts, folder / name, parts)
      for name, parts in version_files.buffers(encoded).items()
    ]:
      done.result()
    together.gather("files", None)
    if self._process == 0:
      assert self._owner is not None
      self._owner.check()
      self._storage.write(folder / manifest.NAME, text)
    else:
      together.await_manifest()
    version = self._storage.manifest(place).version
    self._last = Content(version, {box.key: box.words for box in encoded})
    self._chain = [place] if base else [*self._chain, place]
    if self._process == 0:
      self._collect()

  def _described(
    self,
    copies: dict[str, jax.Array],
    place: Place,
    last: Content | None,
    described: Sequence[dict[str, Any]],
  ) -> str:
    """The manifest; makes room for the version."""
    found = version_files.merge(
      place.number,
      self._lineage[-1],
      None if last is None else last.version,
      copies,
      described,
    )
    text = manifest.to_text(found)
    needed = sum(found.files.values()) + len(text)
    self._collector.make_room(place, needed, self._chain)
    return text

  def _collect(self) -> None:
    try:
      self._collector.collect(self._chain)
    except OSError:
      # The version is there; what is old goes next time.
      logging.exception("can't remove old versions in %s", self._storage.path)

  def _give_up(
    self, place: Place, together: Together, error: BaseException
  ) -> None:
    """Leaves nothing half written behind."""
    # What went wrong first is what the caller hears of.
    with contextlib.suppress(OSError):
      if self._process:
        together.fail(str(error))
      elif not self._storage.has_manifest(place):
        self._collector.remove(place)


def _reason(error: BaseException) -> str:
  if errno_of(error) == errno.ENOSPC:
    return "disk full; free some space"
  return getattr(error, "strerror", None) or str(error) or repr(error)


def open_publisher(
  config: WeightsConfig, lineage: Sequence[str]
) -> Publisher | None:
  """The publisher that a run's configuration asks for, if any."""
  if not config.folder:
    return None
  return Publisher(
    config.folder,
    lineage,
    base_every=config.base_every,
    quota_bytes=config.quota_bytes or None,
    dtype=None if config.dtype == "float32" else config.dtype,
  )
