"""What made a run: its configuration, data, code and environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

_PACKAGE = pathlib.Path(__file__).parents[1]
_MISSING = "(absent)"


def new_record(
  config: dict[str, Any], data: dict[str, Any] | None
) -> dict[str, Any]:
  return {
    "config": config,
    "config_digest": _digest(config),
    "data": data,
    "code": _code(),
    "environment": _environment(),
    "resumed": [],
  }


def resumed_record(
  old: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
  """`old` with the new config, and what it was before kept under "resumed"."""
  entry = {
    "config_digest": _digest(config),
    "replaced": {
      f: flat(old["config"]).get(f) for f in differences(old["config"], config)
    },
    "code": _code(),
    "environment": _environment(),
  }
  return {
    **old,
    "config": config,
    "config_digest": entry["config_digest"],
    "resumed": [*old.get("resumed", []), entry],
  }


def plain(value: Any) -> Any:
  """`value` as JSON gives it back, infinities and NaN as strings."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  return str(value)


def without_nonfinite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {k: without_nonfinite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [without_nonfinite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
  """Leaves by dotted name; an empty mapping is a leaf."""
  if not isinstance(value, Mapping) or not value:
    return {prefix: value}
  leaves: dict[str, Any] = {}
  for key, inner in value.items():
    leaves |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
  return leaves


def differences(old: Any, new: Any) -> list[str]:
  a, b = flat(old), flat(new)
  # Serialised, so that 1 and 1.0, or 1 and True, count as different.
  return [
    f
    for f in {**a, **b}
    if json.dumps(a.get(f, _MISSING)) != json.dumps(b.get(f, _MISSING))
  ]


def describe(old: Any, new: Any, fields: list[str]) -> str:
  a, b = flat(old), flat(new)
  shown = [
    f"{f} is {a.get(f, _MISSING)!r} there and {b.get(f, _MISSING)!r} here"
    for f in fields[:3]
  ]
  more = f" (and {len(fields) - 3} more)" if len(fields) > 3 else ""
  return ", ".join(shown) + more


def _digest(config: dict[str, Any]) -> str:
  text = json.dumps(config, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def _code() -> dict[str, Any]:
  digest = hashlib.sha256()
  for path in sorted(_PACKAGE.rglob("*.py")):
    digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
    digest.update(path.read_bytes() + b"\0")
  return {
    "version": _version("arl-jax"),
    "git_commit": _git_commit(),
    "source_digest": digest.hexdigest(),
  }


def _git_commit() -> str | None:
  root = _PACKAGE.parent
  # An installed copy may lie inside somebody else's repository.
  if not (root / ".git").exists():
    return None
  try:
    done = subprocess.run(
      ["git", "-C", str(root), "rev-parse", "--verify", "-q", "HEAD"],
      capture_output=True,
      text=True,
      check=True,
      timeout=10,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip() or None


def _environment() -> dict[str, str | None]:
  versions = {name: _version(name) for name in ("jax", "jaxlib", "numpy")}
  return {"python": platform.python_version(), **versions}


def _version(distribution: str) -> str | None:
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return None
