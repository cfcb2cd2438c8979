"""Forms of a name: the writings of it that count as the same.

Two writings are forms of one name if they have the same letters and digits in
the same order, whatever their case, accents, white space and punctuation, at
the borders of words: `TestCase`, `test_case`, "test case" and "test-case". So
are its regular English plural, singular and possessive, the name without a
leading article, a number with or without separators of thousands, and a date of
day, month and year in ISO's, the American or the British order.

Not forms, because code can't tell: synonyms, abbreviations, translations,
irregular plurals, other units, and a name within a longer word.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

from arl_jax.data.synthesis import quotes

_ARTICLES = ("the", "a", "an")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# A number keeps its point: 3.5 isn't 35.
_WORD = re.compile(r"\d+(?:\.\d+)+|[^\W_]+")
_HISSING = ("s", "x", "z", "ch", "sh")
_VOWELS = "aeiou"

_MONTHS = {
  name: number
  for number, name in enumerate(
    (
      *("january", "february", "march", "april", "may", "june", "july"),
      *("august", "september", "october", "november", "december"),
    ),
    1,
  )
}
_MONTHS |= {name[:3]: number for name, number in _MONTHS.items()}
_MONTH = "(?P<month>" + "|".join(sorted(_MONTHS, reverse=True)) + r")\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_DATES = tuple(
  re.compile(rf"(?<!\w){pattern}(?!\w)")
  for pattern in (
    rf"{_YEAR}-(?P<month>\d{{1,2}})-(?P<day>\d{{1,2}})",
    rf"{_MONTH} {_DAY} ?,? {_YEAR}",
    rf"{_DAY} (?:of )?{_MONTH} ?,? {_YEAR}",
  )
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Words:
  """A text's words without anything between, where each ends, and its dates."""

  joined: str
  borders: frozenset[int]
  dates: frozenset[tuple[int, int, int]]


def squeeze(text: str) -> str:
  """Letters and digits of a text: equal for two writings of a name."""
  return _words(text).joined


@functools.lru_cache(maxsize=16384)
def _words(text: str) -> _Words:
  folded = quotes.fold(_THOUSANDS.sub("", text))
  words = _WORD.findall(folded)
  borders = itertools.accumulate((len(word) for word in words), initial=0)
  return _Words("".join(words), frozenset(borders), frozenset(_dates(folded)))


def _dates(folded: str) -> list[tuple[int, int, int]]:
  found = []
  # Runs of white space would take squared time.
  plain = " ".join(folded.split())
  for pattern in _DATES:
    for match in pattern.finditer(plain):
      month = match["month"]
      number = _MONTHS[month] if month in _MONTHS else int(month)
      found.append((int(match["year"]), number, int(match["day"])))
  return found


@functools.lru_cache(maxsize=4096)
def forms(name: str) -> frozenset[str]:
  """What `squeeze` gives for the forms of a name; none for an empty one."""
  words = _WORD.findall(quotes.fold(_THOUSANDS.sub("", name)))
  bases = {"".join(words)}
  if len(words) > 1 and words[0] in _ARTICLES:
    bases.add("".join(words[1:]))
  bases.discard("")
  stems = bases.union(*(_singulars(base) for base in bases))
  return frozenset(stems.union(*(_plurals(stem) for stem in stems)))


def _singulars(word: str) -> set[str]:
  if len(word) < 4 or not word.endswith("s"):
    return set()
  found = set()
  if word.endswith("ies"):
    found.add(word[:-3] + "y")
  if word.endswith("es") and word[:-2].endswith(_HISSING):
    found.add(word[:-2])
  if not word.endswith(("ss", "us", "is")):
    found.add(word[:-1])
  return found


def _plurals(word: str) -> set[str]:
  found = {word + "s"}
  if word.endswith(_HISSING):
    found.add(word + "es")
  if word.endswith("y") and word[-2:-1] not in _VOWELS:
    found.add(word[:-1] + "ies")
  return found


def holds(text: str, name: str) -> bool:
  """Whether a text has a form of a name, between two borders of words."""
  words = _words(text)
  for form in forms(name):
    start = words.joined.find(form)
    while start >= 0:
      if start in words.borders and start + len(form) in words.borders:
        return True
      start = words.joined.find(form, start + 1)
  whole = _dates(quotes.fold(name))
  return bool(whole) and words.dates.issuperset(whole)
