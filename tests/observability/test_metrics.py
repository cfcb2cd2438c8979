import json
import logging
import math
import subprocess
import sys

import pytest
from tensorboardX.proto import event_pb2

from arl_jax.observability import metrics


def events(folder):
  """(step, tag, value) of all TensorBoard files, in order of name."""
  found = []
  for path in sorted((folder / "tensorboard").iterdir()):
    content = path.read_bytes()
    while content:
      # A record: length, crc of it, payload, crc of it.
      length = int.from_bytes(content[:8], "little")
      event = event_pb2.Event.FromString(content[12 : 12 + length])
      found += [
        (event.step, v.tag, v.simple_value) for v in event.summary.value
      ]
      content = content[16 + length :]
  return found


def test_lines_are_on_disk_at_once_and_in_tensorboard(tmp_path):
  with metrics.MetricsWriter(tmp_path / "run") as writer:
    writer.write(1, "rl", {"reward": 0.5, "turns": 3})
    (line,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    writer.write(2, "rl", {"reward": 0.75})
    assert events(tmp_path / "run") == [
      (1, "rl/reward", 0.5),
      (1, "rl/turns", 3.0),
      (2, "rl/reward", 0.75),
    ]
  assert line.pop("time") > 0
  assert line == {"phase": "rl", "step": 1, "reward": 0.5, "turns": 3.0}
  assert writer.dropped == 0


def test_nonfinite_numbers_are_null(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(0, "sft", {"a": math.nan, "b": math.inf, "c": 1.0})

  def refuse(constant):
    raise AssertionError(constant)

  text = (tmp_path / "metrics.jsonl").read_text()
  line = json.loads(text, parse_constant=refuse)
  assert (line["a"], line["b"], line["c"]) == (None, None, 1.0)


def test_refuses_names_of_its_own_fields(tmp_path):
  with (
    metrics.MetricsWriter(tmp_path) as writer,
    pytest.raises(ValueError, match="'step' is a field"),
  ):
    writer.write(0, "rl", {"step": 1.0})


def test_torn_last_line_is_ignored_and_then_replaced(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"time": 1, "phase": "rl", "step": 1}\n{"time": 2, "ph')
  assert [line["step"] for line in metrics.read(path)] == [1]
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(2, "rl", {})
  assert [line["step"] for line in metrics.read(path)] == [1, 2]


def test_broken_line_elsewhere_is_an_error_that_names_it(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
    metrics.read(path)


def test_resumed_run_drops_lines_after_its_checkpoint(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(5, "sft", {"loss": 1.0})
    for step in range(4):
      writer.write(step, "rl", {"reward": float(step), "bad": math.nan})
  with metrics.MetricsWriter(
    tmp_path, keep=lambda x: x["phase"] != "rl" or x["step"] < 2
  ) as writer:
    writer.write(2, "rl", {"reward": 20.0})
  lines = metrics.read(tmp_path / "metrics.jsonl")
  assert [(x["phase"], x["step"]) for x in lines] == [
    ("sft", 5),
    ("rl", 0),
    ("rl", 1),
    ("rl", 2),
  ]
  assert events(tmp_path) == [
    (5, "sft/loss", 1.0),
    (0, "rl/reward", 0.0),
    (1, "rl/reward", 1.0),
    (2, "rl/reward", 20.0),
  ]


def test_failed_writes_are_counted_warned_of_once_and_never_raise(
  tmp_path, caplog
):
  # A file where the folder should be: every write fails.
  (tmp_path / "run").write_text("")
  with (
    caplog.at_level(logging.WARNING, logger="absl"),
    metrics.MetricsWriter(tmp_path / "run") as writer,
  ):
    writer.write(0, "rl", {"reward": 1.0})
    writer.write(1, "rl", {"reward": 1.0})
  assert writer.dropped == 2
  assert len(caplog.records) == 1
  assert "training goes on without" in caplog.text


def test_file_limit_leaves_whole_lines_and_lets_the_caller_go_on(tmp_path):
  # The kernel refuses to let files grow past the limit, in the middle of a
  # line, as on a full disk; then there is room again.
  code = """
import resource, signal, sys
from arl_jax.observability import metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = metrics.MetricsWriter(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(30):
  writer.write(step, "rl", {"reward": 1.0})
assert 0 < writer.dropped < 30, writer.dropped
resource.setrlimit(
  resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
)
writer.write(30, "rl", {"reward": 1.0})
writer.close()
print(writer.dropped)
"""
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  steps = [x["step"] for x in metrics.read(tmp_path / "metrics.jsonl")]
  written = 30 - int(done.stdout)
  assert steps == [*range(written), 30]
  assert done.stderr.count("training goes on without") == 1
