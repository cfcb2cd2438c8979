"""Generated tasks: verified, split by document, the same every time."""

import json
import random
import re

import pytest

from arl_jax import records
from arl_jax.data import synthesis
from arl_jax.envs.search import corpus
from arl_jax.envs.search import index as index_lib


def count_tokens(text: str) -> int:
  return max(1, len(text) // 4)


def make_index(documents) -> index_lib.SearchIndex:
  built = corpus.build_corpus(documents, count_tokens=count_tokens)
  return index_lib.SearchIndex(built)


def made_up_documents(count: int):
  """Documents of random words, each word in a handful of chunks."""
  rng = random.Random(0)
  letters = "bcdfglmnprst"
  vocabulary = [
    "".join(rng.choice(letters) + rng.choice("aeiou") for _ in range(3))
    for _ in range(count * 30)
  ]
  documents = []
  for i in range(count):
    words = rng.sample(vocabulary, 60)
    text = " ".join(words[:30]) + f". has Name{i}Kind. " + " ".join(words[30:])
    documents.append(corpus.Document(f"d{i}", "", text))
  return documents


@pytest.fixture(scope="module")
def index():
  return make_index(made_up_documents(60))


def synthesise(index, **options):
  arguments = {"seed": 0, "train": 40, "heldout": 10} | options
  return synthesis.synthesise(
    index.corpus, index, count_tokens=count_tokens, **arguments
  )


@pytest.fixture(scope="module")
def made(index):
  return synthesise(index)


def test_makes_as_many_as_asked(made):
  assert len(made.train) == 40
  assert len(made.heldout) == 10
  assert {t.split for t in made.train} == {"train"}
  assert {t.split for t in made.heldout} == {"heldout"}
  tasks = (*made.train, *made.heldout)
  assert len({t.prompt for t in tasks}) == 50
  assert len({t.task_id for t in tasks}) == 50
  assert all(re.fullmatch("py-[0-9a-f]{12}", t.task_id) for t in tasks)
  assert all(isinstance(n, int) for n in made.rejected.values())


def test_each_task_is_what_it_says(made, index):
  chunks = {c.chunk_id: c.text for c in index.corpus.chunks}
  for task in (*made.train, *made.heldout):
    truth = task.truth
    clues = [clue.split(" ") for clue in task.prompt.split(" ; ")]
    assert [len(set(clue)) for clue in clues] == [3, 3]
    for clue, fact in zip(clues, truth["facts"], strict=True):
      # A fact is every chunk with all words of the clue, counted here anew.
      holders = [
        i
        for i, text in chunks.items()
        if set(clue) <= set(re.findall(r"\w+", text.lower()))
      ]
      assert fact == holders
      assert 1 <= len(fact) <= 3
      top = index.search(" ".join(clue), limit=3)
      assert {h.chunk_id for h in top} & set(fact)
      assert all(len(word) >= 4 and word.islower() for word in clue)
    assert sorted(truth["relevant"]) == sorted(
      i for fact in truth["facts"] for i in fact
    )
    answer = truth["answer"]
    assert answer.lower() not in task.prompt
    assert truth["answer_chunks"]
    assert set(truth["answer_chunks"]) <= set(truth["facts"][-1])
    assert all(answer in chunks[i] for i in truth["answer_chunks"])
    assert not any(answer in chunks[i] for i in truth["facts"][0])


def test_splits_share_no_document(made, index):
  def documents(tasks):
    return {
      index.corpus.chunk(i).doc_id for t in tasks for i in t.truth["relevant"]
    }

  assert not documents(made.train) & documents(made.heldout)


def test_hops_come_from_different_documents(made, index):
  for task in made.train:
    sources = task.provenance["source_chunks"]
    assert len({index.corpus.chunk(i).doc_id for i in sources}) == 2
    assert task.provenance["seed"] == 0
    assert task.provenance["generator"] == synthesis.GENERATOR


def test_prefers_an_identifier_as_the_answer(made):
  named = [t for t in made.train if re.match(r"Name\d+Kind", t.truth["answer"])]
  assert len(named) > len(made.train) // 2


def test_is_reproducible_and_follows_the_seed(made, index):
  assert synthesise(index) == made
  assert synthesise(index, seed=1).train != made.train
  # Fewer tasks are the first of more.
  assert synthesise(index, train=5).train == made.train[:5]


def test_survives_json(made):
  task = made.train[0]
  data = json.loads(json.dumps(records.to_json(task)))
  assert records.from_json(data) == task


def test_more_hops_and_words(index):
  tasks = synthesise(index, train=5, heldout=0, hops=3, clue_words=2).train
  for task in tasks:
    assert [len(c.split()) for c in task.prompt.split(" ; ")] == [2, 2, 2]
    assert len(task.truth["facts"]) == 3


def test_refuses_a_corpus_that_is_too_small():
  small = make_index([corpus.Document("d", "", "one two three four five")])
  with pytest.raises(ValueError, match="train is 3 tasks, but 1 documents"):
    synthesise(small, train=3)
  with pytest.raises(ValueError, match="ask for fewer or give more text"):
    synthesise(small, train=0, heldout=1)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("clue_words", 0),
    ("hops", 0),
    ("train", -1),
    ("heldout", -1),
    ("heldout_share", 1.0),
  ],
)
def test_refuses_arguments_out_of_range(index, field, value):
  with pytest.raises(ValueError, match=f"{field} is "):
    synthesise(index, **{field: value})


def test_refuses_an_index_of_another_corpus(index):
  other = make_index(made_up_documents(2))
  with pytest.raises(ValueError, match="another corpus"):
    synthesis.synthesise(
      index.corpus, other, count_tokens=count_tokens, seed=0, train=1, heldout=0
    )


def test_the_python_corpus_gives_enough_tasks():
  index = make_index(corpus.python_documents())
  tasks = synthesise(index, train=300, heldout=64)
  assert len(tasks.train) == 300
  prompts = {t.prompt for t in tasks.train}
  assert not prompts & {t.prompt for t in tasks.heldout}
