"""Eight virtual CPU devices, and array shapes checked where annotated."""

import os

# Both are read when JAX starts, so they come before anything that imports it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jaxtyping
import pytest

jaxtyping.install_import_hook(
  ["arl_jax.losses", "arl_jax.model", "arl_jax.learner"], "beartype.beartype"
)


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
  """What the tests' programs compile is compiled once for all of them."""
  folder = tmp_path_factory.getbasetemp()
  # Each of several workers has a folder of its own in the session's.
  if folder.name.startswith("popen-"):
    folder = folder.parent
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_collection_modifyitems(items):
  if os.environ.get("ARL_NIGHTLY"):
    return
  skip = pytest.mark.skip(reason="ARL_NIGHTLY=1 runs it")
  for item in items:
    if item.get_closest_marker("nightly"):
      item.add_marker(skip)
