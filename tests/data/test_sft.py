"""Which demonstrations enter which update."""

import itertools

import numpy as np
import pytest

from arl_jax.chat import tokenizer as tok
from arl_jax.chat.renderer import Renderer
from arl_jax.data import sft
from arl_jax.types import Episode, Role, Sample, Segment, StopReason


def segment(n: int, *, sampled: bool = True, trainable: bool = True):
  mask = np.full(n, sampled)
  return Segment(
    ids=np.arange(n, dtype=np.int32),
    roles=np.full(n, Role.SAMPLED, np.uint8),
    sampled=mask,
    behaviour_logp=np.zeros(n, np.float32),
    policy_version=np.where(mask, 0, -1).astype(np.int32),
    trainable=trainable,
  )


def episode(*segments):
  return Episode(
    task_id="t",
    rollout_index=0,
    segments=segments,
    events=(),
    stop_reason=StopReason.ANSWERED,
    outcome={},
    turns=1,
  )


def lengths(segments):
  return [len(s) for s in segments]


def test_segments_without_a_trained_token_are_left_out():
  one, frozen = segment(3), segment(4, trainable=False)
  nothing, two = segment(5, sampled=False), segment(6)
  made = sft.segments_of([episode(one, frozen), episode(nothing, two)])
  assert lengths(made) == [3, 6]


class TestShuffled:
  def test_each_epoch_has_each_segment_once_in_another_order(self):
    stream = sft.shuffled([segment(n) for n in range(1, 21)], seed=0)
    first = lengths(itertools.islice(stream, 20))
    second = lengths(itertools.islice(stream, 20))
    assert sorted(first) == sorted(second) == list(range(1, 21))
    assert first != second

  def test_follows_the_seed(self):
    made = [segment(n) for n in range(1, 21)]

    def order(seed):
      return lengths(itertools.islice(sft.shuffled(made, seed), 30))

    assert order(1) == order(1) != order(2)

  def test_nothing_to_train_on_is_an_error(self):
    with pytest.raises(ValueError, match="no segment"):
      next(sft.shuffled([], seed=0))


class TestBatches:
  def test_each_has_its_tokens_or_one_segment_more(self):
    stream = itertools.cycle([segment(3), segment(5)])
    made = list(sft.batches(stream, tokens=10, steps=4))
    assert len(made) == 4
    for batch in made:
      assert sum(lengths(batch)) >= 10
      assert sum(lengths(batch[:-1])) < 10

  def test_no_segment_is_lost_between_batches(self):
    stream = iter([segment(n) for n in range(1, 9)])
    made = sft.batches(stream, tokens=6, steps=3)
    joined = [n for batch in made for n in lengths(batch)]
    assert joined == list(range(1, len(joined) + 1))

  def test_no_steps_take_nothing(self):
    stream = iter([segment(1)])
    assert list(sft.batches(stream, tokens=9, steps=0)) == []
    assert len(next(stream)) == 1


def test_openings_are_whole_first_turns():
  texts = ["the lazy dog and the quick fox"]
  renderer = Renderer(tok.Tokenizer.train(texts, vocab_size=40))
  answer = [*renderer.text("fox"), renderer.end]
  seen = []

  def play(question):
    def answer_to(ids):
      seen.append((question, list(ids)))
      n = len(answer)
      return Sample(
        ids=np.array(answer, np.int32),
        logp=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        stopped=True,
      )

    return answer_to

  stream = sft.openings(iter(["the dog", "the fox"]), renderer, play)
  made = list(stream)
  assert [q for q, _ in seen] == ["the dog", "the fox"]
  for segment_, (question, ids) in zip(made, seen, strict=True):
    prompt = [*renderer.prompt(question), *renderer.open_turn()]
    assert ids == prompt
    assert segment_.ids.tolist() == prompt + answer
    assert segment_.sampled.tolist() == [False] * len(prompt) + [True] * len(
      answer
    )


def test_openings_end_with_the_questions_and_draw_lazily():
  texts = ["the lazy dog"]
  renderer = Renderer(tok.Tokenizer.train(texts, vocab_size=25))
  drawn = []

  def questions():
    for number in itertools.count():
      drawn.append(number)
      yield "dog"

  def play(question):
    one = np.zeros(1, np.int32)
    sample = Sample(
      ids=one, logp=np.zeros(1, np.float32), versions=one, stopped=False
    )
    return lambda ids: sample

  stream = sft.openings(questions(), renderer, play)
  assert len(list(itertools.islice(stream, 3))) == 3
  assert drawn == [0, 1, 2]
