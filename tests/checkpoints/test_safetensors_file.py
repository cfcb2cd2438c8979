import contextlib
import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from etils.epath.testing import mock_epath
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arl_jax.checkpoints import (
  safetensors_file,
  safetensors_header,
  safetensors_writer,
)
from arl_jax.checkpoints.safetensors_file import SafetensorsFile, open_folder
from arl_jax.checkpoints.safetensors_writer import Writer
from arl_jax.checkpoints.source import Stored

DTYPES = [
  np.float64,
  np.float32,
  np.float16,
  ml_dtypes.bfloat16,
  ml_dtypes.float8_e4m3fn,
  ml_dtypes.float8_e5m2,
  np.int64,
  np.int32,
  np.int16,
  np.int8,
  np.uint64,
  np.uint32,
  np.uint16,
  np.uint8,
  np.bool_,
]


def _all(shape):
  return (slice(None),) * len(shape)


def _whole(source, name):
  return source.read(name, _all(source.tensors[name].shape))


def _random(dtype, shape, seed=0):
  """Any bits, since files are to come back bit by bit."""
  dtype = np.dtype(dtype)
  count = int(np.prod(shape)) * dtype.itemsize
  data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
  if dtype == np.bool_:
    data &= 1
  return data.view(dtype).reshape(shape)


def _same(one, other):
  return (
    one.dtype == other.dtype
    and one.shape == other.shape
    and one.tobytes() == other.tobytes()
  )


def _tensors():
  """Every dtype, with odd sizes, and shapes with no and one element."""
  tensors = {f"t.{np.dtype(d).name}": _random(d, (3, 5)) for d in DTYPES}
  tensors["scalar"] = _random(np.float32, ())
  tensors["empty"] = _random(np.int8, (0, 4))
  tensors["name ü\n"] = _random(np.int8, (7, 1, 2))
  return tensors


def _save(folder, tensors, **options):
  with Writer(
    folder, {n: Stored(x.shape, x.dtype) for n, x in tensors.items()}, **options
  ) as writer:
    for name, x in tensors.items():
      writer.write(name, x)


def _file(header, data=b""):
  """Bytes of a file; a header other than bytes is turned into JSON."""
  if not isinstance(header, bytes):
    header = json.dumps(header).encode()
  return len(header).to_bytes(8, "little") + header + data


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  """A file that hypothesis may write over and over."""
  return tmp_path_factory.mktemp("scratch") / "model.safetensors"


# Against the reference library.


def test_reads_what_the_library_writes(tmp_path):
  tensors = _tensors()
  path = tmp_path / "model.safetensors"
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt", "k": ""})
  with open_folder(tmp_path) as source:
    assert set(source.tensors) == set(tensors)
    for name, x in tensors.items():
      assert source.tensors[name] == Stored(x.shape, x.dtype)
      assert source.tensors[name].nbytes == x.nbytes
      read = _whole(source, name)
      assert _same(read, x)
      assert read.flags.c_contiguous
    assert source.metadata == {"format": "pt", "k": ""}


@pytest.mark.parametrize("shard_bytes", [5e9, 200])
def test_library_reads_what_we_write(tmp_path, shard_bytes):
  tensors = _tensors()
  _save(tmp_path, tensors, shard_bytes=shard_bytes)
  read = {}
  for path in tmp_path.glob("*.safetensors"):
    with safetensors.safe_open(path, "np") as file:
      assert file.metadata() == {"format": "pt"}
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name, entry in safetensors.deserialize(data):
      size = tensors[name].itemsize
      assert header[name]["data_offsets"][0] % size == 0
      read[name] = entry["shape"], bytes(entry["data"])
  assert read == {n: (list(x.shape), x.tobytes()) for n, x in tensors.items()}


