"""Actors: processes that roll out episodes. No jax."""
