"""What happens in a run of small processes, and what a test tells them."""

import os
import pathlib


def folder(config) -> pathlib.Path:
  """Where a run's files are; environment variables don't reach its nodes."""
  return pathlib.Path(config.corpus.path)


def started(config, name: str, *words: str) -> None:
  """A line "name pid words" in the file `starts`, at once."""
  with open(folder(config) / "starts", "a") as file:
    file.write(" ".join([name, str(os.getpid()), *words]) + "\n")
