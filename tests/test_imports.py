"""Imports go one way, and what actors need comes without JAX."""

import ast
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Lowest first. A module may import its own layer and those below.
LAYERS = (
  ("types", "records", "observability", "chat", "sharding"),
  ("model", "losses"),
  ("checkpoints", "learner", "rollout", "weights"),
  ("serving",),
  ("agents", "envs", "rewards", "data"),
  ("cluster",),
  ("queueing",),
  ("actors", "problems"),
  ("runtime",),
  # What users need to test their own parts may use everything they may.
  ("online", "evaluation", "testing"),
  ("launch",),
)
LEVELS = {part: i for i, layer in enumerate(LAYERS) for part in layer}
WITHOUT_JAX = (
  "types",
  "records",
  "chat",
  "rollout.client",
  "serving.chat_endpoint",
  "serving.client",
  "serving.json_endpoint",
  "agents",
  "envs",
  "rewards",
  "data.json_lines",
  "data.synthesis",
  "data.task_file",
  "data.trajectory_filter",
  "observability",
  "cluster",
  "queueing",
  "actors",
  "problems",
  "evaluation.scores",
  "runtime.ray_cluster",
  "runtime.ray_host",
  "runtime.recorded_groups",
)
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}


def source_files() -> list[pathlib.Path]:
  files = [*(ROOT / "arl_jax").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
  return sorted(f for f in files if f != ROOT / "arl_jax" / "__init__.py")


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
  """Name in `LAYERS` of a module of this project, None for other modules."""
  parts = module.split(".")
  if parts[0] == "launch":
    return "launch"
  return parts[1] if parts[0] == "arl_jax" and len(parts) > 1 else None


def without_jax(module: str) -> bool:
  return any(
    module == f"arl_jax.{m}" or module.startswith(f"arl_jax.{m}.")
    for m in WITHOUT_JAX
  )


def imported(path: pathlib.Path) -> Iterator[str]:
  """Modules that a file imports, also inside functions."""
  package = module_name(path).split(".")
  if path.name != "__init__.py":
    package = package[:-1]
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) - node.level + 1] if node.level else []
      source = ".".join([*base, *([node.module] if node.module else [])])
      yield from (f"{source}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_only_own_and_lower_layers(path):
  module = module_name(path)
  part = part_of(module)
  assert part in LEVELS, f"{module} belongs to no layer; add it to LAYERS"
  for name in imported(path):
    other = part_of(name)
    if other is not None:
      assert other in LEVELS, f"{module} imports {name}, which has no layer"
      assert LEVELS[other] <= LEVELS[part], (
        f"{module} imports {name}, which lies above it"
      )


@pytest.mark.parametrize(
  "path",
  [p for p in source_files() if without_jax(module_name(p))],
  ids=module_name,
)
def test_actor_modules_do_not_name_jax(path):
  named = {name.split(".")[0] for name in imported(path)}
  assert not named & JAX


def test_actor_modules_load_no_jax():
  modules = [m for m in map(module_name, source_files()) if without_jax(m)]
  assert "arl_jax.types" in modules
  code = """
import importlib, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
  if "jax" in sys.modules:
    sys.exit(f"importing {name} imports jax")
"""
  done = subprocess.run(
    [sys.executable, "-c", code, *modules],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


def test_import_is_fast_and_starts_no_device():
  code = "import sys, arl_jax; sys.exit('jax' in sys.modules)"
  seconds = []
  for _ in range(3):
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    seconds.append(time.perf_counter() - began)
  assert min(seconds) < 1.5


def test_layer_rules_see_relative_and_nested_imports(tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  file = tmp_path / "arl_jax" / "chat" / "renderer.py"
  file.parent.mkdir(parents=True)
  file.write_text(
    "from .. import runtime\n"
    "from . import tokenizer\n"
    "def f():\n"
    "  from arl_jax.learner.step import train_step\n"
    "  import jax.numpy as jnp\n"
  )
  assert set(imported(file)) == {
    "arl_jax.runtime",
    "arl_jax.chat.tokenizer",
    "arl_jax.learner.step.train_step",
    "jax.numpy",
  }
