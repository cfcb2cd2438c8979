"""The program that docs/rollout.md shows."""

import pathlib
import re

import jax
import numpy as np

from arl_jax.model import ModelConfig, init

_TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "rollout.md").read_text()


def test_the_program_shown_samples():
  config = ModelConfig(vocab_size=16, width=16, heads=2, head_dim=8)
  names = {"config": config, "params": init(config, jax.random.key(0))}
  (code,) = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)
  exec(code, names)
  sample = names["sample"]
  assert len(sample.ids) == 8
  assert (sample.logp < 0).all()
  np.testing.assert_array_equal(sample.versions, 0)
