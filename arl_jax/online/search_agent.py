"""POST /v1/agents/search: a question in, ranked passages out."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arl_jax.agents.harness import AgentConfig, run_episode
from arl_jax.chat.renderer import AgentRenderer
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.serving.body import Body, parse_object
from arl_jax.serving.event_response import EventResponse
from arl_jax.serving.http_errors import HttpError
from arl_jax.serving.receiving import read_body, until_gone
from arl_jax.types import Episode, Event, PolicyClient, StopReason, Task

_MAX_BODY = 1 << 16
_MAX_QUERY_CHARS = 4096
# Of what a step tells of a tool's argument.
_MAX_TOLD = 200


class SearchAgent:
  """Runs the search agent for users, as it runs in training.

  A request is an episode of its own: it has the same tools, the same budgets
  and the same context policy, but for the nudge, which is shown in training
  only.
  """

  def __init__(
    self,
    client: PolicyClient,
    environment: Callable[[], SearchEnvironment],
    renderer: AgentRenderer,
    config: AgentConfig,
    *,
    concurrency: int,
    seconds: float,
  ):
    """Makes an agent.

    Args:
      client: what is sampled from.
      environment: makes a fresh one for an episode.
      renderer: of the policy's chat format.
      config: budgets of an episode.
      concurrency: episodes at once; further ones are refused.
      seconds: that one may take.
    """
    self._client, self._environment = client, environment
    self._renderer, self._config = renderer, config
    self._concurrency, self._seconds = concurrency, seconds
    self._running = 0

  async def search(self, request: Request) -> Response:
    """The handler.

    The body is {"query": text, "stream": bool, "seed": integer}, of which all
    but the query may be left out.
    """
    body = Body(parse_object(await read_body(request, _MAX_BODY)))
    query = body.text("query", longest=_MAX_QUERY_CHARS)
    streamed = body.flag("stream")
    seed = body.integer("seed")
    body.finish()
    if query is None or not query.strip():
      raise HttpError(400, "query is empty; ask something", field="query")
    if self._running >= self._concurrency:
      raise HttpError(
        429, f"{self._running} searches run, which is as many as may"
      )
    seed = secrets.randbits(31) if seed is None else seed
    # From here on, so that requests that come together are counted.
    self._running += 1
    if streamed:
      steps = self._steps(query, seed)
      return EventResponse(await anext(steps), steps)
    try:
      return JSONResponse(await until_gone(request, self._run(query, seed)))
    finally:
      self._running -= 1

  async def _run(
    self,
    query: str,
    seed: int,
    on_event: Callable[[Event], None] = lambda event: None,
  ) -> dict[str, Any]:
    """The whole answer.

    Raises:
      TimeoutError: it took too long.
      Whatever the client raises.
    """
    task = Task(task_id=f"query-{uuid.uuid4().hex}", prompt=query, truth={})
    environment = self._environment()
    async with asyncio.timeout(self._seconds):
      episode = await run_episode(
        task,
        environment,
        self._client,
        self._renderer,
        self._config,
        seed=seed,
        training=False,
        on_event=on_event,
      )
    return self._answer(query, environment, episode)

  def _answer(
    self, query: str, environment: SearchEnvironment, episode: Episode
  ) -> dict[str, Any]:
    answered = episode.stop_reason is StopReason.ANSWERED
    return {
      "object": "agent.search",
      "query": query,
      "documents": environment.documents() if answered else [],
      "stop_reason": episode.stop_reason.value,
      "turns": episode.turns,
      "sampled_tokens": sum(int(s.sampled.sum()) for s in episode.segments),
      "encountered": len(episode.outcome["encountered"]),
      "pruned": len(episode.outcome["pruned"]),
      "policy_version": max(
        (int(s.policy_version.max(initial=-1)) for s in episode.segments),
        default=-1,
      ),
    }

  async def _steps(
    self, query: str, seed: int
  ) -> AsyncGenerator[dict[str, Any], None]:
    """Each step as it is done, then the answer."""
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def tell(event: Event) -> None:
      events.put_nowait(_told(event))

    task = asyncio.create_task(self._run(query, seed, tell))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
      yield {"object": "agent.search.begun", "query": query, "seed": seed}
      while (event := await events.get()) is not None:
        yield event
      yield await task
    finally:
      self._running -= 1
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)


def _told(event: Event) -> dict[str, Any]:
  """What a user sees of a step."""
  data = event.data
  told = {
    "object": "agent.search.step",
    "turn": event.turn,
    "kind": event.kind,
    "tool": data.get("tool"),
    "argument": str(data.get("argument") or "")[:_MAX_TOLD] or None,
    "chunk_ids": data.get("chunk_ids"),
    "pruned": data.get("pruned"),
    "problem": data.get("problem"),
  }
  return {k: v for k, v in told.items() if v is not None}
