"""The processes of a run: who starts them, and who lives. No jax."""
