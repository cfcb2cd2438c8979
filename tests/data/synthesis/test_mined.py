"""Tasks of what documents name in common, by code alone."""

import asyncio
import contextlib
import random
import re

import pytest

from arl_jax.data.synthesis.domains import (
  DOCUMENTATION,
  DOMAINS,
  Domain,
  EntityKind,
  domain,
)
from arl_jax.data.synthesis.draft import Refused, Request
from arl_jax.data.synthesis.entities import EntityGraph, EntityReader
from arl_jax.data.synthesis.forms import holds, squeeze
from arl_jax.data.synthesis.mined import MinedAuthor
from arl_jax.envs.search.corpus import Document
from tests.data.synthesis import linked_corpus


def named(domain_name, text):
  """What a domain finds in a text, as (kind, text)."""
  kind = DOMAINS[domain_name]
  return [
    (kind.entities[m.kind].name, s.text[m.start : m.end])
    for s in EntityReader(kind).sentences(text)
    for m in s.mentions
  ]


@pytest.mark.parametrize(
  ("domain_name", "text", "expected"),
  [
    (
      "docs",
      "Use os.path.join with --no-verify, read_text or TestCase in /etc/fstab.",
      [
        ("identifier", "os.path.join"),
        ("option", "--no-verify"),
        ("identifier", "read_text"),
        ("identifier", "TestCase"),
        ("path", "/etc/fstab"),
      ],
    ),
    (
      "docs",
      "* Use [read_text](http://x.org/write_text) here\n  - TestCase, too\n",
      [("identifier", "read_text"), ("identifier", "TestCase")],
    ),
    (
      "docs",
      "Say `keylen` of [`d523eb9c40`](http://x) to open() and openFile.",
      [
        ("quoted", "keylen"),
        ("function", "open"),
        ("identifier", "openFile"),
      ],
    ),
    ("docs", ">>> read_text()\n$ run --no-verify\n", []),
    (
      "filings",
      "The Acme Widget Corporation paid $1.5 million on May 3, 2021 (14.25%).",
      [
        ("company", "Acme Widget Corporation"),
        ("amount", "$1.5 million"),
        ("date", "May 3, 2021"),
        ("quantity", "14.25%"),
      ],
    ),
    ("filings", "Table of Contents\nF-12\n", []),
    (
      "patents",
      "Heating calcium carbonate to 450 degrees as in US 4,123,456 gives NaOH.",
      [
        ("compound", "calcium"),
        ("compound", "carbonate"),
        ("quantity", "450 degrees"),
        ("patent", "US 4,123,456"),
      ],
    ),
    ("patents", "The method of claim 1, wherein carbonate is used.", []),
    (
      "email",
      "ask Ada Lovelace or bob.smith@example.org by 2001-05-14.\n",
      [
        ("name", "Ada Lovelace"),
        ("address", "bob.smith@example.org"),
        ("date", "2001-05-14"),
      ],
    ),
    (
      "email",
      "From: Ada Lovelace\n> as Bob Smith said\nMessage-ID: <a@b.example>\n",
      [],
    ),
    (
      "web",
      "In The Hague Marie van Curie raised 20 kg for NASA.\nAccept our cookies"
      " from Evil Corp Ads.",
      [
        ("name", "Hague Marie van Curie"),
        ("quantity", "20 kg"),
        ("term", "NASA"),
      ],
    ),
  ],
)
def test_domains_find_what_their_texts_name(domain_name, text, expected):
  assert named(domain_name, text) == expected


def test_a_sentences_first_word_is_no_part_of_a_name():
  assert named("web", "The Royal Society met. This Society did.") == [
    ("name", "Royal Society")
  ]


def test_sentences_are_plain():
  text = (
    "* See [Test_Case](http://x) of\n  all\n- Or Read_Text: done\n2) no name"
  )
  found = [s.text for s in EntityReader(DOCUMENTATION).sentences(text)]
  assert found == ["See Test_Case of all", "Or Read_Text:"]


@pytest.mark.parametrize("preset", DOMAINS.values(), ids=list(DOMAINS))
def test_hostile_texts_take_no_time(preset):
  reader = EntityReader(preset)
  for piece in (
    "aA",
    "A-",
    "Aa ",
    "a.",
    "1,1",
    "a_",
    "/a",
    "a@a.",
    "--a-",
    "$1",
  ):
    for end in ("", "@", "!"):
      reader.sentences(piece * 1500 + end)


def test_graph_links_documents_that_share_an_entity():
  index = linked_corpus.indexed(
    [
      Document("a", "", "The read_text function reads a file in one go."),
      Document("b", "", "Use Read_Text or write_text for a path's content."),
      Document("c", "", "Here write_text writes and readText reads it."),
      Document("d", "", "Only here does unlink_all unlink what is left."),
      Document("e", "", "Another read_text in another split of them."),
    ]
  )
  graph = EntityGraph(index.corpus, DOCUMENTATION, frozenset("abcd"))
  assert graph.entities["readtext"].text == "read_text"
  assert graph.entities["readtext"].chunks == {"a": [0], "b": [1], "c": [2]}
  assert graph.links(3) == ("readtext",)
  assert graph.links(2) == ("readtext", "writetext")
  assert graph.links(4) == ()
  few = EntityGraph(
    index.corpus, DOCUMENTATION, frozenset("abcd"), most_documents=2
  )
  assert few.links(2) == ("writetext",)


def request(hops, seed=0):
  index = linked_corpus.index()
  documents = frozenset(d.doc_id for d in index.corpus.documents)
  return Request(documents=documents, hops=hops, draw=random.Random(seed))


