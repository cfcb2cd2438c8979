"""What OpenAI's clients ask for, read strictly."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from arl_jax.rollout.request import Sampling
from arl_jax.serving.body import (
  MAX_IDS,
  Body,
  Malformed,
  is_token_ids,
  kind,
  shown,
)

_EFFORTS = ("none", "low", "medium", "high")
_MAX_STOPS = 4
MAX_NAME = 256
_MAX_STOP_CHARACTERS = 256
# What changes neither tokens nor answer.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier")
_IGNORED_TOO = ("prompt_cache_key", "verbosity", "prompt_cache_retention")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
  """What completions and chats have in common.

  Attributes:
    model: that was asked for, None if none was named.
    sampling: of the first choice; `max_tokens` 0 stands for what fits.
    stop_ids: token ids that end it, None for those of the tokenizer. A chat's
      own come on top.
    n: choices.
    stream: whether parts are sent as they come.
    include_usage: whether a stream ends with token counts.
    logprobs: whether log-probs of sampled tokens are told.
    return_tokens: whether ids, versions and experts are told (an extension, as
      is all that follows).
    session: that the request belongs to.
    record: whether the session keeps its tokens; else it has its cache only.
    training: whether tokens may be trained on; by default within a session.
    timeout: seconds.
    version: pinned.
    lineage: of the weights that may compute it, None for any.
    min_version: the oldest that may begin it.
  """

  model: str | None
  sampling: Sampling
  stop_ids: tuple[int, ...] | None
  n: int
  stream: bool
  include_usage: bool
  logprobs: bool
  return_tokens: bool
  session: str | None
  record: bool
  training: bool
  timeout: float | None
  version: int | None
  lineage: str | None
  min_version: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
  """A body of /v1/completions; each prompt is a text or token ids."""

  prompts: tuple[str | tuple[int, ...], ...]
  options: Options


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
  """A body of /v1/chat/completions; messages and tools are still JSON.

  Attributes:
    messages: at least one.
    tools: that may be called.
    effort: of reasoning, None for the model's own.
    options: the rest.
  """

  messages: Any
  tools: Any
  effort: str | None
  options: Options


def read_completion(
  fields: dict[str, Any], *, max_choices: int, session: str | None
) -> Completion:
  """Reads a body of /v1/completions.

  Args:
    fields: the JSON object.
    max_choices: n and prompts at most.
    session: that the address names.

  Raises:
    Malformed: names the field that can't be.
  """
  body = Body(fields)
  body.only("echo", (False,), "the prompt isn't repeated")
  body.only("suffix", ("",), "text is continued only")
  body.only("best_of", (1,), "ask for n choices and choose")
  prompts = _prompts(body.take("prompt", lambda x: True, ""))
  # 0: of the sampled token alone, in OpenAI's counting.
  asked = body.take("logprobs", lambda x: type(x) is int, "an integer")
  if asked:
    raise Malformed("logprobs", _NO_ALTERNATIVES.format(asked))
  limit = body.integer("max_tokens", 16, 1)
  options = _options(body, limit, asked is not None, max_choices, session)
  if len(prompts) * options.n > max_choices:
    raise Malformed(
      "prompt",
      f"{len(prompts)} prompts with n {options.n} are more than {max_choices}"
      " choices",
    )
  return Completion(prompts=prompts, options=options)


def read_chat(
  fields: dict[str, Any], *, max_choices: int, session: str | None
) -> Chat:
  """Reads a body of /v1/chat/completions; see `read_completion`."""
  body = Body(fields)
  messages = body.take("messages", lambda x: type(x) is list, "a list")
  if not messages:
    raise Malformed("messages", "there must be at least one")
  tools = body.take("tools", lambda x: type(x) is list, "a list", [])
  choice = body.take("tool_choice", lambda x: True, "", "auto")
  if choice not in ("auto", "none"):
    raise Malformed(
      "tool_choice", "must be 'auto' or 'none'; a call can't be enforced"
    )
  body.only("parallel_tool_calls", (True,), "calls come as they are sampled")
  body.only("response_format", ({"type": "text"},), "text is all there is")
  body.only("modalities", (["text"],), "text is all there is")
  for name in ("functions", "function_call"):
    body.only(name, (), "use tools")
  asked = body.integer("top_logprobs", 0, 0, 20)
  if asked:
    raise Malformed("top_logprobs", _NO_ALTERNATIVES.format(asked))
  effort = body.take(
    "reasoning_effort",
    lambda x: x in _EFFORTS,
    f"one of {', '.join(_EFFORTS)}",
  )
  # The newer name of the same.
  limit = body.integer("max_completion_tokens", None, 1)
  older = body.integer("max_tokens", None, 1)
  if limit and older and limit != older:
    raise Malformed(
      "max_tokens", f"{older} isn't max_completion_tokens {limit}"
    )
  logprobs = body.flag("logprobs")
  options = _options(body, limit or older or 0, logprobs, max_choices, session)
  offered = tools if choice == "auto" else []
  return Chat(messages=messages, tools=offered, effort=effort, options=options)


_NO_ALTERNATIVES = (
  "{} isn't supported: log-probs are those of the sampled tokens, 0 others"
)


def _options(
  body: Body,
  max_tokens: int,
  logprobs: bool,
  max_choices: int,
  session: str | None,
) -> Options:
  """Reads what both kinds have, and refuses what is left."""
  model = body.text("model")
  seed = body.integer("seed", None, -(2**63), 2**63 - 1)
  usage = body.take("stream_options", lambda x: type(x) is dict, "an object")
  stream = body.flag("stream")
  if usage is not None and not stream:
    raise Malformed("stream_options", "goes with stream only")
  named = body.text("session")
  if session is not None and named not in (None, session):
    raise Malformed("session", f"{named!r} isn't that of the address")
  session = named if session is None else session
  if session is not None:
    check_session(session)
  n = body.integer("n", 1, 1, max_choices)
  if session is not None and n > 1:
    raise Malformed("n", "must be 1 in a session, which has one history")
  for name in ("frequency_penalty", "presence_penalty"):
    body.only(name, (0, 0.0), "it would change the policy's distribution")
  options = Options(
    model=model,
    sampling=_sampling(body, max_tokens, seed),
    stop_ids=body.token_ids("stop_token_ids", None),
    n=n,
    stream=stream,
    include_usage=_include_usage(usage or {}),
    logprobs=logprobs,
    return_tokens=body.flag("return_tokens"),
    session=session,
    record=body.flag("record", session is not None),
    training=body.flag("training", session is not None),
    timeout=body.number("timeout", None, 1e-3, 86_400.0),
    version=body.integer("version"),
    lineage=body.text("lineage"),
    min_version=body.integer("min_version", 0) or 0,
  )
  body.skip(*_IGNORED, *_IGNORED_TOO)
  body.finish()
  if options.record and session is None:
    raise Malformed("record", "needs a session")
  return options


def check_session(name: str) -> None:
  """Raises Malformed for a name that no session can have."""
  # The service's own begin with that sign.
  if not name or len(name) > MAX_NAME or name.startswith("\0"):
    raise Malformed(
      "session",
      f"{shown(name)} isn't a name of 1 to {MAX_NAME} characters, of which the"
      " first isn't NUL",
    )


def _include_usage(fields: dict[str, Any]) -> bool:
  body = Body(fields)
  found = body.flag("include_usage")
  body.skip("include_obfuscation")
  body.finish()
  return found


def _sampling(body: Body, max_tokens: int, seed: int | None) -> Sampling:
  stops = body.take("stop", _is_stop, f"up to {_MAX_STOPS} texts", [])
  return Sampling(
    # What 0 stands for depends on the prompt, and is put in later.
    max_tokens=max_tokens,
    temperature=body.number("temperature", 1.0, 0.0, 2.0),
    top_p=body.number("top_p", 1.0, 0.0, 1.0),
    top_k=body.integer("top_k", 0),
    min_p=body.number("min_p", 0.0, 0.0, 1.0),
    # Seeds of any sign and size, of which the engine has 31 bits.
    seed=secrets.randbits(31) if seed is None else seed % 2**31,
    stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
    logit_bias=_bias(body.take("logit_bias", _is_bias, _BIAS, {})),
    forbidden=body.token_ids("forbidden_token_ids", ()),
  )


_BIAS = f"an object of at most {MAX_IDS} token ids with numbers in -100..100"


def _is_bias(x: Any) -> bool:
  if type(x) is not dict or len(x) > MAX_IDS:
    return False
  return all(
    k.isascii()
    and k.isdigit()
    and len(k) < 10
    and type(v) in (int, float)
    and -100 <= v <= 100
    for k, v in x.items()
  )


def _bias(found: dict[str, Any]) -> dict[int, float]:
  return {int(k): float(v) for k, v in found.items()}


def _is_stop(x: Any) -> bool:
  texts = x if type(x) is list else [x]
  return len(texts) <= _MAX_STOPS and all(
    type(t) is str and 0 < len(t) <= _MAX_STOP_CHARACTERS for t in texts
  )


def _prompts(found: Any) -> tuple[str | tuple[int, ...], ...]:
  """One prompt or several, texts or token ids."""
  if isinstance(found, str) or (found and is_token_ids(found)):
    found = [found]
  if type(found) is not list or not found:
    raise Malformed(
      "prompt", f"{kind(found)}, not a text, token ids, or a list of those"
    )
  prompts: list[str | tuple[int, ...]] = []
  for i, prompt in enumerate(found):
    if type(prompt) is str and prompt:
      prompts.append(prompt)
    elif is_token_ids(prompt) and prompt:
      prompts.append(tuple(prompt))
    else:
      raise Malformed(
        f"prompt[{i}]", "must be a text or token ids, and not empty"
      )
  return tuple(prompts)
