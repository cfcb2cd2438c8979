"""Tasks come out verified, whoever wrote them, and the same every time."""

import asyncio
import collections
import dataclasses
import json
import random

import pytest

from arl_jax import records, types
from arl_jax.data.synthesis import quotes
from arl_jax.data.synthesis.draft import AuthorFailed, Refused
from arl_jax.data.synthesis.forms import holds
from arl_jax.data.synthesis.journal import FileJournal
from arl_jax.data.synthesis.mined import GENERATOR, MinedAuthor
from arl_jax.data.synthesis.pipeline import (
  Attempt,
  Outcome,
  Pipeline,
  SynthesisConfig,
  split_documents,
)
from arl_jax.queueing.task_source import mixed, parse_mixture
from arl_jax.rewards.search import SearchReward
from tests.data.synthesis import linked_corpus

CONFIG = SynthesisConfig(count=24, heldout_share=0.25, hops=(1, 2, 3))


def make(config=CONFIG, author=None, index=None, journal=None):
  index = index or linked_corpus.index()
  author = author or MinedAuthor(index.corpus, linked_corpus.DOMAIN)
  pipeline = Pipeline(
    index, author, linked_corpus.DOMAIN, config, journal=journal
  )
  return asyncio.run(pipeline.make())


@pytest.fixture(scope="module")
def made():
  return make()


def test_quotas_add_up():
  # 24 tasks, 6 of them held out; 18 and 6 among three numbers of hops.
  assert CONFIG.quotas() == {
    **{("train", hops): 6 for hops in (1, 2, 3)},
    **{("heldout", hops): 2 for hops in (1, 2, 3)},
  }
  # 8 and 2 among three: the first get one more.
  quotas = dataclasses.replace(CONFIG, count=10, heldout_share=0.2).quotas()
  assert list(quotas.values()) == [3, 3, 2, 1, 1, 0]


def test_makes_as_many_as_asked_of_each_kind(made):
  found = collections.Counter(
    (t.split, t.provenance["hops"]) for t in made.tasks
  )
  assert found == CONFIG.quotas()
  assert len({t.task_id for t in made.tasks}) == 24
  assert len({t.prompt for t in made.tasks}) == 24
  assert not made.report.missing
  assert made.report.accepted == 24
  rejected = sum(made.report.rejected.values())
  assert made.report.attempts == 24 + rejected


def test_each_task_is_what_it_says(made):
  corpus = linked_corpus.index().corpus
  documents = split_documents(corpus, seed=0, heldout_share=0.25)
  for task in made.tasks:
    truth, provenance = task.truth, task.provenance
    answer, hops = truth["answer"], provenance["hops"]
    assert len(provenance["clues"]) == 2 + hops
    assert task.prompt == " ; ".join(
      (*provenance["clues"], provenance["question"])
    )
    assert len(truth["facts"]) == 2 + hops
    assert [i for fact in truth["facts"] for i in fact] == truth["relevant"]
    assert [fact[0] for fact in truth["facts"]] == provenance["source_chunks"]
    assert len(provenance["source_documents"]) == 2 + hops
    for name in (answer, *truth["bridges"]):
      assert not holds(task.prompt, name)
    assert len(truth["bridges"]) == hops - 1
    texts = {i: corpus.chunk(i).text for i in truth["relevant"]}
    assert truth["answer_chunks"] == [
      i for i in texts if holds(texts[i], answer)
    ]
    # Of one hop every item names the answer, of more only the last.
    assert len(truth["answer_chunks"]) == (3 if hops == 1 else 1)
    assert len(truth["distractors"]) <= 10
    for i in truth["distractors"]:
      assert not holds(corpus.chunk(i).text, answer)
      assert i not in truth["relevant"]
    for quote in provenance["quotes"]:
      text = (
        " ".join(provenance["clues"])
        if quote["kind"] == "clue"
        else texts[quote["chunk"]]
      )
      assert quotes.find(quote["text"], text) == quote["found"]
    assert {corpus.chunk(i).doc_id for i in texts} <= documents[task.split]
    assert provenance["source"] == f"docs_{hops}"
    assert provenance["generator"] == GENERATOR
    assert provenance["corpus"] == corpus.digest
    assert provenance["difficulty"] in ("easy", "medium", "hard")
    assert len(provenance["ranks"]) == 2 + hops
    json.dumps(records.to_json(task), allow_nan=False)


