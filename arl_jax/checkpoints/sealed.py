"""JSON values in a text that shows any damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from arl_jax.checkpoints.failure import DamagedError, ForeignError


def seal(marker: str, body: Mapping[str, Any]) -> str:
  """A text that says by its marker whose it is, and by a checksum what.

  Args:
    marker: names kind and program.
    body: JSON values.
  """
  text = json.dumps(body)
  return json.dumps(
    {
      marker: json.loads(text),
      "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
  )


def unseal(marker: str, name: str, text: str) -> dict[str, Any]:
  """The body of a sealed text.

  Args:
    marker: as sealed.
    name: of the file, for messages.
    text: of the file.

  Raises:
    DamagedError: it isn't as it was written.
    ForeignError: another program wrote it.
  """
  try:
    found = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise DamagedError(f"its file {name} can't be read: {error}") from error
  fields = found if isinstance(found, dict) else {}
  if not {marker, "sha256"} & fields.keys():
    raise ForeignError(
      f"its file {name} has no field {marker!r}, so it wasn't written by this"
      " program"
    )
  # Byte by byte: a space turned into a tab is damage as well.
  if marker not in fields or text != seal(marker, fields[marker]):
    raise DamagedError(f"its file {name} has other bytes than were written")
  return fields[marker]
