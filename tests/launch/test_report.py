"""launch.report and launch.watch on runs of all kinds, dead ones included."""

import dataclasses
import http.server
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from arl_jax.evaluation.run_record import RunRecord, chosen, report
from arl_jax.evaluation.scores import ScoreLog, path_of
from arl_jax.observability.metrics import MetricsWriter
from arl_jax.observability.run_directory import RunDirectory
from arl_jax.records import to_json
from arl_jax.runtime.config import Config
from arl_jax.runtime.offline_config import OfflineConfig
from arl_jax.types import Episode, Group, Reward, Segment, StopReason, Task

ROOT = pathlib.Path(__file__).parents[2]


def opened(path, config, data=None):
  resolved = dataclasses.asdict(config)
  del resolved["run_dir"]
  RunDirectory.open(path, config=resolved, data=data).close()
  return path


@pytest.fixture
def run(tmp_path):
  """In many processes, going on: step 12 of 100."""
  config = Config()
  config.corpus.path = str(tmp_path / "gone")
  path = opened(tmp_path / "run", config, {"corpus": "x"})
  with MetricsWriter(path) as writer:
    writer.write(1, "warm_start", {"loss": 2.0})
    for n in range(1, 13):
      values = {"reward": n / 20, "staleness_0": 0.75, "staleness_2": 0.25}
      values |= {"drop_stale": float(n), "idle_actor": 0.5, "tokens": 10.0}
      writer.write(n, "rl", values | {"idle_server": n / 12})
  with open(path / "metrics.jsonl", "ab") as file:
    file.write(b'{"time": 1')
  return path