def test_our_single_file_is_the_library_s_byte_for_byte(tmp_path):
  # Both order by falling item size, then name, and pad with spaces.
  tensors = {
    "b": _random(np.int8, (3,)),
    "a": _random(np.float32, (2, 2)),
    "c": _random(np.float32, (1,)),
  }
  _save(tmp_path, tensors)
  assert (tmp_path / "model.safetensors").read_bytes() == (
    safetensors.numpy.save(tensors, metadata={"format": "pt"})
  )


# Parts.


@st.composite
def _parts(draw):
  shape = draw(st.lists(st.integers(0, 7), max_size=4))
  index = []
  for n in shape:
    start = draw(st.integers(0, n))
    stop = draw(st.integers(start, n))
    index.append(
      slice(
        draw(st.sampled_from([start, np.int64(start)])) or None,
        draw(st.sampled_from([stop, None])),
        draw(st.sampled_from([None, 1])),
      )
    )
  return tuple(shape), tuple(index)


@settings(deadline=None, max_examples=150)
@given(_parts(), st.sampled_from([1, 16, 100, 1 << 20]))
def test_a_part_is_the_slice_of_the_whole(scratch, part, gap):
  shape, index = part
  x = _random(np.int16, shape, seed=1)
  safetensors.numpy.save_file({"before": np.ones(3, np.int8), "x": x}, scratch)
  # Small limits, so that small arrays take every way through the reader.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(safetensors_file, "_GAP", gap)
    patch.setattr(safetensors_file, "_CHUNK", 2 * gap)
    read = SafetensorsFile(scratch).read("x", index)
  assert _same(read, x[index])
  assert read.flags.c_contiguous


@pytest.mark.parametrize(
  "index",
  [
    (slice(None),),
    (slice(None),) * 3,
    (slice(0, 4), slice(None)),
    (slice(-1, None), slice(None)),
    (slice(2, 1), slice(None)),
    (slice(0, 2, 2), slice(None)),
    (slice(0, 1.5), slice(None)),
    (0, slice(None)),
    [slice(None), slice(None)],
  ],
)
def test_other_indices_are_refused(tmp_path, index):
  _save(tmp_path, {"x": np.zeros((3, 2), np.float32)})
  with pytest.raises(ValueError, match=r"index .* of tensor 'x' must be"):
    open_folder(tmp_path).read("x", index)


