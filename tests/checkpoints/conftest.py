import gc

import pytest


@pytest.fixture
def orbax_noise():
  """Orbax's tasks end with exceptions that nobody collects; here they do."""
  yield
  gc.collect()


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"
