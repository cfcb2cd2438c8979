"""Messages as tokens: tokenizer, rendering and strict parsing. No jax."""