def test_reading_takes_the_part_s_bytes_and_memory(tmp_path, monkeypatch):
  # 256 MiB of zeros that take no room on the disk: [8, 1024, 8192] float32.
  header = {"x": {"dtype": "F32", "shape": [8, 1024, 8192]}}
  header["x"]["data_offsets"] = [0, 1 << 28]
  path = tmp_path / "model.safetensors"
  path.write_bytes(_file(header))
  os.truncate(path, path.stat().st_size + (1 << 28))
  source = SafetensorsFile(path)
  sizes = []
  exactly = safetensors_file.exactly

  def counted(file, size, where):
    sizes.append(size)
    return exactly(file, size, where)

  monkeypatch.setattr(safetensors_file, "exactly", counted)

  def cost(*index):
    sizes.clear()
    tracemalloc.start()
    part = source.read("x", index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return part.nbytes, sum(sizes), peak

  full = slice(None)
  # Two of the eight: 64 MiB, and what is copied at once, 8 MiB.
  part, read, peak = cost(slice(3, 5), full, full)
  assert part == read == 64 << 20
  assert peak < part + (9 << 20)
  # A few rows (32 KiB each) of two: only those are read.
  part, read, peak = cost(slice(3, 5), slice(7, 9), full)
  assert part == read == 4 * (32 << 10)
  assert peak < 1 << 20
  # A few columns: rows are read whole, but not kept.
  part, read, peak = cost(slice(3, 5), full, slice(0, 2))
  assert (part, read) == (2 * 1024 * 2 * 4, 64 << 20)
  assert peak < 9 << 20


def test_a_closed_or_absent_tensor_is_not_read(tmp_path):
  _save(tmp_path, {"x": np.zeros(3), "y": np.zeros(3)}, shard_bytes=8)
  with open_folder(tmp_path) as source:
    with pytest.raises(ValueError, match="no tensor 'z'"):
      source.read("z", ())
    file = SafetensorsFile(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="no tensor 'y'"):
      file.read("y", (slice(None),))
  with pytest.raises(ValueError, match="is closed"):
    source.read("x", (slice(None),))


def test_booleans_other_than_0_and_1_are_refused(tmp_path):
  entry = {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}
  path = tmp_path / "model.safetensors"
  path.write_bytes(_file({"x": entry}, b"\0\1\2"))
  source = SafetensorsFile(path)
  assert source.read("x", (slice(0, 2),)).tolist() == [False, True]
  with pytest.raises(ValueError, match="tensor 'x': byte 2 of a BOOL"):
    source.read("x", (slice(None),))


def test_a_file_cut_after_it_was_opened_is_an_error(tmp_path):
  _save(tmp_path, {"x": np.zeros(3)})
  source = open_folder(tmp_path)
  path = tmp_path / "model.safetensors"
  os.truncate(path, path.stat().st_size - 1)
  with pytest.raises(ValueError, match=r"'x': 24 bytes must follow.*after 23"):
    _whole(source, "x")


# Faults of files.

_X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _with(**changes):
  return {"x": {**_X, **changes}}


BAD = {
  "header too short": (_file(b"{"), "header length 1 must be"),
  "header beyond file": (
    (1000).to_bytes(8, "little") + b"{}",
    "header length 1000 must be between 2 and 2",
  ),
  "header huge": (b"\xff" * 8 + b"{}", "header length 18446744073709551615"),
  "header over 100 MB": (
    (100_000_001).to_bytes(8, "little") + b"{}",
    "header length 100000001",
  ),
  "no object": (_file(b"[]"), "must start with {"),
  "space first": (_file(b" {}"), "must start with {"),
  "not UTF-8": (_file(b'{"\xff"'), "must be UTF-8; byte 2 isn't"),
  "not JSON": (_file(b'{"x" 1}'), "isn't valid JSON: : must be at character 5"),
  "no key": (_file(b"{1}"), "a string must be at character 1"),
  "key without end": (_file(b'{"x'), "a string must be at character 1"),
  "half a surrogate": (_file(b'{"\\ud800":1}'), "isn't valid JSON: a string"),
  "trailing comma": (_file(b'{"__metadata__":{},}'), "isn't valid JSON"),
  "more after": (_file(b"{}{}"), "the end must be at character 2"),
  "deep": (_file(b'{"x":' + b"[" * 100_000), "a value of at most"),
  "long": (_file(b'{"x":{"dtype":"' + b"F" * 100_000), "a value of at most"),
  "long number": (_file(b'{"x":' + b"1" * 100_000), "must have dtype"),
  "name twice": (
    _file(b'{"x":%b,"x":%b}' % ((json.dumps(_X).encode(),) * 2), bytes(8)),
    "has 'x' twice",
  ),
  "metadata twice": (_file(b'{"__metadata__":{"a":"","a":""}}'), "'a' twice"),
  "metadata number": (_file({"__metadata__": {"a": 1}}), "a string must be"),
  "field twice": (
    _file(
      b'{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
      bytes(8),
    ),
    "must have dtype, shape and data_offsets, once each",
  ),
  "field more": (_file(_with(more=1), bytes(8)), "and nothing else"),
  "field less": (_file({"x": {"dtype": "F32"}}), "must have dtype, shape and"),
  "entry no object": (_file({"x": ["dtype"]}), "must have dtype, shape and"),
  "dtype unknown": (_file(_with(dtype="F4"), bytes(8)), "dtype 'F4' must be"),
  "dtype no string": (_file(_with(dtype=[]), bytes(8)), r"dtype \[\] must be"),
  "negative size": (_file(_with(shape=[-2]), bytes(8)), r"shape \[-2\] must"),
  "float size": (_file(_with(shape=[2.0]), bytes(8)), r"shape \[2.0\] must"),
  "boolean size": (_file(_with(shape=[True, 2]), bytes(8)), "shape .True, 2"),
  "shape no list": (_file(_with(shape=2), bytes(8)), "shape 2 must be"),
  "size NaN": (_file(_with(shape=[float("nan")]), bytes(8)), "nan. must be"),
  "size huge": (_file(_with(shape=[2**63]), bytes(8)), "from 0 to 2.63 - 1"),
  "bytes huge": (
    _file(_with(shape=[0, 2**40, 2**40], data_offsets=[0, 0])),
    "must have fewer than 2.63 bytes",
  ),
  "product overflows": (
    # 2^62 * 4 * 4 bytes are 0 modulo 2^64.
    _file(_with(shape=[2**62, 4], data_offsets=[0, 0])),
    "must have fewer than 2.63 bytes",
  ),
  "dimensions": (_file(_with(shape=[1] * 65), bytes(8)), "at most 64 integers"),
  "offsets one": (
    _file(_with(data_offsets=[8]), bytes(8)),
    "must be a list of",
  ),
  "offsets float": (
    _file(_with(data_offsets=[0, 8.0]), bytes(8)),
    r"data_offsets \[0, 8.0\] must be a list of two integers",
  ),
  "offsets swapped": (
    _file(_with(data_offsets=[8, 0]), bytes(8)),
    "0 <= begin <= end <= 8",
  ),
  "offsets negative": (
    _file(_with(data_offsets=[-8, 0]), bytes(8)),
    "0 <= begin <= end <= 8",
  ),
  "offsets beyond": (
    _file(_with(), bytes(7)),
    r"header of .*, tensor 'x': data_offsets \[0, 8\] must .* <= 7",
  ),
  "size mismatch": (
    _file(_with(shape=[3]), bytes(8)),
    r"\[0, 8\] must be 12 bytes apart, for shape \[3\] of F32",
  ),
  "gap at first": (
    _file(_with(data_offsets=[1, 9]), bytes(9)),
    "'x': data_offsets must start at 0.* they start at 1",
  ),
  "gap at last": (_file(_with(), bytes(9)), "end at byte 8 .* end at 9"),
  "gap between": (
    _file({**_with(), "y": {**_X, "data_offsets": [9, 17]}}, bytes(17)),
    "'y': data_offsets must start at 8.* they start at 9",
  ),
  "overlap": (
    _file({**_with(), "y": {**_X, "data_offsets": [4, 12]}}, bytes(12)),
    "'y': data_offsets must start at 8.* they start at 4",
  ),
  "same bytes": (_file({**_with(), "y": _X}, bytes(8)), "must start at 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_faults_are_value_errors_that_say_what(tmp_path, case):
  data, message = BAD[case]
  path = tmp_path / "model.safetensors"
  path.write_bytes(data)
  with pytest.raises(ValueError, match=message) as caught:
    SafetensorsFile(path)
  assert "\n" not in str(caught.value)
  assert str(path) in str(caught.value)
  assert len(str(caught.value)) < 1000


def test_names_in_errors_stay_short_and_on_one_line(tmp_path):
  path = tmp_path / "model.safetensors"
  path.write_bytes(_file({"a\n" * 10_000: {}}))
  with pytest.raises(ValueError, match="must have dtype") as caught:
    SafetensorsFile(path)
  assert "\n" not in str(caught.value)
  assert len(str(caught.value)) < 1000


def test_tensors_may_be_listed_in_any_order(tmp_path):
  # As the reference library reads them: only the offsets must be gapless.
  path = tmp_path / "model.safetensors"
  header = {
    "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
    "none": {"dtype": "U8", "shape": [0], "data_offsets": [1, 1]},
    "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
  }
  path.write_bytes(_file(header, b"\1\2\3"))
  source = SafetensorsFile(path)
  assert [_whole(source, n).tolist() for n in ("a", "b")] == [[1], [2, 3]]


def test_absent_files_and_folders_are_value_errors(tmp_path):
  with pytest.raises(ValueError, match="doesn't exist"):
    SafetensorsFile(tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match="it is a folder"):
    SafetensorsFile(tmp_path)
  with pytest.raises(ValueError, match=r"folder .*absent doesn't exist"):
    open_folder(tmp_path / "absent")
  with pytest.raises(ValueError, match=r"must hold model\.safetensors"):
    open_folder(tmp_path)


SMALL = safetensors.numpy.save(
  {
    "a": _random(np.float32, (2, 3)),
    "b.c": _random(np.int8, (5,), seed=1),
    "d": _random(np.bool_, (), seed=2),
  },
  metadata={"format": "pt"},
)
_HEADER_END = 8 + int.from_bytes(SMALL[:8], "little")


def _reads_right_or_refuses(path, data):
  """Whether it was read; if so, the reference library must agree."""
  path.write_bytes(data)
  try:
    source = SafetensorsFile(path)
    read = {n: _whole(source, n) for n in source.tensors}
  except ValueError as error:
    message = str(error)
  else:
    message = ""
  if message:
    assert "\n" not in message
    assert str(path) in message
    return False
  theirs = dict(safetensors.deserialize(data))
  assert {n: x.tobytes() for n, x in read.items()} == {
    n: bytes(entry["data"]) for n, entry in theirs.items()
  }
  assert {n: list(x.shape) for n, x in read.items()} == {
    n: entry["shape"] for n, entry in theirs.items()
  }
  return True


def test_cut_at_every_length_is_refused(scratch):
  assert _reads_right_or_refuses(scratch, SMALL)
  for length in range(len(SMALL)):
    assert not _reads_right_or_refuses(scratch, SMALL[:length])
  assert not _reads_right_or_refuses(scratch, SMALL + b"\0")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.booleans())
@example(b"{}", True)
def test_random_bytes_are_read_right_or_refused(scratch, data, as_header):
  _reads_right_or_refuses(scratch, _file(data) if as_header else data)


@settings(deadline=None, max_examples=600)
@given(
  st.lists(
    st.tuples(
      st.integers(8, _HEADER_END),
      st.integers(0, 4),
      st.one_of(
        st.binary(max_size=3),
        st.sampled_from(list('0123456789-.[]{},:" eE\\/')).map(str.encode),
        st.sampled_from([b"null", b"true", b"1e3", b"99999999999999999999"]),
      ),
    ),
    min_size=1,
    max_size=3,
  ),
  st.booleans(),
)
def test_mutated_headers_are_read_right_or_refused(
  scratch, edits, right_length
):
  header = SMALL[8:_HEADER_END]
  for at, removed, added in edits:
    header = header[: at - 8] + added + header[at - 8 + removed :]
  data = SMALL[_HEADER_END:]
  length = len(header).to_bytes(8, "little") if right_length else SMALL[:8]
  _reads_right_or_refuses(scratch, length + header + data)


_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=3)
  | st.sampled_from(["F32", "U8", "shape", "dtype", "data_offsets"]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(
  st.dictionaries(
    st.text(max_size=3) | st.just("__metadata__"),
    _VALUES
    | st.fixed_dictionaries(
      {
        "dtype": st.sampled_from(["U8", "F32", "BOOL"]) | _VALUES,
        "shape": st.lists(st.integers(-1, 4), max_size=2) | _VALUES,
        "data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2)
        | _VALUES,
      }
    ),
    max_size=3,
  ),
  st.integers(0, 9),
)
def test_odd_headers_are_read_right_or_refused(scratch, header, size):
  _reads_right_or_refuses(scratch, _file(header, bytes(size)))


@pytest.mark.parametrize(
  "header",
  [
    b"{" + b'"x":[' * 1_000_000,
    b'{"x":[' + b"[],[]," * 1_000_000,
    b'{"x":{' + b'"":0,' * 1_000_000,
    b'{"__metadata__":' + b"{" * 5_000_000,
    # Sizes say more than any machine has.
    _file(_with(shape=[2**40]))[8:],
  ],
)
def test_hostile_headers_take_memory_in_proportion(scratch, header):
  scratch.write_bytes(_file(header))
  tracemalloc.start()
  with pytest.raises(ValueError, match="header"):
    SafetensorsFile(scratch)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  # The bytes, the text, and a value that is being parsed.
  assert peak < 2 * len(header) + (1 << 20)


# Folders.


def _index(folder, weight_map, **more):
  (folder / "model.safetensors.index.json").write_text(
    json.dumps(
      {"metadata": {"total_size": 1}, "weight_map": weight_map, **more}
    )
  )


@pytest.fixture
def shards(tmp_path):
  """Shards `one` with tensor a and `two` with tensor b."""
  for i, (shard, name) in enumerate((("one", "a"), ("two", "b"))):
    safetensors.numpy.save_file(
      {name: np.full(2, i, np.int8)}, tmp_path / f"{shard}.safetensors"
    )
  return tmp_path


def test_an_index_leads_to_its_shards(shards):
  _index(shards, {"a": "one.safetensors", "b": "two.safetensors"})
  (shards / "other.safetensors").write_bytes(b"not listed, so not looked at")
  with open_folder(str(shards)) as source:
    assert _whole(source, "a").tolist() == [0, 0]
    assert _whole(source, "b").tolist() == [1, 1]


def test_without_an_index_all_files_count(shards):
  with open_folder(shards) as source:
    assert {n: _whole(source, n).tolist() for n in source.tensors} == {
      "a": [0, 0],
      "b": [1, 1],
    }


def test_the_single_file_comes_before_others(shards):
  safetensors.numpy.save_file({"c": np.zeros(1)}, shards / "model.safetensors")
  assert set(open_folder(shards).tensors) == {"c"}


@pytest.mark.parametrize(
  ("weight_map", "message"),
  [
    ({"a": "one.safetensors"} | {"c": "two.safetensors"}, "'c' must be in two"),
    ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' must be in one"),
    ({"a": "no.safetensors"}, r"no\.safetensors doesn't exist"),
    ({"a": "../one.safetensors"}, "must be the name of"),
    ({"a": "..\\one.safetensors"}, "must be the name of"),
    ({"a": "/one.safetensors"}, "must be the name of"),
    ({"a": "one.safetensors\0"}, "must be the name of"),
    ({"a": "config.json"}, "must be the name of"),
    ({"a": 1}, "a string must be at character"),
    ({"a": None}, "a string must be at character"),
    (["a"], "{ must be at character"),
    (None, "{ must be at character"),
  ],
)
def test_an_index_that_is_wrong_is_refused(shards, weight_map, message):
  _index(shards, weight_map)
  with pytest.raises(ValueError, match=message) as caught:
    open_folder(shards)
  assert "\n" not in str(caught.value)


def test_a_shard_may_hold_only_what_the_index_lists(shards):
  safetensors.numpy.save_file(
    {"a": np.zeros(2), "extra": np.zeros(2)}, shards / "one.safetensors"
  )
  _index(shards, {"a": "one.safetensors", "b": "two.safetensors"})
  with pytest.raises(ValueError, match=r"'extra'\] must be one\.safetensors"):
    open_folder(shards)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (b"{}", "has no weight_map"),
    (b"[]", "{ must be at character 0"),
    (b'{"weight_map":{"a":"x","a":"x"}}', "'a' twice"),
    (b'{"weight_map":{}} x', "the end must be"),
    (b'{"metadata":' + b"[" * 100_000, "a value of at most"),
    (b"\xff", "must be UTF-8"),
  ],
)
def test_an_index_that_is_no_index_is_refused(tmp_path, text, message):
  (tmp_path / "model.safetensors.index.json").write_bytes(text)
  with pytest.raises(ValueError, match=message):
    open_folder(tmp_path)


