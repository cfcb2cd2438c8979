"""Agents: how a policy is run against tools. No jax."""