def test_splits_share_no_document(made):
  by_split = collections.defaultdict(set)
  for task in made.tasks:
    by_split[task.split] |= set(task.provenance["source_documents"])
  assert not by_split["train"] & by_split["heldout"]


def test_a_mixture_names_their_sources(made):
  weights = parse_mixture("docs_1=3,docs_2=1")
  sources = mixed(made.tasks, weights)
  # 6 of training and 2 held out of each number of hops.
  assert [(s.name, s.weight, len(s.task_ids)) for s in sources] == [
    ("docs_1", 3.0, 8),
    ("docs_2", 1.0, 8),
  ]


def test_the_reward_reads_them(made):
  task = made.tasks[-1]
  episode = types.Episode(
    task_id=task.task_id,
    rollout_index=0,
    segments=(),
    events=(),
    stop_reason=types.StopReason.ANSWERED,
    outcome={
      "answer": task.truth["relevant"],
      "encountered": task.truth["relevant"],
    },
    turns=3,
  )
  # All of it found: 0.7 F + 0.3 recall + 1 for the answer.
  assert SearchReward()(task, episode).total == pytest.approx(2.0)
  wrong = dataclasses.replace(
    episode, outcome={"answer": task.truth["distractors"]}
  )
  assert SearchReward()(task, wrong).total == 0.0


def test_the_same_seed_gives_the_same_tasks_however_many_run_at_a_time(made):
  assert make().tasks == made.tasks
  several = make(dataclasses.replace(CONFIG, concurrency=5))
  assert several.tasks == made.tasks
  assert several.report.to_json() == made.report.to_json()
  other = make(dataclasses.replace(CONFIG, seed=1)).tasks
  assert not {t.task_id for t in other} & {t.task_id for t in made.tasks}


def test_says_what_could_not_be_made():
  config = SynthesisConfig(
    count=150, hops=(1,), heldout_share=0, patience=40, per_truth=1,
  )  # fmt: skip
  index = linked_corpus.indexed(linked_corpus.documents(8))
  report = make(config, index=index).report
  missing = 150 - report.accepted
  assert report.missing == {"train, 1 hops": missing}
  assert missing > 100
  assert report.rejected["overused_answer"] > 10
  shown = report.to_json()["rejected"]["overused_answer"]
  assert shown["count"] == report.rejected["overused_answer"]
  assert 1 <= len(shown["examples"]) <= 3
  assert f"train, 1 hops: {missing}" in report.lines()[-1]


class Scripted:
  """An author that proposes the same draft, or fails as told."""

  generator = "scripted/1"

  def __init__(self, index, *results, distractors=None, longer=None):
    self._index, self._results = index, list(results)
    self._distractors, self._longer = distractors, longer
    self.explored = 0

  async def explore(self, request):
    self.explored += 1
    result = self._results[min(self.explored, len(self._results)) - 1]
    if isinstance(result, Exception):
      raise result
    return result

  async def distract(self, draft, candidates):
    return candidates if self._distractors is None else self._distractors

  async def extend(self, draft, request):
    return self._longer


def scripted(*results, hops=1, count=1, journal=None, **options):
  index = linked_corpus.town_index()
  author = Scripted(index, *results, **options)
  config = SynthesisConfig(
    count=count, heldout_share=0, hops=(hops,), patience=10,
  )  # fmt: skip
  return make(config, author, index, journal), author


def test_authors_are_not_believed():
  good = linked_corpus.town_draft()
  made, _ = scripted(good)
  (task,) = made.tasks
  assert task.truth["relevant"] == ["a_0", "b_0", "c_0"]
  assert {"e_0", "f_0"} <= set(task.truth["distractors"])
  for distractors, reason in (
    (["a_0"], "distractor_is_evidence"),
    (["made up"], "distractor_not_similar"),
    (["e_0"] * 100, "too_many_distractors"),
  ):
    made, _ = scripted(good, distractors=distractors)
    assert made.report.rejected == {reason: 10}
    assert made.tasks == ()
  lying = dataclasses.replace(good, truth="Aberdeen")
  made, author = scripted(lying, good)
  assert made.report.rejected == {"answer_in_no_item": 1}
  assert author.explored == 2
  assert len(made.tasks) == 1
  # An extension that extends nothing would go on for ever.
  made, _ = scripted(good, hops=2, longer=good)
  assert made.report.rejected == {"wrong_number_of_hops": 10}


