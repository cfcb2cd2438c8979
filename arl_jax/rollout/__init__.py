"""Sampling from policies: engine, client and (later) server."""
