"""Messages over pipes: whole, bounded, and nothing but JSON objects."""

import asyncio
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.actors import worker_messages as messages
from arl_jax.types import Block, Observation

VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=9),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=8,
)


def read_all(data: bytes) -> list:
  async def work():
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while (message := await messages.read(reader)) is not None:
      found.append(message)
    return found

  return asyncio.run(work())


@given(
  st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=3)
)
def test_both_readers_give_back_what_was_packed(sent):
  data = b"".join(messages.pack(m) for m in sent)
  assert read_all(data) == sent
  file = io.BytesIO(data)
  assert [messages.read_blocking(file) for _ in sent] == sent
  assert messages.read_blocking(file) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_a_message_that_breaks_off_is_the_end(cut):
  data = messages.pack({"id": 1234})[:cut]
  assert read_all(data) == []
  assert messages.read_blocking(io.BytesIO(data)) is None


@pytest.mark.parametrize(
  ("data", "error"),
  [
    (struct.pack(">I", messages.MOST_BYTES + 1), "67108865 bytes"),
    (struct.pack(">I", 4) + b"[{}]", "list, not an object"),
    (struct.pack(">I", 2) + b"{]", "no JSON"),
    (struct.pack(">I", 1) + b"\xff", "no JSON"),
    (struct.pack(">I", 200_000) + b"[" * 200_000, "no JSON"),
  ],
)
def test_what_is_no_message_is_refused(data, error):
  with pytest.raises(ValueError, match=error):
    read_all(data)
  with pytest.raises(ValueError, match=error):
    messages.read_blocking(io.BytesIO(data))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_only_json_is_sent(value):
  with pytest.raises(ValueError, match="JSON"):
    messages.pack({"value": value})


def test_a_long_message_is_not_sent():
  with pytest.raises(ValueError, match=str(messages.MOST_BYTES)):
    messages.pack({"value": "x" * messages.MOST_BYTES})


def test_observations_come_back():
  given = Observation(
    blocks=(Block(text="a", key="k"), Block(text="b")),
    remove=("x", "y"),
    error="bad",
    data={"n": [1, 2.5]},
  )
  assert messages.observation(messages.observation_json(given)) == given
  empty = Observation()
  assert messages.observation(messages.observation_json(empty)) == empty


@pytest.mark.parametrize(
  "change",
  [
    {"blocks": None},
    {"blocks": [["a"]]},
    {"blocks": [[1, None]]},
    {"blocks": [["a", 2]]},
    {"remove": [None]},
    {"error": 3},
    {"data": [1]},
  ],
)
def test_what_is_no_observation_is_refused(change):
  right = messages.observation_json(Observation())
  with pytest.raises(ValueError, match=r"observation|string|values"):
    messages.observation(right | change)
