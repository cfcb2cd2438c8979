"""One of two processes that train together (see `test_processes`).

  python two_processes.py RANK PORT INPUTS OUTPUT

INPUTS is a pickled dict of what to train; OUTPUT gets parameters and metrics.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from arl_jax import sharding
from arl_jax.learner import Learner


def main(rank: int, port: int, inputs: str, output: str) -> None:
  jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, rank, initialization_timeout=60
  )
  assert jax.process_count() == 2
  assert len(jax.local_devices()) == 4
  given = pickle.loads(pathlib.Path(inputs).read_bytes())
  learner = Learner(
    given["model"],
    given["params"],
    given["config"],
    optax.sgd(given["rate"]),
    # Arrays of this process alone, as its own `init` would give them.
    reference=jax.tree.map(jnp.asarray, given["reference"]),
    mesh=sharding.make_mesh(**given["mesh"]),
  )
  metrics = [learner.step(given["experiences"])]
  assert learner.publish() == 1
  metrics.append(learner.step(given["experiences"], substeps=2))
  # Each host can count on the state's numbers.
  assert (int(learner.state.step), learner.version) == (3, 1)
  params = multihost_utils.process_allgather(learner.state.params, tiled=True)
  if rank == 0:
    leaves = {f"leaf{i}": x for i, x in enumerate(jax.tree.leaves(params))}
    for i, values in enumerate(metrics):
      leaves |= {f"step{i}/{name}": x for name, x in values.items()}
    np.savez(output, **leaves)


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
