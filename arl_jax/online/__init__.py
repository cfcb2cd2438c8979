"""Agents that serve users: the harness of training, around the server."""
