"""Lines that outlive crashes, and which of them stand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.evaluation.scores import ScoreLog, path_of, read, valid


def scores(reward):
  return {"reward": [reward, reward - 0.1, reward + 0.1]}


@pytest.fixture
def path(tmp_path):
  found = path_of(tmp_path)
  found.parent.mkdir()
  return found


def versions(path):
  return [(e.version, e.lineage, e.reward) for e in valid(read(path))]


def test_a_run_that_goes_back_gives_up_what_came_after(path):
  log = ScoreLog(path)
  log.switch("a", 0)
  for version in (0, 5, 10):
    log.add(version, "a", f"a{version}", scores(version / 10), 1.0)
  log.switch("b", 7)
  assert versions(path) == [(0, "a", 0.0), (5, "a", 0.5)]
  assert log.lineage == "b"
  # 10 of "a" was given up; 5 is an ancestor, and has the same weights.
  assert not log.has(10, "b", "b10")
  assert log.has(5, "b", "a5")
  assert not log.has(5, "b", "b5")
  log.add(10, "b", "b10", scores(0.3), 1.0)
  assert versions(path)[-1] == (10, "b", 0.3)
  # And again, behind both.
  log.switch("c", 4)
  assert versions(path) == [(0, "a", 0.0)]
  assert [e.abandoned for e in read(path)] == [False, True, True, True]


def test_the_version_gone_back_to_stands(path):
  log = ScoreLog(path)
  log.switch("a", 0)
  log.add(5, "a", "a5", scores(0.5), 1.0)
  log.switch("b", 5)
  assert versions(path) == [(5, "a", 0.5)]
  # Other weights under its number take its place.
  log.add(5, "b", "b5", scores(0.6), 1.0)
  assert versions(path) == [(5, "b", 0.6)]


def test_a_skipped_version_has_no_score_but_is_done(path):
  log = ScoreLog(path)
  log.switch("a", 0)
  log.skip(5, "a", "x", "a device was lost")
  assert versions(path) == []
  assert read(path)[0].skipped == "a device was lost"
  assert log.has(5, "a", "x")
  # The run that goes on may have more luck with the same weights.
  log.switch("b", 5)
  assert not log.has(5, "b", "x")


def test_a_torn_line_goes_and_the_next_one_is_whole(path):
  log = ScoreLog(path)
  log.switch("a", 0)
  log.add(0, "a", "x", scores(0.5), 2.5)
  whole = path.read_bytes()
  for cut in range(1, 40, 7):
    path.write_bytes(whole + b'{"version": 5, "lineage": "a", "checksum"'[:cut])
    assert versions(path) == [(0, "a", 0.5)]
    again = ScoreLog(path)
    assert path.read_bytes() == whole
    again.add(5, "a", "y", scores(0.7), 1.0)
    assert versions(path) == [(0, "a", 0.5), (5, "a", 0.7)]
    assert read(path)[0].seconds == 2.5


@pytest.mark.parametrize(
  "line",
  [
    "[]",
    "nonsense",
    '{"version": 1}',
    '{"version": -1, "lineage": "a", "checksum": "x", "skipped": "y"}',
    '{"version": 1, "lineage": "a", "checksum": "x", "scores": [], "seconds":'
    " 1}",
    '{"version": 1, "lineage": "a", "checksum": "x", "scores": {"reward":'
    ' [1, 2]}, "seconds": 1}',
    '{"since": "0", "lineage": "a"}',
  ],
)
def test_other_lines_are_refused_by_number(path, line):
  ScoreLog(path).switch("a", 0)
  with open(path, "a") as file:
    file.write(line + "\n")
  with pytest.raises(ValueError, match=r"evaluations\.jsonl:2 is"):
    read(path)


@given(
  st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 12), max_size=5)),
    min_size=1,
    max_size=5,
  )
)
def test_only_what_led_to_the_last_lineage_stands(tmp_path_factory, lineages):
  path = path_of(tmp_path_factory.mktemp("run"))
  path.parent.mkdir()
  log = ScoreLog(path)
  alive: dict[int, str] = {}
  for i, (since, scored) in enumerate(lineages):
    log.switch(f"l{i}", since)
    alive = {v: name for v, name in alive.items() if v <= since}
    for version in sorted({v for v in scored if v >= since}):
      log.add(version, f"l{i}", f"{i}", scores(0.0), 1.0)
      alive[version] = f"l{i}"
  assert {e.version: e.lineage for e in valid(read(path))} == alive
  for line in path.read_text().splitlines():
    assert json.loads(line)["time"] > 0
