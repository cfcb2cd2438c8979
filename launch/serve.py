"""Serves a model: OpenAI's HTTP API, JetStream's gRPC service, and ours.

  python -m launch.serve --checkpoint=models/NAME.gguf --port=8000

Every field of the configuration is a flag too:

  python -m launch.serve --checkpoint=NAME --config.serving.weights=gs://runs/7

With an index of `launch.prepare` it also serves the search agent, with the
tools, budgets and context of training, at POST /v1/agents/search:

  python -m launch.serve --checkpoint=NAME --agent=search --index=runs/index
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys

from absl import flags, logging
from ml_collections import config_flags

from arl_jax.online.routes import routes
from arl_jax.online.serve_config import AgentServeConfig
from arl_jax.serving.assembly import assemble
from launch import command

_CONFIG = config_flags.DEFINE_config_file("config")
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Folder or .gguf file; as --config.checkpoint."
)
_PORT = flags.DEFINE_integer(
  "port", None, "Of HTTP; as --config.serving.port.", lower_bound=0
)
_AGENT = flags.DEFINE_enum(
  "agent", None, ["search"], "An agent to serve beside the model."
)
_INDEX = flags.DEFINE_string(
  "index", None, "Of the search agent; as --config.search_agent.index."
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  config = _CONFIG.value
  if not isinstance(config, AgentServeConfig):
    raise ValueError(
      "--config must give an AgentServeConfig, as configs/serve.py"
    )
  if _CHECKPOINT.value is not None:
    config.checkpoint = _CHECKPOINT.value
  if _PORT.value is not None:
    config.serving.port = _PORT.value
  if _INDEX.value is not None:
    config.search_agent.index = _INDEX.value
  if (_AGENT.value is None) != (not config.search_agent.index):
    raise ValueError(
      f"--agent is {_AGENT.value!r} and the index"
      f" {config.search_agent.index!r}; --agent=search needs --index, and the"
      " other way round"
    )
  logging.set_verbosity(logging.INFO)
  server = assemble(config, functools.partial(routes, config))
  should_stop = command.stop_on_signals("stopping after running requests")

  def say() -> None:
    host = config.serving.host
    print(f"HTTP: http://{host}:{server.http_port}/v1", file=sys.stderr)
    if server.grpc_port is not None:
      print(f"gRPC: {host}:{server.grpc_port}", file=sys.stderr)
    sys.stderr.flush()

  asyncio.run(server.run(should_stop, say))
  if server.stuck:
    # An interpreter that ends under a running compiler crashes.
    print("the engine didn't stop in time; left as it was", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


def run() -> None:
  command.run(main, AgentServeConfig(), "configs/serve.py")


if __name__ == "__main__":
  run()
