"""Every field of every configuration can be set by a flag."""

import dataclasses
import importlib
import pathlib
import sys

import pytest
from absl import flags
from ml_collections import config_flags

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(
  p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__"
)


def _leaves(config, path=""):
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    name = f"{path}.{field.name}" if path else field.name
    if dataclasses.is_dataclass(value):
      yield from _leaves(value, name)
    elif isinstance(value, int | float | str | bool):
      yield name, value
    elif value and dataclasses.is_dataclass(value[0]):
      yield from _leaves(value[0], f"{name}[0]")


# The library loads configuration files in a deprecated way.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_a_flag(name, monkeypatch):
  config = importlib.import_module(f"configs.{name}").get_config()
  argv = [f"--config.{key}={value}" for key, value in _leaves(config)]
  assert len(argv) > 20
  argv = ["program", f"--config={ROOT / 'configs' / name}.py", *argv]
  # Where the library looks for the fields that are given.
  monkeypatch.setattr(sys, "argv", argv)
  values = flags.FlagValues()
  config_flags.DEFINE_config_file("config", flag_values=values)
  values(argv)
  assert dataclasses.asdict(values.config) == dataclasses.asdict(config)
