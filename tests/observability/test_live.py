"""Frames say what files and queue say, and nothing that a terminal obeys."""

import io
import json
import math
import re

import hypothesis
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.observability import asynchrony
from arl_jax.observability.live import View, clean, planned, spark
from arl_jax.observability.metrics_tail import MetricsTail


def text_of(view, width=150):
  console = rich.console.Console(file=io.StringIO(), width=width)
  console.print(view.frame())
  return console.file.getvalue()


def row(text, name, count):
  """The first `count` words after `name`, where that begins a row."""
  found = re.search(rf"(?<!\S){re.escape(name)}((?: +\S+){{{count}}})", text)
  return found[1].split()


def step(n, **values):
  return {"time": 1000.0 + 10 * n, "phase": "rl", "step": n, **values}


class Clock:
  def __init__(self, now=1000.0):
    self.now = now

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def test_progress_and_numbers(clock):
  view = View("run", {"rl": 100}, clock=clock)
  assert "no metrics yet" in text_of(view)
  lines = [step(n, reward=n / 100, loss=None) for n in range(1, 31)]
  view.add(lines, anew=False)
  clock.now = 1000.0 + 300 + 65
  text = text_of(view)
  # Ten seconds a step, 70 of which are left: 700 s.
  for words in ("rl 30/100", "10 s a step", "11:40 left", "last step 1:05 ago"):
    assert words in text
  # Of steps 11 to 30: (11 + 30) / 2 / 100.
  assert row(text, "reward", 2) == ["0.3", "0.205"]
  assert "loss" not in text


def test_a_new_phase_and_a_new_file_begin_anew(clock):
  view = View("run", {"rl": 10, "warm_start": 50}, clock=clock)
  view.add([step(50, loss=9.0) | {"phase": "warm_start"}], anew=False)
  assert "warm_start 50/50" in text_of(view)
  view.add([step(1, reward=0.5)], anew=False)
  text = text_of(view)
  assert "rl 1/10" in text
  assert "loss" not in text
  view.add([step(1, turns=4.0)], anew=True)
  text = text_of(view)
  assert "turns" in text
  assert "reward" not in text


def test_staleness_drops_and_roles_of_the_metrics(clock):
  view = View("run", {}, clock=clock)
  view.add(
    [
      step(1, staleness_0=1.0, tokens=100.0, drop_stale=2.0, idle_actor=0.5),
      step(
        2,
        staleness_0=0.5,
        staleness_1=0.5,
        tokens=300.0,
        drop_stale=3.0,
        idle_actor=0.25,
        tokens_per_second_actor=1234.5,
      ),
    ],
    anew=False,
  )
  clock.now = 1063.0
  text = text_of(view)
  # (100 · 1 + 300 · 0.5) / 400 of the tokens are 0 versions old.
  assert row(text, "0", 2) == ["62", "%"]
  assert row(text, "1", 2) == ["38", "%"]
  assert row(text, "stale", 1) == ["3"]
  assert row(text, "actor", 3) == ["25", "%", "1234"]


def role(**values):
  return {
    "role": "actor",
    "index": 0,
    "pid": 77,
    "age": 1.2,
    "idle_seconds": 130.0,
    "counters": {},
    **values,
  }


def test_roles_and_queue_as_the_queue_says(clock):
  view = View("run", {}, clock=clock)
  status = {"state": "running", "ready": 3, "drops": {"stale": 4}}
  counters = {"idle_seconds": 10.0, "sampled_tokens": 1000, "seconds": 80.0}
  view.queue(status, [role(counters=counters)])
  text = text_of(view)
  # One look says nothing of shares and rates.
  assert row(text, "actor 0", 8) == [
    *("77", "1", "s", "ago", "2:10", "ago", "–", "–")
  ]
  assert row(text, "ready", 1) == ["3"]
  assert row(text, "stale", 1) == ["4"]
  counters = {"idle_seconds": 12.5, "sampled_tokens": 1500, "seconds": 90.0}
  for _ in range(2):  # Asked again before the next sign of life.
    view.queue(status, {"roles": [role(counters=counters)]})
    assert row(text_of(view), "actor 0", 9)[-3:] == ["25", "%", "50"]
  # Started anew: its counters are another process's.
  counters = {"idle_seconds": 1.0, "sampled_tokens": 5, "seconds": 4.0}
  view.queue(status, [role(counters=counters)])
  assert row(text_of(view), "actor 0", 8)[-2:] == ["–", "–"]
  view.queue(None, None, "http://x/status doesn't answer")
  text = text_of(view)
  assert "doesn't answer" in text
  assert "actor" not in text


