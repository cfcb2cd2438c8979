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
    if judge.concurrency < 1 or judge.tries < 1:
      raise ValueError(
        f"judge.concurrency is {judge.concurrency} and judge.tries"
        f" {judge.tries}; both must be at least 1"
      )
    self._index, self._judge = index, judge
    self._slots = asyncio.Semaphore(judge.concurrency)
    headers = {"Authorization": f"Bearer {judge.token}"} if judge.token else {}
    self._http = httpx.AsyncClient(
      headers=headers, timeout=judge.seconds, transport=transport
    )

  async def close(self) -> None:
    await self._http.aclose()

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
    url = f"{self._judge.url.rstrip('/')}/completions"
    why = ""
    async with self._slots:
      for tried in range(self._judge.tries):
        if tried:
          await asyncio.sleep(min(0.2 * 2**tried, 5.0))
        try:
          async with self._http.stream("POST", url, json=body) as answer:
            raw = await _bounded(answer)
            if answer.status_code == 200:
              return _log_probability(raw)
            why = f"status {answer.status_code}: {raw[:200]!r}"
            if answer.status_code < 500 and answer.status_code != 429:
              break
        except (httpx.HTTPError, ValueError) as error:
          why = repr(error)
    raise OSError(f"the reranker's model at {url} doesn't answer: {why}")


async def _bounded(answer: httpx.Response) -> bytes:
  found = bytearray()
  async for piece in answer.aiter_bytes():
    found += piece
    if len(found) > _MAX_ANSWER_BYTES:
      raise ValueError(f"an answer has more than {_MAX_ANSWER_BYTES} bytes")
  return bytes(found)


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
