"""Addresses of the agents that a configuration asks for."""

from __future__ import annotations

from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.renderers import renderer_of
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.reranker import EmbeddingReranker
from arl_jax.envs.search.stored_index import StoredIndex
from arl_jax.envs.search.tools import SYSTEM, TOOLS
from arl_jax.online.search_agent import SearchAgent
from arl_jax.online.serve_config import AgentServeConfig
from arl_jax.online.service_client import ServiceClient
from arl_jax.serving.assembly import Routes
from arl_jax.serving.service import Service


def routes(
  config: AgentServeConfig, service: Service, tokenizer: PretrainedTokenizer
) -> Routes:
  """Methods, addresses and handlers.

  Raises:
    ValueError: the index can't be used, or the tokenizer speaks no ChatML.
    OSError: a file can't be read.
  """
  agent = config.search_agent
  if not agent.index:
    return ()
  index = StoredIndex(agent.index)
  reranker = EmbeddingReranker(index) if agent.rerank else None

  def environment() -> SearchEnvironment:
    return SearchEnvironment(
      index=index,
      handles=[f"<c{i}>" for i in range(agent.handles)],
      count_tokens=tokenizer.count,
      reranker=reranker,
      results_per_search=agent.results,
      snippet_tokens=agent.passage_tokens,
      grep_limit=agent.grep_limit,
      max_answer=agent.max_answer,
    )

  search = SearchAgent(
    ServiceClient(service),
    environment,
    renderer_of(tokenizer, TOOLS, SYSTEM),
    agent.budgets,
    concurrency=agent.concurrency,
    seconds=agent.seconds,
  )
  return [("POST", "/v1/agents/search", search.search)]
