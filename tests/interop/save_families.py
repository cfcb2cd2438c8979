"""Saves every checkpoint of tests/testdata/models again, in float32.

python tests/interop/save_families.py FOLDER

`transformers_reads.py` then compares what another library makes of them.
"""

import pathlib
import sys

import numpy as np

from arl_jax import checkpoints

GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "models"


def main(argv: list[str]) -> None:
  if len(argv) != 2:
    sys.exit(f"error: arguments are {argv[1:]}, must be one folder")
  for golden in sorted(GOLDEN.iterdir()):
    # bfloat16, the default of quantised ones, would round what is compared.
    config, params = checkpoints.load(golden, dtype=np.float32)
    checkpoints.save_hf(pathlib.Path(argv[1], golden.name), config, params)
    print(f"{golden.name}: saved", flush=True)


if __name__ == "__main__":
  main(sys.argv)
