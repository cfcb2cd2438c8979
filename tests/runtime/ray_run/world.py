"""What happens in a run of small processes, and what a test tells them."""

import os
import pathlib

FOLDER = pathlib.Path(os.environ.get("RAY_RUN", "."))


def started(name: str, *words: str) -> None:
  """A line "name pid words" in the file `starts`."""
  with open(FOLDER / "starts", "a") as file:
    file.write(" ".join([name, str(os.getpid()), *words]) + "\n")
