"""Text of tokens that come a few at a time, for any kind of tokenizer."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from arl_jax.serving.text_stream import TextStream

_WORDS = ["\u2581a", "\u2581tree", "b", "好", "\u2581", "!"]


def byte_fallback():
  """As sentencepiece: a run of bytes is read whole, or not at all."""
  vocab = {f"<0x{i:02X}>": i for i in range(256)}
  vocab |= {w: 256 + i for i, w in enumerate(_WORDS)}
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=[], byte_fallback=True)
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("\u2581", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  return tokenizer.decode


def plain_bytes(ids):
  """As GPT-2's relatives: bytes are put together, then read."""
  words = [w.replace("\u2581", " ").encode() for w in _WORDS]
  read = [bytes([i]) if i < 256 else words[i - 256] for i in ids]
  return b"".join(read).decode(errors="replace")


def said(decode, ids, sizes):
  stream, pieces, at = TextStream(decode), [], 0
  while at < len(ids):
    size = next(sizes)
    pieces.append(stream.feed(ids[at : at + size], last=at + size >= len(ids)))
    at += size
  return pieces


@pytest.mark.parametrize("decode", [byte_fallback(), plain_bytes])
def test_pieces_add_up_to_the_text(decode):
  draw = random.Random(0)
  for _ in range(60):
    ids = []
    for _ in range(draw.randint(1, 150)):
      if draw.random() < 0.5:
        ids.append(256 + draw.randrange(len(_WORDS)))
      else:
        # A character in bytes, of one to four.
        ids += draw.choice("aß€好🦜").encode() * draw.randint(1, 9)
    largest = draw.choice([1, 2, 5, 40])
    pieces = said(decode, ids, iter(lambda n=largest: draw.randint(1, n), 0))
    assert "".join(pieces) == decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("character", ["ß", "€", "🦜"])
@pytest.mark.parametrize("decode", [byte_fallback(), plain_bytes])
def test_a_long_run_of_bytes_is_said_a_character_at_a_time(decode, character):
  width = len(character.encode())
  pieces = said(decode, list(character.encode()) * 400, iter(lambda: 1, 0))
  assert pieces == (["" for _ in range(width - 1)] + [character]) * 400


def test_bytes_that_are_no_text_are_said_at_last():
  ids = [0x80] * 1000
  pieces = said(plain_bytes, ids, iter(lambda: 1, 0))
  assert "".join(pieces) == "\ufffd" * 1000
  # And not all of them at the end.
  assert sum(map(bool, pieces)) > 1


def test_the_whole_is_never_read_again():
  """Reading everything for each token would take quadratic time."""
  read = []

  def decode(ids):
    read.append(len(ids))
    return plain_bytes(ids)

  said(decode, [256, 259, 0x41] * 1000, iter(lambda: 1, 0))
  assert max(read) < 300
  assert sum(read) < 3000 * 70