def test_an_index_has_a_longest_length(tmp_path, monkeypatch):
  monkeypatch.setattr(safetensors_header, "MAX_HEADER", 20)
  _index(tmp_path, {})
  with pytest.raises(ValueError, match="must have at most 20 bytes"):
    open_folder(tmp_path)


def test_a_tensor_in_two_files_is_refused(shards):
  safetensors.numpy.save_file({"a": np.zeros(1)}, shards / "two.safetensors")
  with pytest.raises(ValueError, match=r"'a' is also in one\.safetensors"):
    open_folder(shards)


def test_numbered_shards_must_be_all_there(tmp_path):
  tensors = {n: np.zeros(2) for n in "abc"}
  _save(tmp_path, tensors, shard_bytes=16)
  (tmp_path / "model.safetensors.index.json").unlink()
  assert set(open_folder(tmp_path).tensors) == set("abc")
  (tmp_path / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(ValueError, match=r"must hold 00003 shards.*holds 2"):
    open_folder(tmp_path)


# Writing.


def test_shards_and_index_are_as_planned(tmp_path):
  # 16 bytes each; 40 bytes a shard take two, and "large" is over that alone.
  tensors = {n: _random(np.float32, (4,), seed=ord(n)) for n in "cab"}
  tensors["large"] = _random(np.float32, (16,))
  tensors["d"] = _random(np.float32, (4,), seed=9)
  plan = {n: Stored(x.shape, x.dtype) for n, x in tensors.items()}
  writer = Writer(tmp_path, plan, shard_bytes=40)
  for name in reversed(tensors):
    assert not list(tmp_path.glob("*.safetensors"))
    writer.write(name, tensors[name])
  writer.close()
  writer.close()
  names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
  index = "model.safetensors.index.json"
  assert sorted(p.name for p in tmp_path.iterdir()) == [*names, index]
  assert json.loads((tmp_path / index).read_text()) == {
    # Four of 16 bytes and one of 64.
    "metadata": {"total_size": 128},
    "weight_map": {
      "c": names[0],
      "a": names[0],
      "b": names[1],
      "large": names[2],
      "d": names[3],
    },
  }
  with open_folder(tmp_path) as source:
    for name, x in tensors.items():
      assert _same(_whole(source, name), x)


def test_strided_arrays_are_written_by_value(tmp_path):
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  _save(tmp_path, {"x": x.T})
  assert _whole(open_folder(tmp_path), "x").tolist() == x.T.tolist()


def test_no_tensors_make_an_empty_file(tmp_path):
  _save(tmp_path, {})
  assert not open_folder(tmp_path).tensors
  assert safetensors.numpy.load_file(tmp_path / "model.safetensors") == {}


def test_what_is_not_planned_is_refused(tmp_path):
  f4 = np.dtype(np.float32)
  writer = Writer(tmp_path, {"x": Stored((2,), f4), "y": Stored((2,), f4)})
  with pytest.raises(ValueError, match="'z' isn't among those planned"):
    writer.write("z", np.zeros(2, f4))
  with pytest.raises(ValueError, match=r"'x' is float32\[3\]; planned"):
    writer.write("x", np.zeros(3, f4))
  with pytest.raises(ValueError, match=r"'x' is >f4\[2\]; planned"):
    writer.write("x", np.zeros(2, ">f4"))
  writer.write("x", np.zeros(2, f4))
  with pytest.raises(ValueError, match="'x' must be written once"):
    writer.write("x", np.zeros(2, f4))
  with pytest.raises(ValueError, match="'y' and 0 others weren't written"):
    writer.close()
  assert not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match="'y' comes after the writer's end"):
    writer.write("y", np.zeros(2, f4))


