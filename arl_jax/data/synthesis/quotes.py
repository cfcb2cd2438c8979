"""Whether a quote stands in a text: decided by code, never by a model."""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

SUBSTRING, WORDS = "substring", "words"
KINDS = ("clue", "item", "truth")

# A link keeps its text and loses its address. Each part stops at the bracket
# that could begin another, so that the time is linear.
_LINK = re.compile(r"\[([^\[\]]*)\]\([^()\s]*\)")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S*", re.IGNORECASE)
_APOSTROPHES = re.compile("['\u2018\u2019\u201a\u201b\u02bc\uff07`\u00b4]")
_NO_WORD = re.compile(r"[\W_]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuoteRules:
  """When a quote counts as found; the defaults are the published ones.

  Attributes:
    first_words: of the quote's long words, how many must be matched at most.
    letters: of a long word at least.
    fewest_words: long words that a quote needs for a match by words.
    shortest: characters of a normalised clue or item quote at least; shorter
      ones are found nowhere. Not published: without it a model could pass by
      quoting single letters.

  Raises:
    ValueError: a field is below 1, or more words are needed than are taken.
  """

  first_words: int = 5
  letters: int = 4
  fewest_words: int = 3
  shortest: int = 1

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 1:
        raise ValueError(f"quotes.{field.name} is {value}, not at least 1")
    if self.fewest_words > self.first_words:
      raise ValueError(
        f"quotes.fewest_words is {self.fewest_words}, not at most first_words"
        f" ({self.first_words})"
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
  """A quote and where it should stand.

  Attributes:
    kind: "clue" (in the clues), "item" or "truth" (both in the item's text).
    chunk_id: of the supporting item it belongs to.
    text: as the author gave it.
  """

  kind: str
  chunk_id: str
  text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
  """A quote with what was found: "substring", "words" or None."""

  quote: Quote
  found: str | None


def fold(text: str) -> str:
  """A text without case, accents and compatibility forms."""
  if text.isascii():
    return text.lower()
  # Folding may leave characters that decompose further.
  folded = unicodedata.normalize("NFKD", text).casefold()
  folded = unicodedata.normalize("NFKD", folded)
  return "".join(c for c in folded if unicodedata.category(c)[0] != "M")


def without_links(text: str) -> str:
  """A text whose links are their texts alone; bare addresses vanish."""
  return _ADDRESS.sub(" ", _LINK.sub(r"\1", text))


# Chunks are looked through for quotes again and again.
@functools.lru_cache(maxsize=16384)
def normalise(text: str) -> str:
  """What quotes are compared by: words between single spaces.

  Links become their text, bare addresses vanish, and so do apostrophes of every
  kind; any other punctuation (quotes, dashes, underscores) is a space. Case and
  accents don't count.
  """
  text = without_links(text)
  text = fold(_APOSTROPHES.sub("", text))
  return " ".join(_NO_WORD.sub(" ", _APOSTROPHES.sub("", text)).split())


def find(quote: str, text: str, rules: QuoteRules | None = None) -> str | None:
  """How a quote is found in a text, None if it isn't.

  Both are normalised. "substring": the quote stands in the text. "words": the
  first five words of the quote that have more than 3 letters, of which there
  must be at least 3, are words of the text in this order, with anything between
  them. A quote without a letter or digit is found nowhere.
  """
  rules = rules or QuoteRules()
  wanted, held = normalise(quote), normalise(text)
  if not wanted:
    return None
  if wanted in held:
    return SUBSTRING
  long = [w for w in wanted.split() if _letters(w) >= rules.letters]
  long = long[: rules.first_words]
  if len(long) < rules.fewest_words:
    return None
  rest = iter(held.split())
  # Each search goes on behind the last hit.
  return WORDS if all(word in rest for word in long) else None


def is_part(quote: str, text: str) -> bool:
  """Whether a quote is a substring of a text, both normalised."""
  wanted = normalise(quote)
  return bool(wanted) and wanted in normalise(text)


def _letters(word: str) -> int:
  return sum(c.isalpha() for c in word)


def judge(
  quotes: Iterable[Quote],
  *,
  clues: str,
  texts: dict[str, str],
  rules: QuoteRules | None = None,
) -> tuple[Verdict, ...]:
  """Looks for every quote.

  Args:
    quotes: of all kinds.
    clues: text of the clues.
    texts: of each item, by chunk id.
    rules: for a match.

  Raises:
    KeyError: a quote is of an item without text.
  """
  rules = rules or QuoteRules()

  def verdicts() -> Iterator[Verdict]:
    for quote in quotes:
      text = clues if quote.kind == "clue" else texts[quote.chunk_id]
      found = find(quote.text, text, rules)
      # An answer may be short, what supports it may not.
      if quote.kind != "truth" and len(normalise(quote.text)) < rules.shortest:
        found = None
      yield Verdict(quote=quote, found=found)

  return tuple(verdicts())


def needed(count: int) -> int:
  """⌈2/3⌉ of so many quotes."""
  return -(-2 * count // 3)


def fault(verdicts: Sequence[Verdict]) -> str | None:
  """Why a task doesn't pass, None if it does.

  It passes with at least ⌈2/3⌉ of the clue quotes found, at least ⌈2/3⌉ of the
  item quotes found, and all truth quotes found; there must be some of each.

  Returns:
    "no_clue_quote", "clue_quotes_not_found" and likewise for items and truth,
    for the first kind that fails.
  """
  for kind in KINDS:
    found = [v.found is not None for v in verdicts if v.quote.kind == kind]
    if not found:
      return f"no_{kind}_quote"
    least = len(found) if kind == "truth" else needed(len(found))
    if sum(found) < least:
      return f"{kind}_quotes_not_found"
  return None
