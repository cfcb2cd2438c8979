"""OpenAI's HTTP API over a service, with extensions for training.

A request's fields beyond OpenAI's: `session`, `record`, `training`, `timeout`,
`version`, `lineage`, `min_version`, `top_k`, `min_p`, `stop_token_ids`,
`forbidden_token_ids`, and `return_tokens`, with which every choice has
`tokens`: ids, log-probs, versions and experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arl_jax.chat.formats import ChatFormat
from arl_jax.chat.messages import ChatMessage, parse_messages, parse_tools
from arl_jax.chat.replies import collect
from arl_jax.rollout.request import Sampling
from arl_jax.serving.body import parse_object
from arl_jax.serving.choices import Choice, PlainReader, Reader
from arl_jax.serving.event_response import EventResponse
from arl_jax.serving.http_errors import HttpError
from arl_jax.serving.metrics import Metrics
from arl_jax.serving.openai_answers import Answer
from arl_jax.serving.openai_requests import (
  Options,
  read_chat,
  read_completion,
)
from arl_jax.serving.receiving import read_body, until_gone
from arl_jax.serving.recorder import Recording, Turn
from arl_jax.serving.service import Service
from arl_jax.serving.sessions import Sessions

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True, slots=True)
class _Job:
  """One request as it is served.

  Attributes:
    options: of the request.
    answer: makes what is told.
    prompts: token ids of each choice.
    choices: that sample.
    recording: that the request belongs to, None outside of a session.
    turn: of that recording.
    chat: whether it's one.
  """

  options: Options
  answer: Answer
  prompts: list[Sequence[int]]
  choices: list[Choice]
  recording: Recording | None
  turn: Turn | None
  chat: bool


class OpenAI:
  """Handlers of one model's endpoints."""

  def __init__(
    self,
    service: Service,
    sessions: Sessions,
    metrics: Metrics,
    *,
    model: str,
    chat_format: ChatFormat | None,
  ):
    """Makes handlers.

    Args:
      service: that samples.
      sessions: recordings.
      metrics: where requests are counted.
      model: as the API calls it.
      chat_format: of the model, None if it has none: it has no chats then.
    """
    self._service, self._sessions, self._metrics = service, sessions, metrics
    self._model, self._format = model, chat_format

  async def models(self, request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [self._model_json()]})

  async def model(self, request: Request) -> Response:
    """GET /v1/models/{name}."""
    self._check_model(request.path_params["name"])
    return JSONResponse(self._model_json())

  async def completions(self, request: Request) -> Response:
    """POST /v1/completions."""
    asked = await self._read(request, read_completion)
    options = asked.options
    self._check_model(options.model)
    prompts: list[Sequence[int]] = []
    for prompt in asked.prompts:
      if isinstance(prompt, str):
        ids = await asyncio.to_thread(self._service.tokenizer.encode, prompt)
        bos = getattr(self._service.tokenizer, "bos_id", None)
        prompts.append(ids if bos is None or ids[:1] == [bos] else [bos, *ids])
      else:
        prompts.append(prompt)
    recording = turn = None
    if options.session and len(prompts) > 1:
      raise HttpError(400, "one at a time in a session", field="prompt")
    if options.session and options.record:
      recording = self._sessions.use(options.session)
      turn = recording.plain(prompts[0], options.sampling.temperature)
    decode = self._service.tokenizer.decode
    with _abandoned_on_error(recording, turn):
      self._check_room("prompt", prompts, options)
      stops = options.stop_ids
      if stops is None:
        stops = self._service.tokenizer.eos_ids
      job = _Job(
        options=options,
        answer=self._answer(options, chat=False),
        prompts=[p for p in prompts for _ in range(options.n)],
        choices=[],
        recording=recording,
        turn=turn,
        chat=False,
      )
      readers: list[Reader] = [PlainReader(decode) for _ in job.prompts]
      self._open(job, readers, stops)
    return await self._serve(request, job)

  async def chat(self, request: Request) -> Response:
    """POST /v1/chat/completions."""
    if self._format is None:
      raise HttpError(
        404, "the model has no chat format; use /v1/completions instead"
      )
    formatter = self._format
    asked = await self._read(request, read_chat)
    options = asked.options
    self._check_model(options.model)
    messages = await asyncio.to_thread(parse_messages, asked.messages)
    tools = await asyncio.to_thread(parse_tools, asked.tools)
    recording = turn = None
    if options.session and options.record:
      recording = self._sessions.use(options.session)
      turn = await asyncio.to_thread(
        recording.chat,
        messages,
        tools,
        asked.effort,
        options.sampling.temperature,
        formatter,
      )
      prompt = turn.prompt
    else:
      prompt = await asyncio.to_thread(
        formatter.render, messages, tools, effort=asked.effort
      )
    with _abandoned_on_error(recording, turn):
      self._check_room("messages", [prompt], options)
      job = _Job(
        options=options,
        answer=self._answer(options, chat=True),
        prompts=[prompt] * options.n,
        choices=[],
        recording=recording,
        turn=turn,
        chat=True,
      )
      readers: list[Reader] = [
        formatter.parser(
          tools,
          call_prefix=f"call_{uuid.uuid4().hex[:16]}_",
          effort=asked.effort,
        )
        for _ in range(options.n)
      ]
      stops = (*formatter.stop_ids, *(options.stop_ids or ()))
      self._open(job, readers, stops)
    return await self._serve(request, job)

  # What both have in common.

  async def _read(self, request: Request, reader: Callable[..., T]) -> T:
    config = self._service.config
    body = await read_body(request, config.max_body_bytes)
    session = request.path_params.get("session")

    def read() -> T:
      fields = parse_object(body)
      return reader(fields, max_choices=config.max_choices, session=session)

    # A large body takes long, and others wait for the loop.
    return await asyncio.to_thread(read)

  def _model_json(self) -> dict[str, Any]:
    return {
      "id": self._model,
      "object": "model",
      "created": 0,
      "owned_by": "arl_jax",
      "version": self._service.load().version,
      "max_model_len": self._service.engine.max_length,
    }

  def _check_model(self, name: str | None) -> None:
    if name is not None and name != self._model:
      raise HttpError(
        404,
        f"{name[:80]!r} isn't served here; {self._model!r} is",
        field="model",
        code="model_not_found",
      )

  def _answer(self, options: Options, *, chat: bool) -> Answer:
    prefix = "chatcmpl" if chat else "cmpl"
    return Answer(
      chat=chat,
      request_id=f"{prefix}-{uuid.uuid4().hex}",
      model=self._model,
      piece=self._service.tokenizer.piece,
      logprobs=options.logprobs,
      return_tokens=options.return_tokens,
    )

  def _check_room(
    self, field: str, prompts: list[Sequence[int]], options: Options
  ) -> None:
    longest = self._service.engine.max_length
    for prompt in prompts:
      asked = options.sampling.max_tokens or 1
      if len(prompt) + asked > longest:
        raise HttpError(
          400,
          f"{len(prompt)} tokens and max_tokens {asked} are more than"
          f" the {longest} that a slot holds",
          field=field,
          code="context_length_exceeded",
        )

  def _open(
    self, job: _Job, readers: list[Reader], stop_ids: Sequence[int]
  ) -> None:
    options = job.options
    try:
      for i, (prompt, reader) in enumerate(
        zip(job.prompts, readers, strict=True)
      ):
        sampling = self._sampling(options.sampling, prompt, stop_ids, i)
        stream = self._service.open(
          prompt,
          sampling,
          session=options.session,
          training=options.training,
          timeout=options.timeout,
          version=options.version,
          lineage=options.lineage,
          min_version=options.min_version,
          request_id=f"{job.answer.request_id}.{i}",
        )
        timer = self._metrics.timer()
        job.choices.append(
          Choice(i, stream, reader, sampling.stop_strings, timer.on_part)
        )
    except Exception:
      _close(job.choices)
      raise

  def _sampling(
    self,
    sampling: Sampling,
    prompt: Sequence[int],
    stop_ids: Sequence[int],
    index: int,
  ) -> Sampling:
    room = self._service.engine.max_length - len(prompt)
    return dataclasses.replace(
      sampling,
      max_tokens=sampling.max_tokens or room,
      stop_ids=tuple(dict.fromkeys(stop_ids)),
    ).choice(index)

  async def _serve(self, request: Request, job: _Job) -> Response:
    if job.options.stream:
      # An error before the first token still gets a status.
      events = self._events(job)
      first = await until_gone(request, anext(events), events.aclose)
      return EventResponse(first, events)
    return await until_gone(request, self._whole(job))

  async def _whole(self, job: _Job) -> Response:
    with _closing(job):
      async with asyncio.TaskGroup() as group:
        for choice in job.choices:
          group.create_task(_read(choice))
      self._keep(job)
    # Many tokens take long to write.
    return await asyncio.to_thread(
      lambda: JSONResponse(job.answer.whole(job.choices, job.prompts))
    )

  async def _events(self, job: _Job) -> AsyncGenerator[dict[str, Any], None]:
    """JSON of a stream's parts, as choices give them."""
    parts: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    async def pump(choice: Choice, prompt: Sequence[int]) -> None:
      try:
        async for part, deltas in choice:
          if part.finish is not None:
            self._keep(job, choice)
          if not choice.begun:
            choice.begun = True
            if (head := job.answer.first(choice.index, prompt)) is not None:
              parts.put_nowait(head)
          parts.put_nowait(job.answer.part(choice, part, deltas))
        parts.put_nowait(None)
      except Exception as error:
        parts.put_nowait(error)

    with _closing(job):
      tasks = [
        asyncio.create_task(pump(c, p))
        for c, p in zip(job.choices, job.prompts, strict=True)
      ]
      try:
        running = len(tasks)
        while running:
          event = await parts.get()
          if event is None:
            running -= 1
          elif isinstance(event, Exception):
            raise event
          else:
            yield event
        if job.options.include_usage:
          yield job.answer.usage_part(job.choices, job.prompts)
      finally:
        for task in tasks:
          task.cancel()

  def _keep(self, job: _Job, choice: Choice | None = None) -> None:
    """Records a turn that is done."""
    if job.recording is None or job.turn is None:
      return
    choice = choice or job.choices[0]
    turn, job.turn = job.turn, None
    if not job.chat:
      job.recording.commit(turn, choice.sample)
      return
    reply = collect(choice.deltas).message()
    seen = ChatMessage(
      role="assistant",
      content=choice.text,
      reasoning=choice.reasoning,
      tool_calls=choice.calls,
    )
    job.recording.commit(turn, choice.sample, reply, seen)


async def _read(choice: Choice) -> None:
  async for _ in choice:
    pass


def _close(choices: Sequence[Choice]) -> None:
  for choice in choices:
    choice.stream.close()


@contextlib.contextmanager
def _closing(job: _Job):
  """Gives up, in the end, whatever isn't done."""
  try:
    yield
  except BaseExceptionGroup as group:
    # One choice's error is all that a client can be told.
    raise group.exceptions[0] from None
  finally:
    _close(job.choices)
    if job.recording is not None and job.turn is not None:
      job.recording.abandon(job.turn)


@contextlib.contextmanager
def _abandoned_on_error(recording: Recording | None, turn: Turn | None):
  try:
    yield
  except BaseException:
    if recording is not None and turn is not None:
      recording.abandon(turn)
    raise
