import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import zstandard

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import delta


def arrive(new, old):
  """What a reader that has `old` makes of the difference to `new`."""
  encoded = delta.encode(new, old)
  assert encoded.size <= new.nbytes
  if encoded.encoding == delta.SAME:
    assert encoded.size == 0
    return encoded, old
  if encoded.encoding == delta.WHOLE:
    return encoded, encoded.data
  line = old.copy()
  delta.apply(line, encoded.encoding, encoded.entries, encoded.data)
  return encoded, line


WORDS = st.sampled_from(["u1", "u2"]).flatmap(
  lambda kind: arrays.arrays(
    kind, st.integers(0, 300), elements=st.integers(0, 255)
  )
)


@hypothesis.given(new=WORDS, data=st.data())
def test_any_words_arrive_exactly(new, data):
  old = data.draw(arrays.arrays(new.dtype, new.shape))
  assert (arrive(new, old)[1] == new).all()
  assert (arrive(new, None)[1] == new).all()


@hypothesis.given(
  seed=st.integers(0, 1 << 30),
  size=st.integers(1, 300_000),
  changes=st.integers(0, 40),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_few_changes_far_apart_arrive_exactly(seed, size, changes):
  draw = np.random.default_rng(seed)
  old = draw.integers(0, 1 << 16, size, np.uint16)
  new = old.copy()
  new[draw.integers(0, size, changes)] ^= 0x8001
  assert (arrive(new, old)[1] == new).all()


@pytest.mark.parametrize("gap", [1, 65534, 65535, 65536, 65537, 131072, 200000])
@pytest.mark.parametrize("first", [0, 65535, 65536, 131072])
def test_gaps_of_any_length(gap, first):
  old = np.zeros(first + gap + 10, np.uint16)
  new = old.copy()
  new[first] = new[first + gap] = 7
  encoded, found = arrive(new, old)
  assert encoded.encoding == delta.SPARSE
  assert (found == new).all()


def test_the_encoding_is_the_shorter_one():
  draw = np.random.default_rng(0)
  old = draw.integers(0, 1 << 16, 100_000, np.uint16)

  def changed(share):
    bits = np.where(draw.random(old.size) < share, 1, 0).astype(np.uint16)
    return delta.encode(old ^ bits, old)

  few, many = changed(0.02), changed(0.6)
  assert few.encoding == delta.SPARSE
  # Positions need some 7 bits of the 16 each; the changed bit none.
  assert few.size < 0.02 * old.nbytes
  assert many.encoding == delta.XOR
  assert many.size < 0.15 * old.nbytes
  other = draw.integers(0, 1 << 16, old.size, np.uint16)
  assert delta.encode(other, old).encoding == delta.WHOLE
  assert delta.encode(old, old.copy()).encoding == delta.SAME


@pytest.mark.parametrize(
  ("dtype", "shape"),
  [
    (ml_dtypes.bfloat16, (3, 5)),
    (np.float32, (2, 2)),
    (ml_dtypes.float8_e4m3fn, (3,)),
    (np.int8, (0,)),
    (np.float32, ()),
  ],
)
def test_words_are_the_bytes_of_an_array(dtype, shape):
  array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
  line = delta.words(array)
  assert line.tobytes() == array.tobytes()
  assert line.itemsize == (1 if array.nbytes % 2 else 2)


class TestDamage:
  old = np.zeros(1000, np.uint16)
  new = np.where(np.arange(1000) % 50, 0, 3).astype(np.uint16)

  @pytest.mark.parametrize("every", [50, 2])
  def test_any_flipped_bit_is_an_error_or_shows_in_the_words(self, every):
    new = np.where(np.arange(1000) % every, 0, 3).astype(np.uint16)
    encoded = delta.encode(new, self.old)
    for place in range(encoded.size):
      data = bytearray(encoded.data)
      data[place] ^= 16
      line = self.old.copy()
      try:
        delta.apply(line, encoded.encoding, encoded.entries, bytes(data))
      except DamagedError:
        continue
      # What the format ignores does no harm; the rest a checksum finds.
      assert line.size == new.size

  def test_what_unpacks_to_more_is_never_unpacked(self):
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(bomb) < 20_000
    for encoding, entries in ((delta.XOR, 0), (delta.SPARSE, 20)):
      with pytest.raises(DamagedError, match="unpacks to 268435456 bytes"):
        delta.apply(self.old.copy(), encoding, entries, bomb)

  def test_a_size_that_is_not_told_is_refused(self):
    packer = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(DamagedError, match="2000 are right"):
      delta.apply(self.old.copy(), delta.XOR, 0, packer.compress(bytes(2000)))

  @pytest.mark.parametrize("data", [b"", b"\0" * 64])
  def test_no_frame_at_all(self, data):
    with pytest.raises(DamagedError, match="can't be unpacked"):
      delta.apply(self.old.copy(), delta.XOR, 0, data)

  def test_a_place_beyond_the_end(self):
    encoded = delta.encode(self.new, self.old)
    with pytest.raises(DamagedError, match="beyond the array's end"):
      delta.apply(
        np.zeros(500, np.uint16),
        encoded.encoding,
        encoded.entries,
        encoded.data,
      )

  def test_two_frames_are_not_one(self):
    encoded = delta.encode(self.new, self.old)
    with pytest.raises(DamagedError, match="can't be unpacked"):
      delta.apply(
        self.old.copy(), encoded.encoding, encoded.entries, encoded.data * 2
      )
