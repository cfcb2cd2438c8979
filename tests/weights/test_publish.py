"""Versions arrive bit for bit, whatever the meshes, and old ones go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import model, sharding
from arl_jax.model import ModelConfig
from arl_jax.sharding import make_mesh
from arl_jax.weights import MissingError, Publisher, Subscriber
from arl_jax.weights.storage import Storage
from tests.weights.published import (
  assert_is,
  like,
  numbers,
  publish,
  publishing,
  rounded,
  subscribed,
  weights,
)

MESHES = (
  {"fsdp": 8},
  {"fsdp": 2, "tensor": 4},
  {"data": 2, "expert": 2, "tensor": 2},
  {"data": 8},
)


def encodings(folder, place):
  tensors = Storage(folder).manifest(place).tensors.values()
  return {part.encoding for tensor in tensors for part in tensor.parts}


def test_each_version_arrives_by_a_base_or_differences(tmp_path):
  with (
    publishing(tmp_path, base_every=3) as publisher,
    subscribed(tmp_path) as reader,
  ):
    assert reader.newest() is None
    assert reader.held is None
    applied = []
    for number in range(7):
      publish(publisher, number)
      assert reader.newest() == publisher.newest
      assert reader.held != publisher.newest
      fetched = reader.fetch()
      assert_is(fetched, number)
      assert fetched.version == publisher.newest == reader.held
      reader.verify(rounded(weights(number)))
      reader.verify(fetched.params)
      applied.append(fetched.applied)
    assert applied == [1] * 7
    # The newest whole chain stays: one base here.
    assert numbers(tmp_path) == [6]


def test_differences_are_small_and_bases_whole(tmp_path):
  with publishing(tmp_path, 0, 1, 2):
    first, *later = Storage(tmp_path).places()
    assert encodings(tmp_path, first) == {"whole"}
    for place in later:
      assert encodings(tmp_path, place) <= {"sparse", "xor", "same", "whole"}
      assert Storage(tmp_path).manifest(place).base is not None
    # The scalar and the experts change; most of the embedding doesn't.
    sizes = [sum(Storage(tmp_path).manifest(p).files.values()) for p in later]
    whole = sum(Storage(tmp_path).manifest(first).files.values())
    assert max(sizes) < whole / 4


def test_who_was_away_applies_the_chain(tmp_path):
  with (
    publishing(tmp_path, 0) as publisher,
    subscribed(tmp_path) as reader,
    subscribed(tmp_path) as later,
  ):
    reader.fetch()
    publish(publisher, 1, 2, 5)
    fetched = reader.fetch()
    assert_is(fetched, 5)
    assert fetched.applied == 3
    assert later.fetch().applied == 4
    publish(publisher, 6)
    one, two = reader.fetch(), later.fetch()
    assert one.applied == two.applied == 1
    assert one.version == two.version


def test_what_is_held_is_given_again_without_reading(tmp_path):
  with publishing(tmp_path, 0), subscribed(tmp_path) as reader:
    reader.fetch()
    again = reader.fetch()
    assert_is(again, 0)
    assert (again.applied, again.bytes) == (0, 0)


def test_an_earlier_number_can_be_asked_for(tmp_path):
  with publishing(tmp_path, 0, 1, 2), subscribed(tmp_path) as reader:
    assert_is(reader.fetch(1), 1)
    assert_is(reader.fetch(0), 0)
    with pytest.raises(MissingError, match="no version 9, only 0, 1, 2"):
      reader.fetch(9)
    assert reader.held.number == 0
    assert_is(reader.start_fetch().result(timeout=60), 2)


@pytest.mark.parametrize("writer", MESHES)
@pytest.mark.parametrize("wanted", [*MESHES, None])
def test_readers_have_other_meshes_than_the_writer(tmp_path, writer, wanted):
  mesh = make_mesh(**writer)
  tree = like(None if wanted is None else make_mesh(**wanted))
  with (
    publishing(tmp_path, 0, mesh=mesh) as publisher,
    subscribed(tmp_path, tree) as reader,
  ):
    assert_is(reader.fetch(), 0)
    publish(publisher, 1, 2, mesh=mesh)
    fetched = reader.fetch()
    assert_is(fetched, 2)
    assert fetched.applied == 2
    reader.verify(fetched.params)
    for leaf, found in zip(
      *map(jax.tree.leaves, (tree, fetched.params)), strict=True
    ):
      if wanted is not None:
        assert found.sharding == leaf.sharding


def test_each_device_has_its_file_and_replicas_write_once(tmp_path):
  with publishing(tmp_path, 0, mesh=make_mesh(data=2, tensor=4)):
    (place,) = Storage(tmp_path).places()
    found = Storage(tmp_path).manifest(place)
  held = sum(x.nbytes for x in jax.tree.leaves(rounded(weights())))
  assert sum(found.files.values()) == held
  assert len(found.files) == 4


def test_a_reader_of_one_device_reads_that_part_only(tmp_path):
  split = make_mesh(fsdp=8)
  alone = sharding.shardings(
    {"x": sharding.Spec(shape=(64, 64), axes=("width", None))}, split
  )["x"]
  x = jax.device_put(jnp.ones((64, 64)), alone)
  wanted = {"x": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=alone)}
  publisher = Publisher(tmp_path, ["a"])
  publisher.publish({"x": x}, 0)
  publisher.close()
  with subscribed(tmp_path, wanted) as reader:
    # As if the others were another process's.
    box = reader._loader._boxes["x"]
    reader._loader._boxes["x"] = box[2:3]
    loaded, _, read = reader._load(None)
  assert read == 64 * 64 * 2 // 8
  assert list(loaded.words) == [("x", ((16, 0), (24, 64)))]


@pytest.mark.parametrize("piece_bytes", [256, 1000, 1 << 20])
def test_cut_into_pieces_experts_arrive_whole(tmp_path, piece_bytes):
  config = ModelConfig(
    vocab_size=16, width=16, heads=2, head_dim=8, experts=4, router="sigmoid"
  )
  mesh = make_mesh(expert=4, tensor=2)
  places = sharding.shardings(model.specs(config), mesh)
  params = jax.device_put(model.init(config, jax.random.key(0)), places)
  assert any(
    "experts" in s.axes
    for s in jax.tree.leaves(
      model.specs(config), is_leaf=lambda x: isinstance(x, sharding.Spec)
    )
  )
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params
  )
  publisher = Publisher(tmp_path, ["a"], dtype=None, piece_bytes=piece_bytes)
  with subscribed(tmp_path, shapes) as reader:
    for number in range(3):
      publisher.publish(params, number)
      publisher.wait()
      fetched = reader.fetch()
      for found, right in zip(
        *map(jax.tree.leaves, (fetched.params, params)), strict=True
      ):
        assert (np.asarray(found) == np.asarray(right)).all()
      reader.verify(params)
      params = jax.tree.map(lambda x: x * (1 + 1e-6), params)
  publisher.close()


def test_rounding_is_to_nearest_even_and_spares_selection_biases(tmp_path):
  # Halfway between two bfloat16 numbers: 1 + 2^-8 and 1 + 3 * 2^-8.
  x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, np.inf], np.float32)
  tree = {"x": jnp.asarray(x), "choice_bias": jnp.asarray(x[:3])}
  wanted = jax.tree.map(jnp.zeros_like, tree)
  publisher = Publisher(tmp_path, ["a"])
  publisher.publish(tree, 0)
  publisher.close()
  with subscribed(tmp_path, wanted) as reader:
    found = reader.fetch().params
  # Widened to what is wanted.
  assert found["x"].dtype == np.float32
  assert found["x"].tolist() == [1, 1 + 2**-6, -1, np.inf]
  assert (found["choice_bias"] == x[:3]).all()


def test_a_copy_is_taken_before_the_update_takes_the_arrays_away(tmp_path):
  update = jax.jit(lambda x: x + 1, donate_argnums=0)
  publisher = Publisher(tmp_path, ["a"], dtype=None)
  x = jnp.arange(1 << 16, dtype=jnp.float32)
  right = np.array(x)
  for number in range(3):
    publisher.publish({"x": x}, number)
    x = update(x)
  publisher.close()
  wanted = {"x": jax.ShapeDtypeStruct(x.shape, jnp.float32)}
  with subscribed(tmp_path, wanted) as reader:
    assert (reader.fetch().params["x"] == right + 2).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"layer": None}, "has a tensor layer/"),
    ({"extra": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}, "no tensor extra"),
    (
      {"embed": jax.ShapeDtypeStruct((32, 8), jnp.bfloat16)},
      r"embed of version 0 .* is bfloat16\[32, 16\], bfloat16\[32, 8\]",
    ),
    (
      {"embed": jax.ShapeDtypeStruct((32, 16), jnp.float16)},
      r"bfloat16\[32, 16\], float16\[32, 16\] is wanted",
    ),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
  with (
    publishing(tmp_path, 0),
    subscribed(tmp_path, {**like(), **change}) as reader,
  ):
    with pytest.raises(ValueError, match=message):
      reader.fetch()
    assert reader.held is None


def test_bad_arguments_are_named(tmp_path):
  for options, message in (
    ({"base_every": 0}, "base_every is 0"),
    ({"quota_bytes": 0}, "quota_bytes is 0"),
    ({"piece_bytes": 0}, "piece_bytes is 0"),
    ({"lease_s": 0}, "lease_s is 0"),
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"dtype": "float12"}, "dtype 'float12' is none of"),
  ):
    with pytest.raises(ValueError, match=message):
      Publisher(tmp_path, ["a"], **options)
  for lineage in ([], ["a/b"], [7]):
    with pytest.raises(ValueError, match="lineage"):
      Publisher(tmp_path, lineage)
  with pytest.raises(ValueError, match="lease_s"):
    Subscriber(tmp_path, like(), lease_s=float("nan"))
  with publishing(tmp_path, 3) as publisher:
    with pytest.raises(ValueError, match="number is 3, must be at least 4"):
      publisher.publish(weights(), 3)
    with pytest.raises(ValueError, match=r"x can't be published.*complex64"):
      publisher.publish({"x": jnp.zeros(2, jnp.complex64)}, 4)


def test_a_changed_layout_is_published_whole(tmp_path):
  with (
    publishing(tmp_path, 0, mesh=make_mesh(fsdp=8)) as publisher,
    subscribed(tmp_path) as reader,
  ):
    reader.fetch()
    publish(publisher, 1, mesh=make_mesh(tensor=8))
    assert_is(reader.fetch(), 1)


def test_verify_names_what_is_not_held(tmp_path):
  with publishing(tmp_path, 0), subscribed(tmp_path) as reader:
    with pytest.raises(ValueError, match="no version is held"):
      reader.verify(rounded(weights()))
    params = reader.fetch().params
    old = params["layer"]["experts"]
    changed = np.array(old)
    changed[3, 2, 1] += 1
    with pytest.raises(ValueError, match="layer/experts isn't what version 0"):
      reader.verify(
        {**params, "layer": {**params["layer"], "experts": changed}}
      )
    with pytest.raises(ValueError, match="embed is missing"):
      reader.verify({"layer": params["layer"]})


def test_what_was_widened_on_the_way_is_verified_too(tmp_path):
  """A policy that computes in float32 takes weights rounded to bfloat16."""
  wide = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), rounded(weights())
  )
  with publishing(tmp_path, 0):
    reader = Subscriber(tmp_path, wide)
    params = reader.fetch().params
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    reader.verify(params)
    changed = np.nextafter(np.array(params["layer"]["experts"]), 9.0)
    with pytest.raises(ValueError, match="layer/experts isn't what version 0"):
      reader.verify(
        {**params, "layer": {**params["layer"], "experts": changed}}
      )
    reader.close()


def test_configuration_names_its_fields():
  from arl_jax.weights import WeightsConfig

  WeightsConfig().validate("weights")
  for field, value in (
    ("base_every", 0),
    ("quota_bytes", -1),
    ("dtype", "int8"),
  ):
    config = dataclasses.replace(WeightsConfig(), **{field: value})
    with pytest.raises(ValueError, match=f"weights.{field} is"):
      config.validate("weights")