@pytest.mark.parametrize(
  ("tensors", "shard_bytes", "message"),
  [
    ({"__metadata__": np.zeros(1)}, 1, "'__metadata__' can't be stored"),
    ({"\ud800": np.zeros(1)}, 1, "can't be stored"),
    ({"x": np.zeros(1, np.complex64)}, 1, "dtype complex64 of tensor 'x'"),
    ({"x": np.zeros(1, ">f4")}, 1, "dtype >f4 of tensor 'x'"),
    ({"x": np.zeros(1)}, 0, "shard_bytes 0 must be positive"),
    ({"x": np.zeros(1)}, float("nan"), "shard_bytes nan must be positive"),
  ],
)
def test_bad_plans_write_nothing(tmp_path, tensors, shard_bytes, message):
  with pytest.raises(ValueError, match=message):
    _save(tmp_path / "new", tensors, shard_bytes=shard_bytes)
  assert not (tmp_path / "new").exists()


def test_a_header_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
  monkeypatch.setattr(safetensors_writer, "MAX_HEADER", 20)
  with pytest.raises(ValueError, match=r"header of .* bytes, at most 20"):
    _save(tmp_path, {"x": np.zeros(1)})


def test_an_existing_checkpoint_stays(tmp_path):
  _save(tmp_path, {"x": np.ones(1)})
  with pytest.raises(ValueError, match=r"holds model\.safetensors; a"):
    _save(tmp_path, {"x": np.zeros(1)})
  assert _whole(open_folder(tmp_path), "x").tolist() == [1]


