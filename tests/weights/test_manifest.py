import copy
import json
import pathlib

import pytest

from arl_jax.checkpoints import sealed
from arl_jax.checkpoints.failure import DamagedError, ForeignError
from arl_jax.weights import manifest
from arl_jax.weights.manifest import Manifest, Part, Tensor, Version

_GOLDEN = pathlib.Path(__file__).parent / "testdata" / "version.json"
_ABC = manifest.checksum(b"abc")


def part(start, stop, offset, size, encoding="whole", entries=0):
  return Part(
    start=start,
    stop=stop,
    file="shard-00000.bin",
    offset=offset,
    bytes=size,
    encoding=encoding,
    entries=entries,
    payload=_ABC,
    content=_ABC,
  )


def sample():
  tensors = {
    "embed": Tensor(
      shape=(4, 2),
      dtype="bfloat16",
      parts=(
        part((0, 0), (2, 2), 0, 8),
        part((2, 0), (4, 2), 8, 7, "sparse", 2),
      ),
    ),
    "scale": Tensor(
      shape=(), dtype="float32", parts=(part((), (), 15, 0, "same"),)
    ),
  }
  return Manifest(
    version=Version(7, "3f2a9c01d4e5", manifest.content_checksum(tensors)),
    base=Version(6, "3f2a9c01d4e5", _ABC),
    files={"shard-00000.bin": 15},
    tensors=tensors,
  )


def test_the_format_is_the_golden_one():
  # If this fails on purpose, raise SCHEMA_VERSION and write the file anew.
  assert manifest.to_text(sample()) == _GOLDEN.read_text()
  assert manifest.from_text(_GOLDEN.read_text()) == sample()


def test_checksums_are_xxh3_of_128_bits():
  # From the reference implementation's `xxh128sum`.
  assert manifest.checksum(b"") == "99aa06d3014798d86001c324468d497f"
  assert _ABC == "06b05ab6733a618578af5f94892f3950"


def test_the_checksum_of_a_version_depends_on_all_it_holds():
  tensors = dict(sample().tensors)
  seen = {manifest.content_checksum(tensors)}
  seen.add(manifest.content_checksum({"embed": tensors["embed"]}))
  seen.add(manifest.content_checksum({**tensors, "x": tensors["scale"]}))
  other = manifest.checksum(b"abd")
  for changed in (
    Tensor(shape=(), dtype="int32", parts=tensors["scale"].parts),
    Tensor(shape=(1,), dtype="float32", parts=tensors["scale"].parts),
    Tensor(
      shape=(),
      dtype="float32",
      parts=(
        Part(
          **{
            **{f: getattr(part((), (), 0, 0), f) for f in Part.__slots__},
            "content": other,
          }
        ),
      ),
    ),
  ):
    seen.add(manifest.content_checksum({**tensors, "scale": changed}))
  assert len(seen) == 6


def body():
  return json.loads(_GOLDEN.read_text())["arl_jax_weights"]


def read(changed):
  return manifest.from_text(sealed.seal("arl_jax_weights", changed))


def change(path, value):
  """The golden body with one field changed, its seal intact."""
  changed = copy.deepcopy(body())
  *owners, last = path
  owner = changed
  for key in owners:
    owner = owner[key]
  owner[last] = value
  return changed


_PART = ("tensors", "embed", "parts", 1)


@pytest.mark.parametrize(
  ("path", "value"),
  [
    (("version",), None),
    (("version", "number"), -1),
    (("version", "number"), True),
    (("version", "number"), 7.0),
    (("version", "lineage"), "../up"),
    (("version", "checksum"), _ABC),
    (("base", "number"), 7),
    (("base", "lineage"), "other"),
    (("base",), {}),
    (("files",), []),
    (("files",), {"../../etc/passwd": 15}),
    (("files",), {"shard-00000.bin": 14}),
    (("files",), {"shard-00000.bin": 16}),
    (("files",), {"shard-00000.bin": 15, "shard-00001.bin": 1}),
    (("tensors",), []),
    (("tensors", "embed", "dtype"), "object"),
    (("tensors", "embed", "dtype"), ["float32"]),
    (("tensors", "embed", "shape"), [4, 3]),
    (("tensors", "embed", "shape"), [4]),
    (("tensors", "embed", "shape"), [1 << 62, 1 << 62]),
    (("tensors", "embed", "shape"), "42"),
    (("tensors", "embed", "parts"), []),
    (("tensors", "embed", "extra"), 1),
    ((*_PART, "start"), [1, 0]),
    ((*_PART, "stop"), [5, 2]),
    ((*_PART, "file"), "version.json"),
    ((*_PART, "file"), "shard-00001.bin"),
    ((*_PART, "offset"), 7),
    ((*_PART, "offset"), 1 << 70),
    ((*_PART, "bytes"), 8),
    ((*_PART, "encoding"), "xor"),  # With entries.
    ((*_PART, "encoding"), "pickle"),
    ((*_PART, "encoding"), {}),
    ((*_PART, "entries"), 0),
    ((*_PART, "entries"), 9),
    ((*_PART, "payload"), ""),
    ((*_PART, "content"), manifest.checksum(b"x")),
  ],
)
def test_what_contradicts_itself_is_damaged(path, value):
  with pytest.raises(DamagedError, match=r"is no manifest"):
    read(change(path, value))


def test_a_base_holds_no_differences():
  with pytest.raises(DamagedError, match="can't be 7 bytes of 'sparse'"):
    read(change(("base",), None))


def test_other_schema_versions_are_told_apart_from_damage():
  with pytest.raises(ValueError, match="schema_version 2") as caught:
    read(change(("schema_version",), 2))
  assert not isinstance(caught.value, DamagedError)
  with pytest.raises(ForeignError, match="arl_jax_weights"):
    manifest.from_text("{}")
  for value in ([], 1, "text", None):
    with pytest.raises(ValueError, match=r"."):
      read(value)


def test_any_changed_character_is_noticed():
  text = _GOLDEN.read_text()
  for place in range(0, len(text), 7):
    flipped = chr(ord(text[place]) ^ 1)
    with pytest.raises((DamagedError, ForeignError)):
      manifest.from_text(text[:place] + flipped + text[place + 1 :])
  for length in range(0, len(text), 41):
    with pytest.raises((DamagedError, ForeignError)):
      manifest.from_text(text[:length])


@pytest.mark.parametrize(
  "boxes",
  [
    [((0, 0), (4, 2))],
    [((0, 0), (2, 1)), ((0, 1), (2, 2)), ((2, 0), (4, 1)), ((2, 1), (4, 2))],
  ],
)
def test_grids_fill_a_shape(boxes):
  manifest.check_tiling((4, 2), boxes)


@pytest.mark.parametrize(
  "boxes",
  [
    [],
    [((0, 0), (3, 2))],
    [((0, 0), (2, 2)), ((1, 0), (4, 2))],
    [((0, 0), (2, 2)), ((0, 0), (2, 2))],
    [((0, 0), (2, 1)), ((0, 1), (2, 2)), ((2, 0), (4, 1))],
    [((0, 0), (4, 2)), ((4, 0), (4, 2))],
    [((0,), (4,))],
  ],
)
def test_what_is_no_grid_is_refused(boxes):
  with pytest.raises(ValueError, match=r"parts|other axes"):
    manifest.check_tiling((4, 2), boxes)
