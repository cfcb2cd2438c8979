"""The program that lets a chat model show the tasks of a run."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.data.synthesis.chat_server import ChatServer
from tests.launch.programs import train

ROOT = pathlib.Path(__file__).parents[2]


def clue_by_clue(request):
  """Searches for each clue, then answers with the first that was shown."""
  time.sleep(0.02)
  talk = request["messages"]
  clues = talk[1]["content"].split(" ; ")
  said = sum(m["role"] == "assistant" for m in talk)
  message = {"role": "assistant", "content": None}
  if said < len(clues):
    arguments = json.dumps({"query": clues[said]})
    message["tool_calls"] = [
      {
        "id": "c",
        "type": "function",
        "function": {"name": "search_corpus", "arguments": arguments},
      }
    ]
  else:
    seen = " ".join(m["content"] for m in talk if m["role"] == "tool")
    message["content"] = re.findall(r"<c\d+>", seen)[0]
  return json.dumps({"choices": [{"message": message}]}).encode()


def command(config, url, out, *flags):
  return [
    *(sys.executable, "-m", "launch.demonstrate", f"--config={config}"),
    *(f"--teacher={url}", "--model=m", f"--out={out}", *flags),
  ]


def demonstrate(*arguments):
  return subprocess.run(
    command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=300
  )


@pytest.fixture
def config(rl_loop, tmp_path):
  path = tmp_path / "loop.py"
  sizes = "  w.episodes, w.steps, c.rl.steps = 100, 3, 0\n  return c\n"
  path.write_text(
    rl_loop.rstrip().removesuffix("return c").rstrip() + "\n" + sizes
  )
  return path


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_goes_on(config, tmp_path):
  out = tmp_path / "shown"
  with ChatServer(clue_by_clue) as server:
    with subprocess.Popen(
      command(config, server.url, out),
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
    ) as running:
      limit = time.monotonic() + 120
      while time.monotonic() < limit and not any(out.glob("groups/*.jsonl")):
        time.sleep(0.02)
      os.kill(running.pid, signal.SIGKILL)
    assert len(list(out.glob("groups/*.jsonl"))) == 1
    before = len(server.requests)
    done = demonstrate(config, server.url, out)
    assert done.returncode == 0, done.stderr
    # Three turns an episode: only the other 36 were played.
    assert len(server.requests) - before == 36 * 3
  assert "100 episodes in" in done.stdout
  assert "warm_start.filter would keep {'strong': " in done.stdout


@pytest.mark.parametrize(
  ("flags", "reason"),
  [
    (("--teacher=",), "--teacher is missing"),
    (("--teacher=ftp://x",), "it must be like http://"),
    (("--config=configs/sft_tiny.py",), "no run of agents"),
    (
      (f"--config.problem={'tests.actors.echo_problem:Problem'}",),
      "without `system` and `tools`",
    ),
  ],
)
def test_wrong_flags_are_one_line(config, tmp_path, flags, reason):
  done = demonstrate(config, "http://127.0.0.1:9", tmp_path / "out", *flags)
  assert done.returncode == 1
  assert reason in done.stderr.strip().splitlines()[-1]
  assert not (tmp_path / "out").exists()


def test_what_cannot_be_shown_costs_no_run(config, tmp_path):
  run_dir = tmp_path / "run"
  done = train(
    config,
    run_dir,
    f"--config.warm_start.demonstrations={tmp_path / 'none'}",
    stderr=subprocess.PIPE,
  )
  _, err = done.communicate(timeout=300)
  assert done.returncode == 1
  assert "holds no recorded groups" in err.strip().splitlines()[-1]
  assert not run_dir.exists()
