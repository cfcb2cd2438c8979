"""Kinds of corpora, as data: what is named in them, and how tasks read.

A domain of your own is one more `Domain`; nothing else knows their names.
"""

from __future__ import annotations

import dataclasses
import re
import string

from arl_jax.data.synthesis.quotes import QuoteRules


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EntityKind:
  """A kind of thing that texts name.

  Attributes:
    name: of the kind.
    noun: what a question calls it.
    pattern: regular expression of a mention within a sentence. It runs over
      everybody's texts, so its time must be linear: no repetition within a
      repetition that could match the same text in two ways.
  """

  name: str
  noun: str
  pattern: str

  def __post_init__(self) -> None:
    try:
      re.compile(self.pattern)
    except re.error as error:
      raise ValueError(
        f"pattern of {self.name} is {self.pattern!r}, which isn't a regular"
        f" expression: {error}"
      ) from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
  """A kind of corpus.

  Attributes:
    name: letters, digits and "_"; begins the ids and sources of tasks.
    noun: what a text is called, in the singular.
    entities: what is mined; where two patterns match, the earlier counts.
    boilerplate: regular expressions of lines that no clue is made from,
      searched for in each line.
    questions: templates with {noun} and {mark} for one hop.
    further_questions: likewise for more hops; {mark} is the last one.
    clue_words: fewest and most words of a clue.
    quotes: when a quote counts as found.
    chunk_tokens: of a chunk, suited to the domain's texts.

  Raises:
    ValueError: a field can't be.
  """

  name: str
  noun: str
  entities: tuple[EntityKind, ...]
  questions: tuple[str, ...]
  further_questions: tuple[str, ...]
  boilerplate: tuple[str, ...] = ()
  clue_words: tuple[int, int] = (6, 14)
  quotes: QuoteRules = dataclasses.field(
    default_factory=lambda: QuoteRules(shortest=12)
  )
  chunk_tokens: int = 128

  def __post_init__(self) -> None:
    if not re.fullmatch(r"[A-Za-z]\w*", self.name, re.ASCII):
      raise ValueError(f"domain name is {self.name!r}, not letters and digits")
    if not self.entities:
      raise ValueError(f"entities of {self.name} is empty; name at least one")
    low, high = self.clue_words
    if not 1 <= low <= high:
      raise ValueError(
        f"clue_words of {self.name} is {self.clue_words}, not fewest and most,"
        " at least 1"
      )
    if self.chunk_tokens < 1:
      raise ValueError(
        f"chunk_tokens of {self.name} is {self.chunk_tokens}, not at least 1"
      )
    for pattern in self.boilerplate:
      try:
        re.compile(pattern)
      except re.error as error:
        raise ValueError(
          f"boilerplate of {self.name} has {pattern!r}, which isn't a regular"
          f" expression: {error}"
        ) from error
    for field in ("questions", "further_questions"):
      templates = getattr(self, field)
      if not templates:
        raise ValueError(f"{field} of {self.name} is empty; give a template")
      for template in templates:
        names = {name for _, name, _, _ in string.Formatter().parse(template)}
        if names - {None} != {"noun", "mark"}:
          raise ValueError(
            f"{field} of {self.name} has {template!r}, which must have {{noun}}"
            " and {mark}, and no other field"
          )


