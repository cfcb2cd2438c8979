"""The configuration of a server with agents; every field is a flag."""

import dataclasses

from arl_jax.online.search_agent_config import SearchAgentConfig
from arl_jax.serving.serve_config import ServeConfig


@dataclasses.dataclass(kw_only=True, slots=True)
class AgentServeConfig(ServeConfig):
  """What is served, and how; see also `ServeConfig`.

  Attributes:
    search_agent: at /v1/agents/search, if it has an index.
  """

  search_agent: SearchAgentConfig = dataclasses.field(
    default_factory=SearchAgentConfig
  )

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    # A class with slots is made anew, so that a bare super() knows it not.
    ServeConfig.validate(self)
    agent = self.search_agent
    agent.validate()
    if agent.index and agent.budgets.token_budget >= self.max_length:
      raise ValueError(
        "search_agent.budgets.token_budget is"
        f" {agent.budgets.token_budget}, not below max_length"
        f" {self.max_length}, which a slot holds"
      )
