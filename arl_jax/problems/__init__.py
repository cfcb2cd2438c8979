"""Problems: what a run is about. No jax."""
