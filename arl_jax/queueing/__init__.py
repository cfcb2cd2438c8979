"""The group queue between actors and the learner. No jax."""
