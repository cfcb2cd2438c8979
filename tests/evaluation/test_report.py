import html.parser
import re

import numpy as np
import pytest

from arl_jax.evaluation.report import write_report
from arl_jax.evaluation.scores import Evaluation
from arl_jax.types import (
  Episode,
  Event,
  Reward,
  Role,
  Segment,
  StopReason,
  Task,
)

HOSTILE = '<script>alert(\'x\')</script>" onload="x" & \x00\u202e\ud800'
WORDS = ["ask", " find", " chunk7", " junk", HOSTILE, "\n", "end"]


def segment(ids, roles, carried=0, **kwargs):
  ids = np.asarray(ids, np.int32)
  roles = np.asarray(roles, np.uint8)
  sampled = (roles == Role.SAMPLED) & (np.arange(len(ids)) >= carried)
  return Segment(
    ids=ids,
    roles=roles,
    sampled=sampled,
    behaviour_logp=np.where(sampled, -0.25, 0).astype(np.float32),
    policy_version=np.where(sampled, 7, -1).astype(np.int32),
    **kwargs,
  )


def episode(segments, events=()):
  return Episode(
    task_id="t",
    rollout_index=0,
    segments=segments,
    events=events,
    stop_reason=StopReason.ANSWERED,
    outcome={"pruned": [HOSTILE]},
    turns=2,
    reward=Reward(total=0.5, parts={HOSTILE: 0.5}),
  )


TASK = Task(task_id="t", prompt=HOSTILE, truth={})
PRUNED = episode(
  (
    segment([0, 1, 2, 3, 4], [0, 1, 2, 2, 3]),
    segment([0, 1, 2, 6], [0, 1, 2, 1], 3, parent=0, reason="prune"),
    segment([0, 6], [0, 1], agent="helper", trainable=False, parent=0),
    segment([0, 1, 6], [0, 1, 1], 2, parent=1, reason="prune"),
  ),
  (
    Event(turn=0, kind="rewrite", data={"segment": 1, "removed": [[3, 4]]}),
    Event(turn=1, kind="rewrite", data={"segment": 3, "removed": [[2, 3]]}),
    # What another environment may write there is no reason to fail.
    Event(turn=1, kind="rewrite", data={"segment": 99, "removed": [[0, 1]]}),
    Event(turn=1, kind="rewrite", data={"segment": 0, "removed": [[0, 1]]}),
    Event(turn=1, kind="rewrite", data={}),
  ),
)


