"""Texts cut into chunks of a bounded number of tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

# Coarse to fine; each ends a piece, whose separator stays with it.
_BOUNDARIES = tuple(
  re.compile(p) for p in (r"\n[ \t]*\n\s*", r"(?<=[.!?;:])\s+|\n\s*", r"\s+")
)
_LETTER = re.compile(r"[^\W_]")


def cut(
  text: str,
  count_tokens: Callable[[str], int],
  max_tokens: int,
  tolerance: int = 0,
) -> Iterator[str]:
  """Consecutive parts of a text, of at most `max_tokens` tokens.

  Cuts fall between paragraphs, in a longer paragraph between sentences or
  lines, then between words, and only then within a word. Neighbours are merged
  while they fit. A last part of at most `tolerance` tokens would say little
  alone: it joins the one before it where both have at most `max_tokens +
  tolerance`.

  Args:
    text: of a document.
    count_tokens: tokens of a text.
    max_tokens: of a part, at least 1.
    tolerance: by which the last part may be longer, at least 0.

  Raises:
    ValueError: a single character has more than `max_tokens`.
  """
  before: list[str] = []
  held: list[str] = []
  total = 0
  for piece, tokens in _pieces(text, count_tokens, max_tokens, level=0):
    if held and total + tokens > max_tokens:
      yield from _checked(before, count_tokens, max_tokens)
      before, held, total = held, [], 0
    held.append(piece)
    total += tokens
  if before and tolerance and total <= tolerance:
    joined = _tidy("".join(before + held))
    if count_tokens(joined) <= max_tokens + tolerance:
      yield joined
      return
  yield from _checked(before, count_tokens, max_tokens)
  yield from _checked(held, count_tokens, max_tokens)


def has_words(text: str) -> bool:
  """Whether there is a letter or digit; rules and ornaments have none."""
  return _LETTER.search(text) is not None


def quarter_of_bytes(text: str) -> int:
  """Tokens of a text by a rule of thumb: a quarter of its bytes in UTF-8.

  English takes about that with the tokenizers of language models; so do
  languages with letters of three bytes.
  """
  return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking:
  """How documents are cut.

  Attributes:
    max_tokens: of a chunk.
    tolerance: by which a document's last chunk may be longer.
    count_tokens: tokens of a text.
    counter: what says which function that is, in the index.
    shard_chunks: of a shard, beside what its last document adds.
  """

  max_tokens: int = 512
  tolerance: int = 100
  count_tokens: Callable[[str], int] = quarter_of_bytes
  counter: str = "bytes/4"
  shard_chunks: int = 4096

  def __post_init__(self) -> None:
    for name, least in (
      ("max_tokens", 16),
      ("tolerance", 0),
      ("shard_chunks", 1),
    ):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} is {getattr(self, name)}, not at least {least}"
        )


def _checked(
  pieces: Sequence[str], count_tokens: Callable[[str], int], max_tokens: int
) -> Iterator[str]:
  # A tokenizer may count more for a whole than for its parts.
  start = 0
  while start < len(pieces):
    end = len(pieces)
    text = _tidy("".join(pieces[start:end]))
    while end > start + 1 and count_tokens(text) > max_tokens:
      end -= 1
      text = _tidy("".join(pieces[start:end]))
    yield text
    start = end


def _pieces(
  text: str, count_tokens: Callable[[str], int], max_tokens: int, level: int
) -> Iterator[tuple[str, int]]:
  """Consecutive parts of `text`, each with its at most `max_tokens` tokens."""
  tidy = _tidy(text)
  if not tidy:
    return
  # Nothing short of a document is worth counting whole.
  if level > 0 or len(tidy) <= 8 * max_tokens:
    tokens = count_tokens(tidy)
    if tokens <= max_tokens:
      yield text, tokens
      return
  if level < len(_BOUNDARIES):
    for part in _split_after(_BOUNDARIES[level], text):
      yield from _pieces(part, count_tokens, max_tokens, level + 1)
    return
  if len(tidy) == 1:
    raise ValueError(
      f"max_tokens is {max_tokens}, but the character {tidy!r} alone has"
      f" {tokens}; allow at least that"
    )
  middle = len(tidy) // 2
  for part in (tidy[:middle], tidy[middle:]):
    yield from _pieces(part, count_tokens, max_tokens, level)


def _split_after(boundary: re.Pattern[str], text: str) -> Iterator[str]:
  start = 0
  for match in boundary.finditer(text):
    if match.end() > start:
      yield text[start : match.end()]
      start = match.end()
  if start < len(text):
    yield text[start:]


def _tidy(text: str) -> str:
  lines = [line.rstrip() for line in text.strip().splitlines()]
  return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
