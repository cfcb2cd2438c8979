"""What OpenAI's clients get: JSON objects of answers and of their parts."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arl_jax.chat.messages import ToolCall
from arl_jax.chat.replies import Delta
from arl_jax.serving.choices import Choice
from arl_jax.types import Sample

Piece = Callable[[int], str]


class Answer:
  """Makes the objects of one answer.

  Those of a chat hold messages, those of a completion text.
  """

  def __init__(
    self,
    *,
    chat: bool,
    request_id: str,
    model: str,
    piece: Piece,
    logprobs: bool,
    return_tokens: bool,
  ):
    """Makes an answer.

    Args:
      chat: whether it's one.
      request_id: of the request; who aborts one names it so.
      model: as the API calls it.
      piece: how a token reads.
      logprobs: whether log-probs are told.
      return_tokens: whether ids, versions and experts are told.
    """
    self.request_id = request_id
    self._chat, self._piece = chat, piece
    self._logprobs, self._return_tokens = logprobs, return_tokens
    self._head = {
      "id": request_id,
      "created": int(time.time()),
      "model": model,
    }

  def whole(
    self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]
  ) -> dict[str, Any]:
    """The answer of a request that isn't streamed.

    Args:
      choices: all of them, done.
      prompts: token ids of each choice's prompt.
    """
    told = []
    for choice, prompt in zip(choices, prompts, strict=True):
      body = self._choice(choice.index, choice.sample, choice.finish_reason)
      if self._chat:
        body["message"] = _message(choice)
      else:
        body["text"] = choice.text
      if self._return_tokens:
        body["tokens"]["prompt_ids"] = list(prompt)
      told.append(body)
    return {
      **self._head,
      "object": "chat.completion" if self._chat else "text_completion",
      "choices": told,
      "usage": usage([len(c.sample.ids) for c in choices], prompts),
    }

  def first(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None:
    """The part before all tokens, if there has to be one."""
    if not self._chat and not self._return_tokens:
      return None
    body: dict[str, Any] = {"index": index, "finish_reason": None}
    if self._chat:
      body["delta"] = {"role": "assistant", "content": ""}
    else:
      body["text"] = ""
    if self._return_tokens:
      body["tokens"] = {"prompt_ids": list(prompt)}
    return self._part([body])

  def part(
    self, choice: Choice, part: Sample, deltas: Sequence[Delta]
  ) -> dict[str, Any]:
    """New tokens of a choice and what they say."""
    finish = choice.finish_reason if part.finish is not None else None
    body = self._choice(choice.index, part, finish)
    if self._chat:
      body["delta"] = _chat_delta(choice, deltas)
    else:
      body["text"] = "".join(d.text for d in deltas)
    return self._part([body])

  def usage_part(
    self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]
  ) -> dict[str, Any]:
    """The last part of a stream that was to count tokens."""
    counts = [len(c.sample.ids) for c in choices]
    return {**self._part([]), "usage": usage(counts, prompts)}

  def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
    kind = "chat.completion.chunk" if self._chat else "text_completion"
    return {**self._head, "object": kind, "choices": choices}

  def _choice(
    self, index: int, sample: Sample, finish: str | None
  ) -> dict[str, Any]:
    body: dict[str, Any] = {
      "index": index,
      "finish_reason": finish,
      "logprobs": None,
    }
    if self._logprobs:
      make = self._chat_logprobs if self._chat else self._text_logprobs
      body["logprobs"] = make(sample)
    if self._return_tokens:
      body["tokens"] = tokens_json(sample)
    return body

  def _chat_logprobs(self, sample: Sample) -> dict[str, Any]:
    entries = []
    for token, logp in zip(sample.ids.tolist(), sample.logp, strict=True):
      text = self._piece(token)
      entries.append(
        {
          "token": text,
          "logprob": _short(logp),
          "bytes": list(text.encode("utf-8", "surrogatepass")),
          "top_logprobs": [],
        }
      )
    return {"content": entries, "refusal": None}

  def _text_logprobs(self, sample: Sample) -> dict[str, Any]:
    pieces = [self._piece(i) for i in sample.ids.tolist()]
    offsets = itertools.accumulate(map(len, pieces), initial=0)
    return {
      "tokens": pieces,
      "token_logprobs": [_short(x) for x in sample.logp],
      "top_logprobs": None,
      "text_offset": list(offsets)[:-1],
    }


def tokens_json(sample: Sample) -> dict[str, Any]:
  """Everything that was recorded of sampled tokens.

  Log-probs are nats. Experts are [n, L_moe, K] int16 in base64, in C order.
  """
  experts = None
  if sample.experts is not None:
    packed = np.ascontiguousarray(sample.experts.astype("<i2"))
    experts = {
      "shape": list(packed.shape),
      "base64": base64.b64encode(packed.tobytes()).decode(),
    }
  assert sample.sampled_logp is not None
  assert sample.cache_versions is not None
  return {
    "ids": sample.ids.tolist(),
    "logprobs": [_short(x) for x in sample.logp],
    "sampled_logprobs": [_short(x) for x in sample.sampled_logp],
    "versions": sample.versions.tolist(),
    "cache_versions": sample.cache_versions.tolist(),
    "experts": experts,
    "finish": sample.finish,
  }


def usage(
  sampled: Sequence[int], prompts: Sequence[Sequence[int]]
) -> dict[str, int]:
  """Token counts; choices of one prompt share it."""
  distinct = {id(p): len(p) for p in prompts}
  prompt, completion = sum(distinct.values()), sum(sampled)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def _message(choice: Choice) -> dict[str, Any]:
  message: dict[str, Any] = {
    "role": "assistant",
    "content": choice.text or (None if choice.calls else ""),
  }
  if choice.reasoning:
    message["reasoning_content"] = choice.reasoning
  if choice.calls:
    message["tool_calls"] = [_call(c) for c in choice.calls]
  problems = [d.problem for d in choice.deltas if d.kind == "malformed"]
  if problems:
    message["arl"] = {"malformed_calls": problems}
  return message


def _chat_delta(choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
  """What a client adds to the message that it puts together."""
  told: dict[str, Any] = {}
  calls, problems = [], []
  # Calls are numbered through the message.
  number = choice.called - sum(d.call is not None for d in deltas)
  for delta in deltas:
    if delta.kind in ("content", "malformed"):
      told["content"] = told.get("content", "") + delta.text
    if delta.kind == "malformed":
      problems.append(delta.problem)
    if delta.kind == "reasoning":
      told["reasoning_content"] = told.get("reasoning_content", "") + delta.text
    if delta.call is not None:
      calls.append({"index": number, **_call(delta.call)})
      number += 1
  if calls:
    told["tool_calls"] = calls
  if problems:
    told["arl"] = {"malformed_calls": problems}
  return told


def _call(call: ToolCall) -> dict[str, Any]:
  return {
    "id": call.id,
    "type": "function",
    "function": {"name": call.name, "arguments": call.arguments},
  }


def _short(value: Any) -> float:
  """The shortest decimal that gives the same float32 back."""
  return float(str(np.float32(value)))
