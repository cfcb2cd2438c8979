"""Messages of both gRPC services, as what a `Service` takes and gives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from arl_jax.rollout.request import Sampling
from arl_jax.serving.proto import jetstream_pb2, rollout_pb2
from arl_jax.serving.service import Service
from arl_jax.serving.stream import Stream
from arl_jax.serving.text_stream import TextStream
from arl_jax.types import Sample

# Each is looked for in every text that is sampled.
_MAX_STOP_STRINGS, _MAX_STOP_LETTERS = 16, 1024
_MAX_NAME = 256

_Message = TypeVar("_Message")

_FINISH = {
  None: rollout_pb2.FINISH_NONE,
  "stop_id": rollout_pb2.FINISH_STOP_ID,
  "stop_string": rollout_pb2.FINISH_STOP_STRING,
  "length": rollout_pb2.FINISH_LENGTH,
}


def parsed(kind: type[_Message], body: bytes) -> _Message:
  """The message in a request's bytes.

  Raises:
    ValueError: there is none.
  """
  message: Any = kind()
  try:
    message.ParseFromString(body)
  except DecodeError as error:
    name = message.DESCRIPTOR.full_name
    raise ValueError(f"the request isn't a {name}: {error}") from error
  return message


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
  """A request for samples of one prompt.

  Attributes:
    ids: the prompt.
    sampling: of each sample.
    request_ids: of each, None where one is to be made up.
    text: whether to say what tokens say.
    experts: whether to send experts.
    how: further arguments of `Service.open`.
  """

  ids: list[int]
  sampling: list[Sampling]
  request_ids: list[str | None]
  text: bool
  experts: bool = False
  how: dict[str, Any] = dataclasses.field(default_factory=dict)

  async def open(
    self, service: Service, stack: contextlib.AsyncExitStack
  ) -> list[Stream]:
    """Opens a stream for each sample; `stack` closes them.

    Raises:
      ValueError, Overloaded, Unavailable: as `Service.open`.
    """
    return [
      await stack.enter_async_context(
        service.open(self.ids, sampling, request_id=request_id, **self.how)
      )
      for sampling, request_id in zip(
        self.sampling, self.request_ids, strict=True
      )
    ]

  def texts(self, service: Service) -> list[TextStream] | None:
    """What says each sample's text, None if nobody asked for it."""
    if not self.text:
      return None
    return [TextStream(service.tokenizer.decode) for _ in self.sampling]


async def asked_of_decode(
  request: jetstream_pb2.DecodeRequest, service: Service
) -> Asked:
  """What a client of JetStream asks for.

  Its requests don't say how to sample: the most probable token is taken, until
  an end of the tokenizer's. A text gets the tokenizer's mark of a beginning, if
  it has one, unless `has_bos`.

  Raises:
    ValueError: names the field that can't be.
  """
  if request.lora_adapter_id:
    raise ValueError(
      f"lora_adapter_id is {request.lora_adapter_id!r:.80}; this server has no"
      " adapters, leave it empty"
    )
  number = _number("num_samples", request.num_samples, service)
  sampling = Sampling(
    max_tokens=request.max_tokens,
    temperature=0.0,
    stop_ids=tuple(service.tokenizer.eos_ids)[: service.engine.max_stop_ids],
  )
  content = request.WhichOneof("content")
  if content == "text_content":
    ids = await _encoded(
      "text_content.text", request.text_content.text, service
    )
    begin = getattr(service.tokenizer, "bos_id", None)
    if begin is not None and not request.has_bos:
      ids = [begin, *ids]
  elif content == "token_content":
    ids = _fitting(
      "token_content.token_ids", request.token_content.token_ids, service
    )
  else:
    raise ValueError("content is missing: send text_content or token_content")
  return Asked(
    ids=ids,
    sampling=[sampling.choice(i) for i in range(number)],
    request_ids=[None] * number,
    text=content == "text_content",
  )


async def asked_of_generate(
  request: rollout_pb2.GenerateRequest, service: Service
) -> Asked:
  """What a client of ours asks for.

  Raises:
    ValueError: names the field that can't be.
  """
  if not request.HasField("sampling"):
    raise ValueError("sampling is missing; it needs at least max_tokens")
  number = _number("n", request.n, service)
  if request.session and number > 1:
    raise ValueError(f"n is {number}, not 1 as a request of a session needs")
  for name in ("session", "request_id"):
    if len(getattr(request, name)) > _MAX_NAME:
      raise ValueError(f"{name} is longer than {_MAX_NAME} letters")
  # The scheduler's own sessions begin so.
  if request.session.startswith("\0"):
    raise ValueError("session begins with a NUL; use another name")
  sampling = _sampling(request.sampling, service)
  prompt = request.WhichOneof("prompt")
  if prompt == "text":
    ids = await _encoded("text", request.text, service)
  elif prompt == "token_ids":
    ids = _fitting("token_ids.ids", request.token_ids.ids, service)
  else:
    raise ValueError("prompt is missing: send text or token_ids")
  how: dict[str, Any] = {"training": request.training}
  if request.session:
    how["session"] = request.session
  for name in ("timeout", "version"):
    if request.HasField(name):
      how[name] = getattr(request, name)
  if how.get("timeout") == 0:
    raise ValueError("timeout is 0.0, not a number of seconds > 0")
  return Asked(
    ids=ids,
    sampling=[sampling.choice(i) for i in range(number)],
    request_ids=_names(request.request_id, number),
    text=not request.without_text,
    experts=not request.without_experts,
    how=how,
  )


