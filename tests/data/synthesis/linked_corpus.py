"""A corpus whose documents name each other's identifiers."""

import functools
import random

from arl_jax.data.synthesis.domains import DOCUMENTATION
from arl_jax.data.synthesis.draft import Clue, Draft, Item
from arl_jax.envs.search.corpus import Document, build_corpus
from arl_jax.envs.search.index import SearchIndex

DOMAIN = DOCUMENTATION


def count_tokens(text):
  return max(1, len(text) // 4)


def indexed(documents, max_tokens=60):
  return SearchIndex(
    build_corpus(documents, count_tokens=count_tokens, max_tokens=max_tokens)
  )


def documents(count=40, seed=0):
  """Documents of six sentences, each about two of the identifiers.

  Identifier k is named by about six documents; every other word is made up.
  """
  draw = random.Random(seed)
  names = [
    f"Thing{chr(65 + k // 26)}{chr(97 + k % 26)}Kind" for k in range(count)
  ]
  letters = "bcdfglmnprst"

  def word():
    return "".join(
      draw.choice(letters) + draw.choice("aeiou") for _ in range(3)
    )

  found = []
  for d in range(count):
    sentences = []
    for _ in range(6):
      first, second = draw.sample(names, 2)
      w = [word() for _ in range(10)]
      sentences.append(
        f"{w[0].title()} {w[1]} {w[2]} {w[3]} {first} {w[4]} {w[5]} {w[6]}"
        f" {second} {w[7]} {w[8]} {w[9]}."
      )
    found.append(Document(f"d{d}", f"d{d}", "\n\n".join(sentences)))
  return found


@functools.cache
def index():
  return indexed(documents())


TEXTS = {
  "a": "The amber lighthouse was built in Kirkwall by Ada Lovelace herself.",
  "b": "Every winter the Kirkwall choir performs beside the frozen harbour.",
  "c": "Ferries from Stromness reach Kirkwall before the morning market.",
  "d": "The copper distillery of Dufftown exports barrels to Kirkwall port.",
  "e": "An amber lighthouse stands in Wick, near a frozen harbour.",
  "f": "The morning market of Thurso opens when the ferries arrive.",
  "g": "Bagpipes need a goatskin bag and nine wooden drones.",
}


@functools.cache
def town_index():
  """Seven documents of a sentence; a to d name Kirkwall."""
  return indexed([Document(name, name, text) for name, text in TEXTS.items()])


def town_draft(**changes):
  """A draft about them that passes every check."""
  fields = {
    "clues": (
      Clue(text="It has an amber lighthouse.", chunk_id="a_0"),
      Clue(text="Its choir sings by the frozen harbour.", chunk_id="b_0"),
      Clue(text="Ferries arrive before the morning market.", chunk_id="c_0"),
    ),
    "question": "Which town is it?",
    "truth": "Kirkwall",
    "items": (
      Item(
        chunk_id="a_0",
        clue_quotes=("amber lighthouse",),
        item_quotes=("amber lighthouse was built",),
        truth_quotes=("built in Kirkwall",),
      ),
      Item(
        chunk_id="b_0",
        clue_quotes=("by the frozen harbour",),
        item_quotes=("beside the frozen harbour",),
        truth_quotes=("the Kirkwall choir",),
      ),
      Item(
        chunk_id="c_0",
        clue_quotes=("before the morning market",),
        item_quotes=("before the morning market",),
        truth_quotes=("reach Kirkwall",),
      ),
    ),
  }
  return Draft(**{**fields, **changes})