def test_the_same_draft_is_one_task():
  made, _ = scripted(linked_corpus.town_draft(), count=2)
  assert len(made.tasks) == 1
  assert made.report.rejected == {"duplicate": 10}


def test_failures_that_are_nobodys_fault_end_the_run_when_they_go_on():
  good = linked_corpus.town_draft()
  failed = AuthorFailed("no server")
  made, _ = scripted(failed, failed, failed, good)
  assert made.report.rejected == {"author_failed": 3}
  assert len(made.tasks) == 1
  with pytest.raises(AuthorFailed, match="no server"):
    scripted(failed)


def test_a_journal_spares_what_is_done(tmp_path):
  path = tmp_path / "journal"
  good = linked_corpus.town_draft()
  refused = Refused("no_idea", "nothing " * 100)
  with FileJournal(path, {"seed": 0}) as journal:
    first, author = scripted(refused, good, journal=journal)
    assert author.explored == 2
  with FileJournal(path, {"seed": 0}) as journal:
    assert len(journal) == 2
    second, author = scripted(refused, good, journal=journal)
    assert author.explored == 0
  assert second.tasks == first.tasks
  assert second.report.to_json() == first.report.to_json()
  # A kill may cut the last line: here the task's, which is made again.
  path.write_bytes(path.read_bytes()[:-20])
  with FileJournal(path, {"seed": 0}) as journal:
    assert len(journal) == 1
    third, author = scripted(good, journal=journal)
    assert author.explored == 1
  assert third.tasks[0].truth == first.tasks[0].truth
  with pytest.raises(ValueError, match="another seed; go on"):
    FileJournal(path, {"seed": 1})
  path.write_bytes(path.read_bytes() + b'{"split": 3}\n')
  with pytest.raises(ValueError, match="journal:4 is no outcome"):
    FileJournal(path, {"seed": 0})
  path.write_bytes(b"[1]\n")
  with pytest.raises(ValueError, match="is no journal"):
    FileJournal(path, {"seed": 0})


def test_a_journal_of_nothing_whole_begins_anew(tmp_path):
  path = tmp_path / "journal"
  path.write_bytes(b'{"made_fr')
  outcome = Outcome(
    attempt=Attempt(split="train", hops=1, number=0), reason="r"
  )
  with FileJournal(path, {"seed": 0}) as journal:
    assert len(journal) == 0
    journal.add(outcome)
  with FileJournal(path, {"seed": 0}) as journal:
    assert journal.known(outcome.attempt) == outcome
    journal.remove()
  assert not path.exists()


def test_a_journal_has_one_writer(tmp_path):
  with (
    FileJournal(tmp_path / "j", {}),
    pytest.raises(ValueError, match="written by another process"),
  ):
    FileJournal(tmp_path / "j", {})


def test_what_failed_for_no_fault_is_not_remembered(tmp_path):
  good = linked_corpus.town_draft()
  with FileJournal(tmp_path / "j", {}) as journal:
    scripted(AuthorFailed("gone"), good, journal=journal)
    assert len(journal) == 1


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("count", 0),
    ("heldout_share", 1.0),
    ("hops", ()),
    ("hops", (1, 1)),
    ("hops", (0,)),
    ("hops", (9,)),
    ("patience", 0),
    ("concurrency", 0),
    ("near", 0.0),
    ("per_truth", 0),
  ],
)
def test_refuses_what_cannot_be(field, value):
  with pytest.raises(ValueError, match=f"{field} is "):
    SynthesisConfig(**{field: value})


def test_documents_are_split_by_the_seed():
  corpus = linked_corpus.index().corpus
  splits = split_documents(corpus, seed=0, heldout_share=0.25)
  # A quarter of 40.
  assert len(splits["heldout"]) == 10
  assert not splits["train"] & splits["heldout"]
  assert len(splits["train"] | splits["heldout"]) == 40
  assert splits != split_documents(corpus, seed=1, heldout_share=0.25)
  assert splits["heldout"] != frozenset(
    random.Random(0).sample(sorted(splits["train"]), 10)
  )
