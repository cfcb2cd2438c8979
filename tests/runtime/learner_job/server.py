"""A server that nobody asks for anything."""

import time


def run(config, index, should_stop) -> None:
  while not should_stop():
    time.sleep(0.05)