def decode_response(
  number: int, index: int, part: Sample, texts: list[TextStream] | None
) -> jetstream_pb2.DecodeResponse:
  """The next tokens of sample `index` of `number`, for JetStream's clients.

  They read the first sample of every message, so that it must have all.
  """
  response = jetstream_pb2.DecodeResponse()
  samples = response.stream_content.samples
  for _ in range(number):
    samples.add()
  samples[index].token_ids.extend(part.ids.tolist())
  samples[index].text = _said(index, part, texts)
  return response


def generate_response(
  index: int, part: Sample, texts: list[TextStream] | None, *, experts: bool
) -> rollout_pb2.GenerateResponse:
  """The next tokens of sample `index`, for our clients."""
  message = rollout_pb2.Part(
    index=index,
    token_ids=part.ids.tolist(),
    logp=part.logp.tolist(),
    versions=part.versions.tolist(),
    text=_said(index, part, texts),
    finish=_FINISH[part.finish],
  )
  if part.sampled_logp is not None:
    message.sampled_logp.extend(part.sampled_logp.tolist())
  if part.cache_versions is not None:
    message.cache_versions.extend(part.cache_versions.tolist())
  if experts and part.experts is not None:
    _, message.experts.layers, message.experts.chosen = part.experts.shape
    message.experts.ids.extend(part.experts.ravel().tolist())
  return rollout_pb2.GenerateResponse(part=message)


def _said(index: int, part: Sample, texts: list[TextStream] | None) -> str:
  if texts is None:
    return ""
  last = part.finish is not None
  return texts[index].feed(part.ids.tolist(), last=last)


def _number(name: str, value: int, service: Service) -> int:
  most = service.config.max_choices
  if not 0 <= value <= most:
    raise ValueError(f"{name} is {value}, not in 0..{most} (0 is one)")
  return value or 1


def _fitting(name: str, ids: Any, service: Service) -> list[int]:
  """Token ids, unless they are so many that looking at them takes long."""
  most = service.engine.max_length - 1
  if not 1 <= len(ids) <= most:
    raise ValueError(f"{name} has {len(ids)} ids, not 1..{most}")
  return list(ids)


async def _encoded(name: str, text: str, service: Service) -> list[int]:
  """Ids of a text; other requests go on meanwhile."""
  try:
    ids = await asyncio.to_thread(service.tokenizer.encode, text)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
  most = service.engine.max_length - 1
  if not 1 <= len(ids) <= most:
    raise ValueError(f"{name} is {len(ids)} tokens long, not 1..{most}")
  return ids


def _sampling(message: rollout_pb2.Sampling, service: Service) -> Sampling:
  """How to sample; values are checked where they are used."""
  engine = service.engine
  for name, most in (
    ("stop_ids", engine.max_stop_ids),
    ("stop_strings", _MAX_STOP_STRINGS),
    ("logit_bias", engine.max_biased),
    ("forbidden", engine.max_biased),
  ):
    found = len(getattr(message, name))
    if found > most:
      raise ValueError(
        f"sampling.{name} has {found} entries; a request may have {most}"
      )
  if any(len(s) > _MAX_STOP_LETTERS for s in message.stop_strings):
    raise ValueError(
      f"sampling.stop_strings has one of more than {_MAX_STOP_LETTERS} letters"
    )
  plain = Sampling(max_tokens=message.max_tokens)
  return dataclasses.replace(
    plain,
    **{n: getattr(message, n) for n in ("top_k", "min_p", "seed")},
    **{
      n: getattr(message, n)
      for n in ("temperature", "top_p")
      if message.HasField(n)
    },
    stop_ids=tuple(message.stop_ids),
    stop_strings=tuple(message.stop_strings),
    logit_bias=dict(message.logit_bias),
    forbidden=tuple(message.forbidden),
  )


def _names(request_id: str, number: int) -> list[str | None]:
  if not request_id:
    return [None] * number
  if number == 1:
    return [request_id]
  return [f"{request_id}.{i}" for i in range(number)]
