"""Messages between the hosts of a replica: each comes back, no other does."""

import dataclasses
import random
import struct

import numpy as np
import pytest

from arl_jax.rollout import calls
from arl_jax.rollout.request import Sampling

HOW = Sampling(
  max_tokens=7,
  temperature=0.3,
  top_k=3,
  top_p=0.1,
  min_p=0.7,
  seed=2**31 - 1,
  stop_ids=(5, 0),
  logit_bias={9: -1.5, 2: 1e4},
  forbidden=(8,),
)
MESSAGES = (
  calls.Renew(),
  calls.Extend(3, {0: (0, [1, 2, 3]), 7: (40, [60])}),
  calls.CopyPrefix(1, 2, 30),
  calls.Clear(5),
  calls.Start(2, 4, HOW),
  calls.Start(0, 0, Sampling(max_tokens=1)),
  calls.Generate(1, 8, 2, [0, 3]),
  calls.Generate(1, 8, 0, []),
  calls.Stop(2**32 - 1),
  calls.Fetch(9, 10**10),
  calls.Drop(0),
  calls.End(),
  calls.Taken(9, 4, "läuft", "f" * 32),
  calls.Refused(9, ""),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_comes_back_as_it_was(message):
  assert calls.parse(calls.pack(message)) == message


def test_numbers_of_numpy_come_back_as_integers():
  ids = np.arange(3, dtype=np.int32)
  sent = calls.Extend(1, {np.int64(2): (np.int32(4), list(ids))})
  found = calls.parse(calls.pack(sent))
  assert found == calls.Extend(1, {2: (4, [0, 1, 2])})
  assert type(found.rows[2][1][0]) is int


def test_stop_strings_stay_with_the_scheduler():
  how = dataclasses.replace(HOW, stop_strings=("end",))
  assert calls.parse(calls.pack(calls.Start(0, 0, how))).how == HOW


def test_long_texts_are_cut_between_characters():
  found = calls.parse(calls.pack(calls.Refused(1, "ä" * 4000)))
  # Two bytes each.
  assert found.why == "ä" * (calls.MAX_TEXT_BYTES // 2)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_no_part_of_a_message_is_one_nor_with_more_behind_it(message):
  body = calls.pack(message)
  for size in range(len(body)):
    with pytest.raises(ValueError, match=r"bytes|longer than its message"):
      calls.parse(body[:size])
  with pytest.raises(ValueError, match="1 bytes are left over"):
    calls.parse(body + b"\0")


def extend(*rows):
  parts = [
    struct.pack(f"!III{len(ids)}I", slot, stay, len(ids), *ids)
    for slot, stay, ids in rows
  ]
  return b"\x02" + struct.pack("!IH", 1, len(rows)) + b"".join(parts)


def start(bias, temperature=1.0):
  numbers = struct.pack("!IIIdIddI", 0, 0, 1, temperature, 0, 1.0, 0.0, 0)
  none = struct.pack("!I", 0)
  ids = struct.pack(f"!I{len(bias)}I", len(bias), *(i for i, _ in bias))
  values = struct.pack(f"!I{len(bias)}d", len(bias), *(b for _, b in bias))
  return b"\x05" + numbers + none + none + ids + values


@pytest.mark.parametrize(
  ("body", "says"),
  [
    (b"", "has 0 bytes"),
    (bytes(calls.MAX_BYTES + 1), f"has {calls.MAX_BYTES + 1} bytes"),
    (b"\0", "kind 0 is none of"),
    (b"\xff", "kind 255 is none of"),
    (b"(lp0\n.", "kind 40 is none of"),
    (extend(), "no slot is named"),
    (extend((1, 0, [])), "has no ids"),
    (extend((1, 0, [2]), (1, 1, [2])), "named twice"),
    # Four billion ids in a message of a few bytes.
    (
      b"\x06" + struct.pack("!IIII", 1, 1, 0, 2**32 - 1),
      "a list of 4294967295 is longer than its message",
    ),
    (start([(1, 0.5), (1, 0.5)]), "2 biases are of 1 ids"),
    (start([(1, float("nan"))]), "aren't finite"),
    (start([], float("inf")), "aren't finite"),
    (b"\x0c" + struct.pack("!II", 1, 2**31), "above 4096"),
    (b"\x0c" + struct.pack("!II", 1, 1) + b"\xff", "can't decode"),
  ],
)
def test_hostile_bytes_are_refused(body, says):
  with pytest.raises(ValueError, match=says):
    calls.parse(body)


def test_noise_is_refused_or_is_a_message():
  draw = random.Random(0)
  bodies = [calls.pack(m) for m in MESSAGES]
  taken = 0
  for _ in range(5000):
    body = bytearray(draw.choice(bodies))
    for _ in range(draw.randrange(1, 4)):
      body[draw.randrange(len(body))] = draw.randrange(256)
    try:
      found = calls.parse(bytes(body))
    except ValueError:
      continue
    taken += 1
    assert calls.pack(found) == bytes(body)
  # A changed number is a number.
  assert taken > 500


@pytest.mark.parametrize(
  "message",
  [
    calls.Clear(-1),
    calls.Clear(2**32),
    calls.Fetch(1, 2**63),
    calls.Extend(1, {0: (0, [-1])}),
  ],
)
def test_numbers_out_of_range_are_not_sent(message):
  with pytest.raises(ValueError, match=f"{type(message).__name__}.*sent"):
    calls.pack(message)


def test_what_is_too_long_is_not_sent():
  rows = {0: (0, [0] * (calls.MAX_BYTES // 4))}
  with pytest.raises(ValueError, match=r"take smaller engine\.prefill_rows"):
    calls.pack(calls.Extend(1, rows))
