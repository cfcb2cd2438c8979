import io

import pytest

from arl_jax.observability.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_plain_lines_are_first_last_and_one_per_interval():
  stream, clock = io.StringIO(), Clock()
  with Progress(stream, interval=10, clock=clock) as progress:
    progress.phase("warm start", 100)
    for step in range(1, 26):
      clock.now += 1
      progress.update(step, loss=1 / step)
    progress.phase("rl", 2)
    clock.now += 3700
    progress.update(2, reward=0.5, tokens=12345.678)
  # At 1 step a second: shown at 1 s, 11 s, 21 s, and the last one.
  assert stream.getvalue().splitlines() == [
    "warm start 1/100  0:01 + 1:39 left  loss 1",
    "warm start 11/100  0:11 + 1:29 left  loss 0.09091",
    "warm start 21/100  0:21 + 1:19 left  loss 0.04762",
    "warm start 25/100  0:25 + 1:15 left  loss 0.04",
    "rl 2/2  1:01:40  reward 0.5  tokens 1.235e+04",
  ]


def test_resumed_phase_counts_its_own_steps_for_the_rest():
  stream, clock = io.StringIO(), Clock()
  with Progress(stream, clock=clock) as progress:
    progress.phase("rl", 60, start=50)
    clock.now += 8
    # 2 steps in 8 s, 8 more to go.
    progress.update(52)
  assert stream.getvalue() == "rl 52/60  0:08 + 0:32 left\n"


def test_last_line_comes_also_when_the_run_fails():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(stream, clock=clock)

  def work():
    with progress:
      progress.phase("rl", 3)
      progress.update(1)
      progress.update(2)
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    work()
  assert stream.getvalue().splitlines()[-1].startswith("rl 2/3")


def test_terminal_shows_bars_with_numbers():
  stream = Terminal()
  with Progress(stream) as progress:
    progress.phase("[rl]", 4)
    progress.update(4, reward=0.25)
    progress.phase("evaluation", 1)
    progress.update(1)
  text = stream.getvalue()
  assert "[rl]" in text
  assert "4/4" in text
  assert "reward 0.25" in text
  assert "evaluation" in text


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_update_without_phase_and_bad_numbers(stream):
  progress = Progress(stream)
  with pytest.raises(RuntimeError, match="before"):
    progress.update(1)
  with pytest.raises(ValueError, match="total -1"):
    progress.phase("rl", -1)
  with pytest.raises(ValueError, match="interval 0"):
    Progress(stream, interval=0)
