"""Writes report.html of a run, also of one that goes on or died.

python -m launch.report RUN_DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app

from arl_jax.evaluation.run_record import report


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2:
    print("error: give one run directory, as RUN_DIR", file=sys.stderr)
    sys.exit(2)
  try:
    print(report(argv[1]))
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
