"""Tiny published checkpoints, and what a reference computes with them."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from arl_jax.checkpoints import hf
from arl_jax.model import ModelConfig

FOLDER = pathlib.Path(__file__).parents[1] / "testdata" / "models"


@dataclasses.dataclass(frozen=True)
class Golden:
  """A checkpoint in float32.

  Attributes:
    config: of the model.
    params: its parameters.
    ids: [B, T] int32.
    mask: [B, T] int32, 0 = padding on the right.
    logits: [B, T, V] of the reference.
    folder: that holds it.
  """

  config: ModelConfig
  params: Any
  ids: np.ndarray
  mask: np.ndarray
  logits: np.ndarray
  folder: pathlib.Path


def _scanned(config: ModelConfig, params: Any) -> tuple[ModelConfig, Any]:
  """The same model with its layers stacked as `config.stacks` says."""
  config = dataclasses.replace(config, scan_layers=True)
  layers = {}
  for stack in config.stacks():
    period = len(stack.layers)
    for i, name in enumerate(stack.names()):
      depths = range(stack.first + i, config.layers, period)[: stack.repeats]
      trees = [params["layers"][f"{depth:03d}"] for depth in depths]
      layers[name] = jax.tree.map(lambda *x: np.stack(x), *trees)
  return config, {**params, "layers": layers}


def _cut(config: ModelConfig, params: Any, layers: int):
  """The model's first layers alone: fewer of them compile faster."""
  kept = {
    f"{depth:03d}": params["layers"][f"{depth:03d}"] for depth in range(layers)
  }
  return dataclasses.replace(config, layers=layers), {**params, "layers": kept}


@functools.cache
def _load(name: str) -> Golden:
  folder = FOLDER / name
  config, params = hf.load(folder, dtype=np.float32)
  arrays = (
    np.load(folder / f"{part}.npy")
    for part in ("input_ids", "attention_mask", "logits")
  )
  return Golden(config, params, *arrays, folder)


@pytest.fixture(scope="session")
def golden():
  """Name of a folder -> `Golden`."""
  return _load


@pytest.fixture(scope="session")
def scanned():
  return _scanned


@pytest.fixture(scope="session")
def cut():
  return _cut
