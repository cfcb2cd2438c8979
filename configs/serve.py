"""Serves a model over HTTP and gRPC.

Command:   python -m launch.serve --checkpoint=models/NAME --port=8000
Hardware:  whatever holds the model; SmolLM2-135M: 2 CPU cores, 3 GiB
Duration:  until it is stopped; ready after compiling, 5 minutes here with 4
           slots of 1,024 tokens
Expect:    `curl localhost:8000/ready` says {"state":"serving"}
"""

from arl_jax.online.serve_config import AgentServeConfig


def get_config() -> AgentServeConfig:
  """See the fields of `AgentServeConfig`; every one is a flag."""
  return AgentServeConfig()