def launch(module, *arguments):
  return subprocess.run(
    [sys.executable, "-m", module, *map(str, arguments)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def score(path, version, reward, lineage="a"):
  log = ScoreLog(path_of(path))
  interval = [reward, reward - 0.1, reward + 0.1]
  scores = {"reward": interval, "prune_accuracy": [None, None, None]}
  log.add(version, lineage, f"{lineage}{version}", scores, 1.5)
  group = Group(
    group_id=f"{lineage}/{version}/t", task=TASK, episodes=(EPISODE,)
  )
  (path / f"evaluation/{version}.jsonl").write_text(
    json.dumps(to_json(group)) + "\n"
  )


TASK = Task(task_id="t", prompt="where", truth={})
EPISODE = Episode(
  task_id="t",
  rollout_index=0,
  segments=(
    Segment(
      ids=np.array([4, 5], np.int32),
      roles=np.array([0, 1], np.uint8),
      sampled=np.array([False, True]),
      behaviour_logp=np.array([0.0, -0.5], np.float32),
      policy_version=np.array([-1, 3], np.int32),
    ),
  ),
  events=(),
  stop_reason=StopReason.ANSWERED,
  outcome={},
  turns=1,
  reward=Reward(total=0.5, parts={}),
)


def test_a_run_that_died_with_scores(run):
  path_of(run).parent.mkdir()
  ScoreLog(path_of(run)).switch("a", 0)
  score(run, 0, 0.1)
  score(run, 5, 0.6)
  score(run, 10, 0.9)
  ScoreLog(path_of(run)).switch("b", 7)
  score(run, 10, 0.4, "b")
  log = ScoreLog(path_of(run))
  log.skip(15, "b", "x", "<no device>")
  text = report(run).read_text()
  assert "The run hasn&#x27;t ended: step 12 of 100 of rl" in text
  # 10 of lineage "a" was given up, so 5 is the best.
  assert "3 versions are scored" in text
  assert "The best is 5, with reward 0.600." in text
  assert text.count("given up") == 1
  assert "skipped: &lt;no device&gt;" in text
  assert 'alt="Scores by version: reward"' in text
  # 0.75 · 120 of 120 tokens; 12 drops; idle servers: mean of 1/12 … 12/12.
  assert "<td>0 versions old</td><td>0.750</td>" in text
  assert "<td>2 versions old</td><td>0.250</td>" in text
  assert "<td>stale</td><td>12.000</td>" in text
  assert "<td>server</td><td>0.542</td>" in text
  assert (
    'alt="Asynchrony: trained tokens by staleness, dropped, by reason, idle,'
    ' share of time by role"'
  ) in text
  # Drawn there, and not once more.
  assert 'alt="Curves of rl: reward, tokens"' in text
  # Its corpus is gone, and with it the tokenizer.
  assert "version 5, the best" in text
  assert "Tokens are shown as ids, without a tokenizer" in text
  assert ">⟨5⟩</span>" in text


def test_a_run_from_files_that_ended(tmp_path):
  path = opened(tmp_path / "run", OfflineConfig(steps=3))
  with MetricsWriter(path) as writer:
    for n in range(1, 4):
      writer.write(n, "training", {"loss": 1.0 / n, "seconds": 0.5})
  # What launch.train leaves: "seconds" is a number there.
  (path / "summary.json").write_text('{"loss": 0.3333, "seconds": 0.5}')
  text = report(path).read_text()
  assert "<td>loss</td><td>0.333</td>" in text
  assert "<td>seconds</td><td>0.500</td>" in text
  assert 'alt="Curves of training: loss, seconds"' in text
  assert "Before and after" not in text
  assert "hasn" not in text


def test_a_run_that_ended_shows_before_and_after(run):
  summary = {
    "before": {"reward": [0.1, 0.0, 0.2]},
    "after": {"reward": [0.5, 0.4, 0.6]},
    "seconds": {"rl": 12.0},
  }
  (run / "summary.json").write_text(json.dumps(summary))
  lines = [
    json.dumps(to_json(Group(group_id=name, task=TASK, episodes=(EPISODE,))))
    for name in ("before/6/t", "after/106/t")
  ]
  (run / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
  text = report(run, decode=lambda i: f"word{i}").read_text()
  assert "<td>● +0.400</td>" in text
  assert text.index("after RL") < text.index("before RL")
  assert text.count(">word5</span>") == 2
  assert "hasn" not in text


def test_nothing_but_a_configuration(tmp_path):
  path = opened(tmp_path / "run", Config())
  assert "The run has no metrics yet." in report(path).read_text()


def test_trajectories_that_cannot_be_read_are_said(run):
  (run / "trajectories.jsonl").write_text('{"kind": "Group"}\n')
  text = report(run).read_text()
  assert "Trajectories can&#x27;t be shown: record has schema_version" in text


def test_half_of_the_shown_ones_were_rewritten():
  def episode(segments):
    return dataclasses.replace(
      EPISODE, segments=EPISODE.segments * segments, outcome={}
    )

  pairs = [(TASK, episode(n)) for n in (1, 1, 1, 2, 2)]
  assert chosen(pairs, 3) == [pairs[3], pairs[0], pairs[1]]
  assert chosen(pairs, 0) == []


def test_no_run_is_one_line(tmp_path):
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(ValueError, match="holds a list, no object"):
    RunRecord(tmp_path)
  done = launch("launch.report", tmp_path / "missing")
  assert done.returncode == 1
  assert done.stderr.count("\n") == 1
  assert "missing holds no run: it has no config.json" in done.stderr
  done = launch("launch.report")
  assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_program_writes_the_report(run):
  done = launch("launch.report", run)
  assert done.returncode == 0, done.stderr
  assert done.stdout == f"{run}/report.html\n"
  assert (run / "report.html").stat().st_size > 10_000


# launch.watch


def test_a_frame_of_a_run(run):
  path_of(run).parent.mkdir()
  ScoreLog(path_of(run)).switch("a", 0)
  score(run, 5, 0.6)
  done = launch("launch.watch", run, "--once")
  assert done.returncode == 0, done.stderr
  assert "rl 12/100" in done.stdout
  assert "version 5: reward 0.6 [0.5, 0.7]" in done.stdout


ANSWERS = {
  "/status": {"state": "running", "ready": 7},
  "/roles": [
    {"role": "actor", "index": 1, "pid": 5, "age": 1.0, "idle_seconds": 2.0}
  ],
}


class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    allowed = self.headers["Authorization"] == "Bearer secret"
    body = json.dumps(ANSWERS[self.path]).encode() if allowed else b""
    self.send_response(200 if allowed else 401)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *_):
    pass


def test_the_queue_is_asked_with_the_token(run, tmp_path):
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    token = tmp_path / "token"
    token.write_text("secret\n")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    done = launch(
      *("launch.watch", run, "--once"),
      *(f"--queue={url}", f"--token_file={token}"),
    )
    assert done.returncode == 0, done.stderr
    assert "actor 1" in done.stdout
    assert "running" in done.stdout
    done = launch("launch.watch", run, "--once", f"--queue={url}")
    assert "answers with status 401" in " ".join(done.stdout.split())
    assert "rl 12/100" in done.stdout
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
  done = launch("launch.watch", tmp_path / "missing", "--once")
  assert (done.returncode, done.stderr.count("\n")) == (1, 1)
  assert "missing is no folder; name that of a run" in done.stderr
