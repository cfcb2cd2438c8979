"""Puts the chunks that a search found into a better order."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import httpx

from arl_jax.envs.search import index as index_lib
from arl_jax.serving.json_endpoint import JsonEndpoint

# Of one chunk in a question to a model.
_MAX_CHARS = 8192
# Of one answer, which holds one token.
_MAX_ANSWER_BYTES = 1 << 16
# Enough to force the token whose probability is asked for.
_FORCED = 100.0

_QUESTION = (
  "Passage:\n{text}\n\nSearch request: {query}\n\n"
  "Does the passage help with the request? Answer yes or no.\nAnswer:"
)


class Reranker(Protocol):
  """Scores chunks against a query."""

  async def order(self, query: str, chunk_ids: Sequence[str]) -> list[str]:
    """The same chunks, best first; equal ones stay in the order given.

    Raises:
      OSError: what it needs can't be reached: a failure of infrastructure.
    """


class EmbeddingReranker:
  """By inner product of the embeddings of query and chunk."""

  def __init__(self, index: index_lib.Index):
    self._index = index

  async def order(self, query: str, chunk_ids: Sequence[str]) -> list[str]:
    return self._index.rank(query, chunk_ids)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
  """A model behind an OpenAI-compatible completions endpoint.

  Attributes:
    url: of the API, as "http://10.0.0.7:8000/v1".
    model: its name there.
    yes: id of the token that answers "yes" after the question, with its space.
    token: bearer token; empty sends none.
    concurrency: chunks that are judged at once.
    seconds: that one answer may take.
    tries: of one chunk.
  """

  url: str
  model: str
  yes: int
  token: str = ""
  concurrency: int = 16
  seconds: float = 30.0
  tries: int = 3


class ModelReranker:
  """By the log-probability with which a model says that a chunk is relevant.

  The answer "yes" is forced, and its log-probability before that is read, so
  that one token is sampled a chunk and none of them is left to chance.
  """

  def __init__(
    self,
    index: index_lib.Index,
    judge: Judge,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
  ):
    """Connects to nothing yet.

    Args:
      index: where chunks come from.
      judge: the model.
      transport: of HTTP; by default the network.

    Raises:
      ValueError: a field of `judge` can't be.
    """
    self._index, self._judge = index, judge
    self._endpoint = JsonEndpoint(
      f"{judge.url.rstrip('/')}/completions",
      token=judge.token,
      concurrency=judge.concurrency,
      timeout=judge.seconds,
      tries=judge.tries,
      max_bytes=_MAX_ANSWER_BYTES,
      transport=transport,
    )

  async def close(self) -> None:
    await self._endpoint.close()

  async def order(self, query: str, chunk_ids: Sequence[str]) -> list[str]:
    scores = await asyncio.gather(
      *(self._score(query, self._index.corpus.chunk(c).text) for c in chunk_ids)
    )
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [chunk_ids[i] for i in best]

  async def _score(self, query: str, text: str) -> float:
    """Log-probability (nats) of "yes"."""
    body = {
      "model": self._judge.model,
      "prompt": _QUESTION.format(text=text[:_MAX_CHARS], query=query),
      "max_tokens": 1,
      "temperature": 1.0,
      "logprobs": 0,
      "logit_bias": {str(self._judge.yes): _FORCED},
      "seed": 0,
    }
    try:
      return _log_probability(await self._endpoint.post(body))
    except ValueError as error:
      raise OSError(
        f"{self._endpoint.url} gives no log-probability: {error}"
      ) from error


def _log_probability(raw: bytes) -> float:
  value: Any = json.loads(raw)
  try:
    (found,) = value["choices"][0]["logprobs"]["token_logprobs"]
  except (KeyError, IndexError, TypeError, ValueError) as error:
    raise ValueError(
      f"no log-probability of one token: {raw[:200]!r}"
    ) from error
  if isinstance(found, bool) or not isinstance(found, int | float):
    raise ValueError(f"the log-probability is {found!r:.40}, no number")
  if not -math.inf < found <= 0:
    raise ValueError(f"the log-probability is {found!r:.40}, not <= 0")
  return float(found)