def test_scores_have_their_interval(clock):
  view = View("run", {}, clock=clock)
  view.score(15, [0.5, 0.25, None])
  assert "version 15: reward 0.5 [0.25, –]" in text_of(view)


json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.sampled_from([10**400, math.inf, math.nan])
  | st.floats()
  | st.text(),
  lambda inner: (
    st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
  ),
  max_leaves=12,
)
NAMES = st.sampled_from(
  ["time", "phase", "step", "reward", "staleness_1", "drop_x", "idle_y", "z"]
)


@hypothesis.settings(max_examples=50)
@given(
  status=json_values,
  roles=json_values
  | st.lists(st.dictionaries(st.sampled_from([*role()]), json_values)),
  lines=st.lists(st.dictionaries(NAMES, json_values), max_size=4),
)
def test_whatever_comes_there_is_a_frame(status, roles, lines):
  view = View("\x1b[2J", {"rl": 3}, clock=Clock())
  view.add(lines, anew=False)
  view.queue(status, roles, "\x1b]0;title\x07")
  text = text_of(view)
  assert "\x1b" not in text
  assert "\x07" not in text


def test_markup_and_escapes_stay_text(clock):
  view = View("[red]x", {}, clock=clock)
  view.add([step(1, **{"[bold]\x1b[31m": 1.0})], anew=False)
  text = text_of(view)
  assert "[red]x" in text
  assert "[bold]·[31m" in text
  assert clean("a" * 90, 10) == "a" * 9 + "…"


def test_sparks():
  assert spark([0.0, 1.0, 0.5]) == "▁█▅"  # 3.5 of 7 rounds to the even 4.
  assert spark([2.0, 2.0]) == "▁▁"


def test_steps_are_read_from_either_configuration():
  assert planned({"warm_start": {"steps": 5}, "rl": {"steps": 7}}) == {
    "warm_start": 5,
    "rl": 7,
  }
  assert planned({"steps": 9, "rl": None}) == {"training": 9}


def test_drops_are_summed_over_restarts():
  # 0 → 2 → 5, begun again, 1 → 4: 5 + 4 in all.
  lines = [step(n, drop_stale=v) for n, v in enumerate((2.0, 5.0, 1.0, 4.0))]
  (points,) = asynchrony.dropped(lines).values()
  assert [v for _, v in points] == [2.0, 5.0, 6.0, 9.0]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=5))
def test_shares_of_ages_sum_to_one(steps):
  lines = []
  for n, raw in enumerate(steps):
    total = sum(raw)
    if total < 1e-3:
      continue
    shares = {f"staleness_{i}": x / total for i, x in enumerate(raw)}
    lines.append(step(n, tokens=float(n + 1), staleness_mean=3.0, **shares))
  found = asynchrony.staleness(lines)
  assert not lines or math.isclose(sum(found.values()), 1.0)


# The file.


def test_lines_are_read_once_and_torn_ones_when_they_are_whole(tmp_path):
  path = tmp_path / "metrics.jsonl"
  tail = MetricsTail(path)
  assert tail.read() == ([], False)
  whole = "".join(json.dumps(step(n)) + "\n" for n in range(5)).encode()
  got = []
  for cut in range(0, len(whole) + 1, 7):
    path.write_bytes(whole[:cut])
    news = tail.read()
    assert not news.anew
    got += news.lines
  path.write_bytes(whole)
  got += tail.read().lines
  assert [line["step"] for line in got] == [0, 1, 2, 3, 4]
  with open(path, "ab") as file:
    file.write(b'nonsense\n[1]\n{"step": 5}\n')
  assert [line["step"] for line in tail.read().lines] == [5]
  assert tail.refused == 2


def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path):
  path = tmp_path / "metrics.jsonl"
  tail = MetricsTail(path)
  lines = [json.dumps(step(n)) + "\n" for n in range(4)]
  path.write_text("".join(lines))
  assert len(tail.read().lines) == 4
  # A resumed run leaves out what came after its commit.
  path.write_text("".join(lines[:2]))
  news = tail.read()
  assert news.anew
  assert [line["step"] for line in news.lines] == [0, 1]
  # Another run, by now with more lines.
  path.write_text("".join(json.dumps(step(n + 90)) + "\n" for n in range(5)))
  news = tail.read()
  assert news.anew
  assert [line["step"] for line in news.lines] == [90, 91, 92, 93, 94]
  path.unlink()
  assert tail.read() == ([], True)