def test_an_exception_takes_the_drafts_away(tmp_path):
  plan = {n: Stored((2,), np.dtype(np.float64)) for n in "ab"}
  with contextlib.suppress(KeyError), Writer(tmp_path, plan, 16) as writer:
    writer.write("a", np.zeros(2))
    raise KeyError
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_interrupted_save_never_looks_whole(tmp_path, monkeypatch, renames):
  tensors = {n: np.ones(2) for n in "abc"}
  writer = Writer(
    tmp_path,
    {n: Stored(x.shape, x.dtype) for n, x in tensors.items()},
    shard_bytes=16,
  )
  for name, x in tensors.items():
    writer.write(name, x)
  # As if the process died then: nothing is cleaned up.
  monkeypatch.setattr(writer, "abort", lambda: None)
  replace = os.replace
  done = []

  def dying(*paths):
    if len(done) == renames:
      raise KeyboardInterrupt
    done.append(replace(*paths))

  monkeypatch.setattr(os, "replace", dying)
  with pytest.raises(KeyboardInterrupt):
    writer.close()
  monkeypatch.undo()
  with pytest.raises(ValueError, match="must hold"):
    open_folder(tmp_path)
  if not renames:
    # What is left of it is no hindrance to the next one.
    _save(tmp_path, {"x": np.ones(1)})
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """An object store gs://bucket: files there are written in one go."""
  root = tmp_path / "bucket"
  root.mkdir()
  work = tmp_path / "work"
  work.mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(work))

  def local(path):
    return os.fspath(path).replace("gs://bucket", str(root), 1)

  def mapped(original, *paths, **options):
    return original(*map(local, paths), **options)

  def opened(original, path, mode):
    assert mode in ("rb", "wb", "r", "w")
    return original(local(path), mode)

  calls = ["isdir", "exists", "listdir", "makedirs", "remove", "replace"]
  with mock_epath(open=opened, **dict.fromkeys(calls, mapped)):
    yield root
  assert not list(work.iterdir())


def test_object_stores_are_written_and_read(bucket):
  tensors = {n: _random(np.float32, (4,), seed=ord(n)) for n in "abc"}
  _save("gs://bucket/run/hf", tensors, shard_bytes=32)
  assert sorted(p.name for p in (bucket / "run/hf").iterdir()) == [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
  ]
  with open_folder("gs://bucket/run/hf") as source:
    for name, x in tensors.items():
      assert _same(_whole(source, name), x)


def test_an_aborted_save_leaves_an_object_store_clean(bucket):
  plan = {n: Stored((2,), np.dtype(np.float64)) for n in "ab"}
  with contextlib.suppress(KeyError), Writer("gs://bucket/x", plan, 16) as w:
    w.write("a", np.zeros(2))
    assert len(list((bucket / "x").iterdir())) == 1
    raise KeyError
  assert not list((bucket / "x").iterdir())
