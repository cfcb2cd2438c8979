"""The configuration of a search agent that is served."""

import dataclasses

from arl_jax.agents.harness import AgentConfig


@dataclasses.dataclass(kw_only=True, slots=True)
class SearchAgentConfig:
  """A search agent that is served.

  Attributes:
    index: folder that `launch.prepare index` wrote; empty serves no agent.
    concurrency: searches at once.
    seconds: that one may take.
    handles: passages that one search can show.
    results: passages of one call, at most.
    passage_tokens: of a passage that a result shows, at most.
    grep_limit: passages of one grep, at most.
    max_answer: passages of an answer, at most.
    rerank: whether what was fused is put into the order of its embeddings.
    budgets: of an episode.
  """

  index: str = ""
  concurrency: int = 8
  seconds: float = 600.0
  handles: int = 256
  results: int = 10
  passage_tokens: int = 256
  grep_limit: int = 5
  max_answer: int = 30
  rerank: bool = False
  budgets: AgentConfig = dataclasses.field(
    default_factory=lambda: AgentConfig(
      token_budget=2047,
      soft_threshold=1023,
      hard_threshold=1520,
      max_turns=32,
      message_tokens=256,
      observation_tokens=512,
    )
  )

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name in (
      *("concurrency", "handles", "results", "passage_tokens"),
      *("grep_limit", "max_answer"),
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f"search_agent.{name} is {getattr(self, name)}, not >= 1"
        )
    if not 0 < self.seconds < float("inf"):
      raise ValueError(f"search_agent.seconds is {self.seconds}, not > 0")
    self.budgets.validate()
