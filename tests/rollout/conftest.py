"""The published tiny checkpoints, as the model's own tests have them."""

from tests.model.conftest import cut, golden, scanned

__all__ = ["cut", "golden", "scanned"]
