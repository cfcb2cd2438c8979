import pytest

from arl_jax.rollout.request import Sampling
from tests.rollout.fake_engine import FakeEngine, alone
from tests.rollout.serving import (
  assert_right,
  letters,
  make_scheduler,
  prompt,
  serve,
  submit,
)


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("width", [1, 2, 5])
def test_stop_string_is_found_across_tokens(first, width):
  ids = prompt(5)
  free = alone(ids, Sampling(max_tokens=12, seed=1))
  text = letters(free[first : first + width])
  engine = FakeEngine()
  scheduler = make_scheduler(engine, detokenize=letters)
  request = serve(scheduler, "a", ids, max_tokens=12, stop_strings=("no", text))
  assert_right(request)
  end = letters(free).index(text) + width
  assert request.result.ids.tolist() == free[:end]
  assert request.result.finish == "stop_string"
  assert len(request.result.logp) == len(request.result.experts) == end
  # Later tokens of the burst are no part of the context.
  assert scheduler._slots[0].held == [*ids, *free[:end]]
  before = scheduler.prefilled_tokens
  assert_right(serve(scheduler, "a", [*ids, *free[:end], 1, 2]))
  assert scheduler.prefilled_tokens - before == 2


def test_stop_string_may_be_amid_a_token_and_not_in_the_prompt():
  words = ["ab", "cde"] * 32
  ids = [0, 1, 0, 1]
  free = alone(ids, Sampling(max_tokens=30, seed=1))
  text = "".join(words[i] for i in free)
  at = text.index("bcd")
  scheduler = make_scheduler(detokenize=lambda t: "".join(words[i] for i in t))
  request = serve(scheduler, "a", ids, max_tokens=30, stop_strings=("bcd",))
  said = "".join(words[i] for i in request.result.ids)
  assert said == text[: at + 4]


def test_long_texts_are_not_read_again_from_their_beginning():
  longest = 0

  def detokenize(ids):
    nonlocal longest
    longest = max(longest, len(ids))
    return letters(ids)

  ids = prompt(2)
  free = alone(ids, Sampling(max_tokens=200, seed=1))
  scheduler = make_scheduler(FakeEngine(max_length=256), detokenize=detokenize)
  text = letters(free[180:184])
  request = serve(scheduler, "a", ids, max_tokens=200, stop_strings=(text,))
  assert request.result.ids.tolist() == free[:184]
  assert longest < 20


def test_stop_strings_need_detokenize():
  with pytest.raises(ValueError, match="detokenize"):
    submit(make_scheduler(), "a", [1], stop_strings=("x",))
