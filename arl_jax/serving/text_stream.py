"""Text of tokens as they come, never half a character or half a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

# A tokenizer says this for bytes that aren't, or not yet, a character.
_NO_CHARACTER = "\ufffd"
# Tokens that stay as context of the next ones, and that are looked at again at
# most: reading all of them each time would take quadratic time.
_KEPT, _LONGEST = 16, 256
# Of a character, at most; each can be a token.
_BYTES = 4


class TextStream:
  """Text of one request.

  What all calls return, put together, is what `decode` says of all tokens, cut
  where the first stop string begins.
  """

  def __init__(
    self,
    decode: Callable[[list[int]], str],
    stop_strings: Sequence[str] = (),
  ):
    self._decode, self._cut = decode, StopCut(stop_strings)
    self._ids: list[int] = []
    # Tokens up to `_shown` were turned into text; reading begins at `_first`.
    self._first = self._shown = 0

  def feed(self, ids: Iterable[int], *, last: bool = False) -> str:
    """The text that can be said now.

    Args:
      ids: new tokens.
      last: no more will come.
    """
    self._ids += [int(i) for i in ids]
    before = self._decode(self._ids[self._first : self._shown])
    now = self._decode(self._ids[self._first :])
    waits = len(self._ids) - self._shown < _LONGEST and not last
    if now.endswith(_NO_CHARACTER) and waits:
      return ""
    self._shown = len(self._ids)
    self._first = self._next_first(now)
    return self._cut.feed(now[len(before) :], last=last)

  def _next_first(self, now: str) -> int:
    """Where reading can begin: amid a character's bytes all may read wrong."""
    kept = self._shown - _KEPT
    for first in range(max(kept, self._first + 1), kept + _BYTES):
      tail = self._decode(self._ids[first:])
      if tail and now.endswith(tail):
        return first
    return self._first if self._shown - self._first < _LONGEST else kept


class StopCut:
  """Text up to where the first of some texts begins."""

  def __init__(self, stop_strings: Sequence[str]):
    self._stops = tuple(stop_strings)
    self._held = ""
    self._ended = False

  def feed(self, text: str, *, last: bool = False) -> str:
    """What can be said now: nothing that may begin a stop string."""
    if self._ended:
      return ""
    self._held += text
    found = [i for s in self._stops if (i := self._held.find(s)) >= 0]
    if found:
      self._ended = True
      return self._held[: min(found)]
    keep = 0 if last else self._begun()
    cut = len(self._held) - keep
    said, self._held = self._held[:cut], self._held[cut:]
    return said

  def _begun(self) -> int:
    """Characters at the end that may be the beginning of a stop string."""
    longest = max(map(len, self._stops), default=1) - 1
    for n in range(min(longest, len(self._held)), 0, -1):
      if any(s.startswith(self._held[-n:]) for s in self._stops):
        return n
    return 0