class Page(html.parser.HTMLParser):
  """Tags, and the token spans of each segment as (text, classes, title)."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes = set(), []
    self.segments = []
    self.span = None
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    values = dict(attributes)
    self.tags.add(tag)
    self.attributes += attributes
    if values.get("class") == "tokens":
      self.segments.append([])
    if tag == "span" and "title" in values:
      self.span = values

  def handle_data(self, data):
    if self.span is not None:
      self.segments[-1].append((data, self.span["class"], self.span["title"]))

  def handle_endtag(self, tag):
    self.span = None


def evaluation(version, name, **values):
  interval = [version / 10, version / 10 - 0.05, version / 10 + 0.05]
  scores = {"reward": interval, name: interval}
  given = {"version": version, "lineage": name, "checksum": name, **values}
  return Evaluation(scores=scores, seconds=1.0, **given)


def write(path, **kwargs):
  values = {
    "title": "run",
    "config": {},
    "summary": {},
    "metrics": [],
    "episodes": [],
    "decode": WORDS.__getitem__,
    **kwargs,
  }
  write_report(path / "report.html", **values)
  text = (path / "report.html").read_text("utf-8")
  return text, Page(text)


def test_tokens_carry_role_version_and_prune_marks(tmp_path):
  _, page = write(tmp_path, episodes=[("after", TASK, PRUNED)])
  # Depth first: 0, its child 1, 1's child 3, then 0's other child 2.
  first, second, third, fourth = page.segments
  assert [x[1] for x in first] == [
    "prompt",
    "sampled",
    "tool",
    "tool pruned",
    "forced",
  ]
  assert first[1][0] == " find"
  assert first[1][2] == "sampled · logp -0.250 · version 7"
  assert [x[1] for x in second] == [
    "prompt",
    "sampled carried",
    "tool pruned",
    "sampled",
  ]
  assert [x[1] for x in third] == ["prompt", "sampled carried", "sampled"]
  # Frozen agents' tokens are not trained.
  assert [x[1] for x in fourth] == ["prompt", "sampled carried"]


def test_hostile_text_stays_text(tmp_path):
  text, page = write(
    tmp_path,
    title=HOSTILE,
    config={HOSTILE: HOSTILE},
    summary={"before": {HOSTILE: [0, 0, 0]}, "seconds": {HOSTILE: 1}},
    metrics=[
      {
        "phase": HOSTILE,
        "step": i,
        HOSTILE: i,
        f"drop_{HOSTILE}": i,
        f"idle_$_{HOSTILE}": i,
        f"tokens_per_second__{HOSTILE}": i,
      }
      for i in range(3)
    ],
    episodes=[("after", TASK, PRUNED)],
    evaluations=[evaluation(i, HOSTILE) for i in range(3)],
    notes=[HOSTILE],
  )
  assert "script" not in page.tags
  assert not any(name.startswith("on") for name, _ in page.attributes)
  assert "\x00" not in text
  assert page.segments[0][4][0].startswith("<script>alert('x')</script>")


def test_nothing_is_fetched(tmp_path):
  metrics = [{"phase": "rl", "step": i, "reward": i} for i in range(3)]
  text, page = write(tmp_path, metrics=metrics)
  assert "default-src 'none'" in text
  sources = [v for k, v in page.attributes if k in ("src", "srcset", "href")]
  assert len(sources) == 1
  assert all(v.startswith("data:image/png;base64,") for v in sources)
  assert not re.search(r"url\(|@import|https?://", text)


def test_before_and_after_with_intervals(tmp_path):
  text, _ = write(
    tmp_path,
    summary={
      "before": {
        "reward": [0.25, 0.2, 0.3],
        "turns": [5, 4, 6],
        "prune_accuracy": [None, None, None],
      },
      "after": {
        "reward": [0.5, 0.45, 0.55],
        "turns": [4.5, 4.0, 5.0],
        "prune_accuracy": [0.8, 0.7, 0.9],
      },
      "seconds": {"rl": 123.4},
      "tokens_per_second": {"rollout": 1234567.0},
    },
  )
  assert "0.250 <small>[0.200, 0.300]</small>" in text
  assert "<td>● +0.250</td>" in text
  assert "<td>−0.500</td>" in text
  assert "– <small>[–, –]</small>" in text
  assert "123.4" in text
  assert "1.23e+06" in text


def test_scores_by_version_say_which_stand(tmp_path):
  text, _ = write(
    tmp_path,
    evaluations=[
      evaluation(0, "turns"),
      evaluation(5, "turns"),
      evaluation(10, "turns", abandoned=True),
      evaluation(10, "turns", lineage="b"),
      Evaluation(
        version=15,
        lineage="b",
        checksum="x",
        scores={},
        seconds=0.0,
        skipped="no device",
      ),
    ],
  )
  assert "3 versions are scored on the held-out tasks." in text
  assert "The best is 10, with reward 1.000." in text
  assert 'alt="Scores by version: reward, turns"' in text
  rows = re.findall(r"<tr><td>(\d+)</td>.*?<td>([^<]*)</td></tr>", text)
  assert rows == [
    ("0", "lineage turns"),
    ("5", "lineage turns"),
    ("10", "lineage turns, given up"),
    ("10", "lineage b, best"),
    ("15", "lineage b, skipped: no device"),
  ]


def test_one_score_is_no_curve(tmp_path):
  text, _ = write(tmp_path, evaluations=[evaluation(0, "turns")])
  assert "1 version is scored" in text
  assert "<img" not in text


def test_curves_take_what_is_there(tmp_path):
  metrics = [
    {"phase": "sft", "time": 1.0, "step": i, "loss": 1 / (i + 1), "$x": i}
    for i in range(40)
  ]
  metrics += [{"phase": "sft", "step": 41, "loss": None, "note": "text"}]
  metrics += [{"phase": "evaluation", "step": 0, "reward": 0.1}]
  text, _ = write(tmp_path, metrics=metrics)
  assert 'alt="Curves of sft: loss, $x"' in text
  assert "Learning curves: evaluation" not in text


def test_an_empty_run_has_a_report_too(tmp_path):
  text, page = write(tmp_path)
  assert "<h1>run</h1>" in text
  assert not page.segments


def test_failed_write_names_the_file(tmp_path):
  with pytest.raises(OSError, match=r"can't write .*report\.html"):
    write(tmp_path / "missing")