_NAME = EntityKind(
  name="name",
  noun="name",
  pattern=r"\b[A-Z][a-z]+(?:[ -](?:of |de |van )?[A-Z][a-z]+){1,4}\b",
)
_COMPANY = EntityKind(
  name="company",
  noun="company",
  pattern=(
    r"\b(?:[A-Z][\w&-]* ){1,5}(?:Inc|Incorporated|Corp|Corporation|Company"
    r"|LLC|L\.L\.C|Ltd|Limited|Holdings|Group|Partners|L\.P|AG|GmbH|plc|PLC"
    r"|S\.A|N\.V)\b"
  ),
)
_DATE = EntityKind(
  name="date",
  noun="date",
  pattern=(
    r"\b(?:(?:January|February|March|April|May|June|July|August|September"
    r"|October|November|December) \d{1,2}, \d{4}|\d{1,2} (?:January|February"
    r"|March|April|May|June|July|August|September|October|November|December)"
    r" \d{4}|\d{4}-\d{2}-\d{2})\b"
  ),
)
_MONEY = EntityKind(
  name="amount",
  noun="amount",
  pattern=(
    r"(?:[$€£]|\b(?:USD|EUR|GBP) )\d{1,3}(?:[,.]?\d{1,3}){0,4}"
    r"(?: (?:thousand|million|billion|trillion)\b)?"
  ),
)
_QUANTITY = EntityKind(
  name="quantity",
  noun="quantity",
  pattern=(
    r"(?<![\w.])\d{1,9}(?:\.\d{1,6})?(?: ?%|°C| (?:percent|basis points|bytes"
    r"|[kKMG]i?B|[MGk]?Hz|seconds|minutes|hours|days|degrees|[mµn]m|cm|km|kg|mg"
    r"|ml|volts|watts|MPa|kPa)\b)"
  ),
)
_IDENTIFIER = EntityKind(
  name="identifier",
  noun="identifier",
  pattern=(
    r"(?<![\w.@/-])(?:[A-Za-z_]\w{0,40}(?:\.[A-Za-z_]\w{0,40}){1,5}"
    r"|_{0,2}[A-Za-z]\w{0,40}_\w{1,40}|__\w{1,40}"
    r"|[A-Z][A-Za-z0-9]{0,40}[a-z0-9][A-Z][A-Za-z0-9]{0,40}"
    r"|[a-z][a-z0-9]{1,40}[A-Z][A-Za-z0-9]{0,40})(?![\w@/-])"
  ),
)
_FUNCTION = EntityKind(
  name="function",
  noun="function",
  pattern=r"(?<![\w.])[a-z]\w{3,40}(?=\(\))",
)
_QUOTED = EntityKind(
  name="quoted",
  noun="word",
  # Digests of commits name nothing to a reader.
  pattern=r"(?<=[`\"'])(?![0-9a-f]{7,40}\b)[A-Za-z][\w.-]{2,40}\w(?=[`\"'])",
)
_OPTION = EntityKind(
  name="option",
  noun="command-line option",
  pattern=r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+){0,6}(?![\w-])",
)
_PATH = EntityKind(
  name="path",
  noun="file or folder",
  pattern=r"(?<![\w/.:-])~?/[a-z][\w.+-]{0,60}(?:/[\w.+-]{0,60}\w){1,8}(?!\w)",
)
_ADDRESS = EntityKind(
  name="address",
  noun="e-mail address",
  pattern=r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}(?!\w)",
)
_PRODUCT = EntityKind(
  name="term",
  noun="term",
  # Two letters or more in capitals, with or without digits.
  pattern=r"(?<![\w.-])(?:[A-Z]{2,}[0-9]*(?:-[A-Z0-9]+){0,3})(?![\w-])",
)

_QUESTIONS = (
  "{mark} stands for one {noun} in all of these; which {noun} is it?",
  "Which {noun} is left out as {mark} in each of these?",
  "All of these say {mark} instead of the same {noun}. Which one?",
)
_FURTHER_QUESTIONS = (
  "Each number in brackets stands for one name throughout. Which {noun} is"
  " {mark}?",
  "Numbers in brackets replace names, the same one each time; find the {noun}"
  " that {mark} replaces.",
)

