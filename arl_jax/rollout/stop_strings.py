"""Stop strings: texts that end a request, wherever token boundaries are."""

from collections.abc import Callable, Sequence

# A text that begins amid tokens may say its first character otherwise: a space
# can be missing, and one character can be up to four tokens.
_MARGIN = 4


class StopStrings:
  """Looks for the first of some texts in a growing row of tokens."""

  def __init__(
    self, texts: Sequence[str], detokenize: Callable[[list[int]], str]
  ):
    self._texts = tuple(texts)
    self._longest = max(map(len, texts))
    self._detokenize = detokenize

  def surplus(self, tokens: list[int], new: int) -> int | None:
    """Looks where the last `new` tokens say a stop string.

    Args:
      tokens: all that were sampled; before the new ones there is none.
      new: how many haven't been looked at.

    Returns:
      Tokens after the one that completes the first stop string, None if there
      is none.
    """
    before = len(tokens) - new
    start = self._start(tokens, before)
    if not self._said(tokens[start:]):
      return None
    ends = range(before + 1, len(tokens))
    end = next((n for n in ends if self._said(tokens[start:n])), len(tokens))
    return len(tokens) - end

  def _said(self, tokens: list[int]) -> bool:
    text = self._detokenize(tokens)
    return any(t in text for t in self._texts)

  def _start(self, tokens: list[int], before: int) -> int:
    """Where to begin to read: the whole text would take quadratic time."""
    back = self._longest
    while back + _MARGIN < before:
      text = self._detokenize(tokens[before - back : before])
      if len(text) >= self._longest:
        return before - back - _MARGIN
      back *= 2
    return 0
