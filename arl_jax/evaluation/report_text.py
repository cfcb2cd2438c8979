"""Text and numbers as they stand in a report."""

from __future__ import annotations

import html
import math
from typing import Any


def escape(text: str) -> str:
  """Text for HTML; control characters, which it forbids, made visible."""
  shown = "".join(
    chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text
  )
  return html.escape(shown.replace("\x7f", "\u2421"), quote=True)


def number(value: Any) -> str:
  """Three digits or so; a dash for what is no finite number."""
  if not isinstance(value, (int, float)) or not math.isfinite(value):
    return "–"
  if value and not 1e-3 <= abs(value) < 1e5:
    return f"{value:.3g}"
  return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