WEB = Domain(
  name="web",
  noun="page",
  entities=(_NAME, _DATE, _MONEY, _QUANTITY, _PRODUCT, _IDENTIFIER),
  boilerplate=(
    r"(?i)\b(?:cookies?|privacy policy|terms of (?:use|service)|log ?in"
    r"|sign (?:in|up)|subscribe|all rights reserved|skip to content)\b",
    r"^\s*(?:home|menu|share|next|previous|search)\s*$",
  ),
  questions=_QUESTIONS,
  further_questions=_FURTHER_QUESTIONS,
  chunk_tokens=512,
)
FILINGS = Domain(
  name="filings",
  noun="filing",
  entities=(_COMPANY, _MONEY, _DATE, _NAME, _QUANTITY, _PRODUCT),
  boilerplate=(
    r"(?i)^\s*table of contents\s*$",
    r"^\s*(?:F-|S-)?\d+\s*$",
    r"(?i)\bforward-looking statements?\b",
    r"(?i)\bincorporated (?:herein )?by reference\b",
    r"(?i)\bpursuant to the requirements of the securities\b",
  ),
  questions=(
    *_QUESTIONS[:2],
    "These excerpts of filings name one {noun}, here {mark}. Which one?",
  ),
  further_questions=_FURTHER_QUESTIONS,
  # Amounts and their captions are short.
  clue_words=(7, 18),
  chunk_tokens=512,
)
PATENTS = Domain(
  name="patents",
  noun="patent",
  entities=(
    EntityKind(
      name="patent",
      noun="patent number",
      pattern=(
        r"\b(?:US|EP|WO|DE|JP|CN) ?\d{1,4}(?:[/,]?\d{3,7}){1,3}(?: ?[AB]\d)?\b"
        r"|\bU\.S\. Pat(?:ent|\.) No\. \d{1,2}(?:,\d{3}){2}\b"
      ),
    ),
    EntityKind(
      name="compound",
      noun="substance",
      pattern=(
        r"\b[a-z]{4,24}(?:ate|ide|ine|ene|ane|ose|ium|itol|mycin|azole|statin)"
        r"\b"
      ),
    ),
    _QUANTITY,
    _NAME,
    _DATE,
    _PRODUCT,
  ),
  boilerplate=(
    r"(?i)^\s*(?:FIG\.|FIGS\.|what is claimed is|claims?:?)\s*\d*\s*$",
    r"(?i)\bthe (?:method|apparatus|system|device|composition) (?:of|according"
    r" to) (?:any (?:one )?of )?claims? \d",
    r"^\s*\[?\d{3,5}\]?\s*$",
  ),
  questions=(
    *_QUESTIONS[:2],
    "These passages of patents disclose one {noun}, here {mark}. Which one?",
  ),
  further_questions=_FURTHER_QUESTIONS,
  clue_words=(8, 20),
  chunk_tokens=512,
)
EMAIL = Domain(
  name="email",
  noun="message",
  entities=(_ADDRESS, _NAME, _DATE, _MONEY, _QUANTITY, _PRODUCT),
  boilerplate=(
    r"(?i)^\s*(?:message-id|received|return-path|mime-version|content-[a-z-]+"
    r"|references|in-reply-to|x-[\w-]+|bcc|cc|to|from|sent|date)\s*:",
    r"^\s*>",
    r"^\s*-{2,}\s*(?:original message|forwarded)",
    r"(?i)\bthis (?:e-?mail|message) (?:is|may be) (?:confidential|privileged)",
    r"(?i)\bunsubscribe\b",
  ),
  questions=(
    *_QUESTIONS[:2],
    "Three messages mention the same {noun}, here {mark}. Which one?",
  ),
  further_questions=_FURTHER_QUESTIONS,
  clue_words=(6, 16),
  chunk_tokens=256,
)
DOCUMENTATION = Domain(
  name="docs",
  noun="page",
  entities=(
    *(_IDENTIFIER, _FUNCTION, _OPTION, _PATH, _QUOTED, _NAME),
    *(_QUANTITY, _PRODUCT),
  ),
  boilerplate=(
    r"^\s*(?:>>>|\.\.\.|\$|#|[-=~^*+]{3,})",
    r"(?i)\bcopyright\b|\ball rights reserved\b|\bwithout warranty\b",
  ),
  questions=_QUESTIONS,
  further_questions=_FURTHER_QUESTIONS,
  chunk_tokens=128,
)

DOMAINS = {d.name: d for d in (WEB, FILINGS, PATENTS, EMAIL, DOCUMENTATION)}


def domain(name: str) -> Domain:
  """The preset of a name. Raises ValueError if there is none."""
  if name not in DOMAINS:
    raise ValueError(f"domain is {name!r}, not one of {', '.join(DOMAINS)}")
  return DOMAINS[name]