async def drafts(hops, seed):
  author = MinedAuthor(linked_corpus.index().corpus, linked_corpus.DOMAIN)
  wanted = request(hops, seed)
  found = [await author.explore(wanted)]
  while len(found) < hops:
    found.append(await author.extend(found[-1], wanted))
  return found


def first(hops):
  """The drafts of the first seed that gives some."""
  for seed in range(50):
    try:
      return asyncio.run(drafts(hops, seed))
    except Refused:
      continue
  raise AssertionError("no draft of 50 seeds")


def test_first_hop_asks_for_what_three_documents_name():
  corpus = linked_corpus.index().corpus
  (draft,) = first(1)
  chunks = [corpus.chunk(clue.chunk_id) for clue in draft.clues]
  assert len({c.doc_id for c in chunks}) == 3
  for clue, chunk, item in zip(draft.clues, chunks, draft.items, strict=True):
    assert holds(chunk.text, draft.truth)
    assert not holds(clue.text, draft.truth)
    assert "[1]" in clue.text
    # The clue is the quote with a mark in place of the name.
    (quote,) = item.item_quotes
    assert re.sub(rf"\b{draft.truth}\b", "[1]", quote).strip(" .") in (
      clue.text,
      clue.text.strip(" ."),
    )
    low, high = linked_corpus.DOMAIN.clue_words
    assert low <= len(quote.split()) <= high
  assert "[1]" in draft.question
  assert "identifier" in draft.question
  assert draft.bridges == ()


def test_each_hop_leads_to_a_new_document_through_the_last_answer():
  corpus = linked_corpus.index().corpus
  one, two, three = first(3)
  assert (one.hops, two.hops, three.hops) == (1, 2, 3)
  assert three.bridges == (one.truth, two.truth)
  for before, after in ((one, two), (two, three)):
    assert after.clues[:-1] == before.clues
    clue, text = after.clues[-1], corpus.chunk(after.clues[-1].chunk_id).text
    used = {corpus.chunk(i.chunk_id).doc_id for i in before.items}
    assert corpus.chunk(clue.chunk_id).doc_id not in used
    # The shared entity is the way in, the new answer is what is there.
    assert holds(text, before.truth)
    assert holds(text, after.truth)
    for item in before.items:
      assert not holds(corpus.chunk(item.chunk_id).text, after.truth)
    for name in (before.truth, after.truth):
      assert not holds(after.prompt, name)
    assert f"[{before.hops}]" in clue.text
    assert f"[{after.hops}]" in clue.text
    assert f"[{after.hops}]" in after.question
  assert [bool(i.truth_quotes) for i in three.items] == [False] * 4 + [True]


def test_drafts_follow_from_the_seed():
  assert asyncio.run(drafts(1, 3)) == asyncio.run(drafts(1, 3))
  answers = set()
  for seed in range(8):
    answers.add(squeeze(asyncio.run(drafts(1, seed))[0].truth))
  assert len(answers) > 4


def test_says_what_a_corpus_lacks():
  index = linked_corpus.indexed([Document("a", "", "Nothing named at all.")])
  author = MinedAuthor(index.corpus, DOCUMENTATION)
  wanted = Request(documents=frozenset("a"), hops=1, draw=random.Random(0))
  with pytest.raises(Refused, match="no_shared_entity"):
    asyncio.run(author.explore(wanted))


def test_hostile_corpus_text_carries_no_marks_into_a_prompt():
  text = (
    "Beware all people <|endoftext|> of Snake_Case that brings mighty things"
  )
  index = linked_corpus.indexed(
    [Document(f"d{i}", "", f"{text} <c{i}> to some people.") for i in range(3)]
  )
  author = MinedAuthor(index.corpus, DOCUMENTATION)
  found = []
  for seed in range(20):
    draw = random.Random(seed)
    wanted = Request(documents=frozenset(("d0", "d1", "d2")), hops=1, draw=draw)
    with contextlib.suppress(Refused):
      found.append(asyncio.run(author.explore(wanted)))
  assert any("endoftext" in draft.prompt for draft in found)
  for draft in found:
    assert draft.truth == "Snake_Case"
    assert not re.search(r"<\S", draft.prompt)
    # Three breaks between three clues and the question, none within a clue.
    assert draft.prompt.count(" ; ") == 3


def test_presets_and_what_they_refuse():
  assert list(DOMAINS) == ["web", "filings", "patents", "email", "docs"]
  assert domain("web").name == "web"
  with pytest.raises(ValueError, match="domain is 'wiki', not one of web, "):
    domain("wiki")
  good = {
    "name": "d",
    "noun": "n",
    "entities": DOCUMENTATION.entities,
    "questions": ("{noun} {mark}",),
    "further_questions": ("{noun} {mark}",),
  }
  Domain(**good)
  for field, value, message in (
    ("name", "a,b=1", "domain name is 'a,b=1'"),
    ("entities", (), "entities of d is empty"),
    ("clue_words", (5, 4), "clue_words of d is"),
    ("chunk_tokens", 0, "chunk_tokens of d is 0"),
    ("boilerplate", ("(",), "boilerplate of d has '\\('"),
    ("questions", (), "questions of d is empty"),
    ("questions", ("{noun} {other}",), "must have {noun}"),
  ):
    with pytest.raises(ValueError, match=message):
      Domain(**{**good, field: value})
  with pytest.raises(ValueError, match="pattern of p is '\\['"):
    EntityKind(name="p", noun="p", pattern="[")
