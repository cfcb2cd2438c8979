"""Published checkpoints in and out; the goldens' logits are in tests/model."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from arl_jax import checkpoints, sharding
from arl_jax.checkpoints import hf_config
from arl_jax.model import ModelConfig, add_mtp, init, specs

DATA = pathlib.Path(__file__).parents[1] / "testdata" / "models"
FAMILIES = sorted(folder.name for folder in DATA.iterdir())


def _equal(one, two):
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True
  ):
    np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def _copy(tmp_path, family="llama"):
  folder = tmp_path / family
  shutil.copytree(DATA / family, folder)
  return folder


def _change_config(folder, **values):
  path = folder / "config.json"
  config = json.loads(path.read_text()) | values
  path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def _change_tensors(folder, change):
  tensors = load_file(folder / "model.safetensors")
  change(tensors)
  save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again_is_the_same(family, tmp_path):
  config, params = checkpoints.load(DATA / family, dtype=np.float32)
  checkpoints.save_hf(tmp_path / "out", config, params)
  again, loaded = checkpoints.load(tmp_path / "out")
  assert again == config
  _equal(loaded, params)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "kimi_k2"])
def test_fresh_mtp_module_is_saved_and_loaded_again(family, tmp_path):
  config, params = checkpoints.load(DATA / family)
  assert not config.mtp_heads
  config, params = add_mtp(config, params, jax.random.key(0))
  assert params["mtp"]["project"].dtype == params["embed"].dtype
  with pytest.raises(ValueError, match="mtp_heads is 1 already"):
    add_mtp(config, params, jax.random.key(0))
  checkpoints.save_hf(tmp_path / "out", config, params)
  again, loaded = checkpoints.load(tmp_path / "out")
  assert again == config
  _equal(loaded, params)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_saved_tensors_have_the_published_names_and_values(family, tmp_path):
  checkpoints.save_hf(tmp_path, *checkpoints.load(DATA / family))
  saved = load_file(tmp_path / "model.safetensors")
  published = load_file(DATA / family / "model.safetensors")
  assert set(saved) == set(published)
  for name, tensor in published.items():
    np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_fp8", "gpt_oss"])
def test_parts_of_eight_devices_are_those_of_the_whole(family):
  _, whole = checkpoints.load(DATA / family, dtype=np.float32)
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  config, parts = checkpoints.load(DATA / family, dtype=np.float32, mesh=mesh)
  _equal(parts, whole)
  places = sharding.shardings(specs(config), mesh)
  for a, place in zip(*map(jax.tree.leaves, (parts, places)), strict=True):
    assert a.sharding == place
  gate = parts["layers"]["001"]["moe"]["gate"]
  assert gate.addressable_shards[0].data.size == gate.size // 8


def test_scanned_models_are_saved_layer_by_layer(tmp_path):
  config, params = checkpoints.load(DATA / "gpt_oss")
  scanned = dataclasses.replace(config, scan_layers=True)
  names = [f"{i:03d}" for i in range(4)]
  layers = {
    first: jax.tree.map(
      lambda *a: jnp.stack(a), *(params["layers"][n] for n in names[i::2])
    )
    for i, first in enumerate(("000", "001"))
  }
  checkpoints.save_hf(tmp_path, scanned, {**params, "layers": layers})
  _, loaded = checkpoints.load(tmp_path)
  _equal(loaded, params)


def test_dtype_is_as_stored_or_as_asked():
  _, quantised = checkpoints.load(DATA / "gpt_oss_mxfp4")
  assert {x.dtype for x in jax.tree.leaves(quantised)} == {
    jnp.dtype("bfloat16")
  }
  _, halves = checkpoints.load(DATA / "deepseek_v3", dtype=ml_dtypes.bfloat16)
  # The selection bias decides between experts by small differences.
  kinds = {
    path[-1].key: x.dtype
    for path, x in jax.tree_util.tree_leaves_with_path(halves)
  }
  assert kinds.pop("choice_bias") == jnp.float32
  assert set(kinds.values()) == {jnp.dtype("bfloat16")}


def test_older_and_newer_forms_of_a_configuration_agree():
  values = json.loads((DATA / "deepseek_v3" / "config.json").read_text())
  older = dict(values)
  rope = older.pop("rope_parameters")
  theta = rope.pop("rope_theta")
  rope["type"] = rope.pop("rope_type")
  older |= {"rope_theta": theta, "rope_scaling": rope}
  assert hf_config.from_hf(older) == hf_config.from_hf(values)


def test_language_model_of_a_multimodal_checkpoint_is_read(tmp_path):
  # As Kimi K2.5 has it: a nested configuration, a prefix, a vision tower.
  folder = _copy(tmp_path, "kimi_k2")
  inner = json.loads((folder / "config.json").read_text())
  outer = {"model_type": "kimi_k25", "text_config": inner}
  (folder / "config.json").write_text(json.dumps(outer))

  def nest(tensors):
    for name in list(tensors):
      tensors[f"language_model.{name}"] = tensors.pop(name)
    tensors["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)

  _change_tensors(folder, nest)
  config, params = checkpoints.load(folder)
  alone, want = checkpoints.load(DATA / "kimi_k2")
  assert config == alone
  _equal(params, want)


def test_missing_tensor_is_named(tmp_path):
  folder = _copy(tmp_path)
  name = "model.layers.1.mlp.up_proj.weight"
  _change_tensors(folder, lambda t: t.pop(name))
  with pytest.raises(ValueError, match=rf"no tensor {name} \(96, 48\)"):
    checkpoints.load(folder)


def test_left_over_tensor_is_named(tmp_path):
  folder = _copy(tmp_path)
  extra = {"model.layers.2.mlp.up_proj.weight": np.ones((96, 48), np.float32)}
  _change_tensors(folder, lambda t: t.update(extra))
  with pytest.raises(ValueError, match=r"1 tensors .* model.layers.2.mlp.up"):
    checkpoints.load(folder)


def test_misshapen_tensor_is_named(tmp_path):
  folder = _copy(tmp_path)
  part = {"model.norm.weight": np.ones(47, np.float32)}
  _change_tensors(folder, lambda t: t.update(part))
  with pytest.raises(ValueError, match=r"norm.weight has shape \(47,\), not"):
    checkpoints.load(folder)


def test_integers_are_no_weights(tmp_path):
  folder = _copy(tmp_path)
  part = {"model.norm.weight": np.ones(48, np.int8)}
  _change_tensors(folder, lambda t: t.update(part))
  with pytest.raises(ValueError, match=r"norm\.weight is int8, not floating"):
    checkpoints.load(folder)


def test_truncated_file_is_named(tmp_path):
  folder = _copy(tmp_path)
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"model\.safetensors"):
    checkpoints.load(folder)


@pytest.mark.parametrize(
  ("values", "match"),
  [
    ({"model_type": "mamba"}, "model_type is 'mamba', not one of"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"hidden_size": "gone"}, "no 'hidden_size'"),
    ({"hidden_size": "48"}, "hidden_size is '48', not of type int"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_key_value_heads": 4}, "kv_heads 4 does not divide heads 6"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max"),
    ({"rope_parameters": [1]}, "rope_parameters is"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
  ],
  ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_wrong_configuration_is_named(values, match, tmp_path):
  folder = _copy(tmp_path)
  _change_config(folder, **values)
  with pytest.raises(ValueError, match=match):
    checkpoints.load(folder)


@pytest.mark.parametrize(
  ("family", "values", "match"),
  [
    ("llama", {"num_hidden_layers": 10**9}, "1000000000 layers have more"),
    ("qwen3_moe", {"num_local_experts": 10**9}, "with 1000000000 experts"),
    ("gpt_oss", {"num_hidden_layers": 10**9}, "layer_types is"),
    ("gpt_oss", {"num_local_experts": 10**9}, r"has shape \(64, 8\)|shape"),
  ],
)
def test_absurd_sizes_are_refused_at_once(family, values, match, tmp_path):
  folder = _copy(tmp_path, family)
  _change_config(folder, **values)
  with pytest.raises(ValueError, match=match):
    checkpoints.load(folder)


def test_head_that_is_not_tied_is_not_dropped(tmp_path):
  folder = _copy(tmp_path, "qwen3_moe")
  _change_config(folder, tie_word_embeddings=True)
  with pytest.raises(ValueError, match=r"lm_head\.weight differs from model"):
    checkpoints.load(folder)


@pytest.mark.parametrize("dtype", ["int8", "float99", "complex64", object])
def test_only_floating_types_are_taken(dtype):
  with pytest.raises(ValueError, match=r"dtype is .*, not one of float32"):
    checkpoints.load(DATA / "llama", dtype=dtype)


@pytest.mark.parametrize(
  "rules", [{"width": "fsdp"}, {"width": ("nope",)}, {"size": ("fsdp",)}]
)
def test_wrong_rules_are_named(rules):
  with pytest.raises(ValueError, match="rules: "):
    checkpoints.load(DATA / "llama", rules=rules)


def test_no_rules_replicate():
  mesh = sharding.make_mesh(fsdp=8)
  _, params = checkpoints.load(DATA / "llama", mesh=mesh, rules={})
  assert all(x.is_fully_replicated for x in jax.tree.leaves(params))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\x00"])
def test_configuration_that_is_no_object_is_refused(text, tmp_path):
  folder = _copy(tmp_path)
  (folder / "config.json").write_text(text)
  with pytest.raises(ValueError, match=r"config\.json"):
    checkpoints.load(folder)


def test_nothing_there_is_said(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    checkpoints.load(tmp_path)


def test_models_of_no_published_architecture_are_not_saved(tmp_path):
  config = ModelConfig(vocab_size=64, width=16, scaled_embedding=True)
  with pytest.raises(ValueError, match="scaled_embedding"):
    checkpoints.save_hf(tmp_path, config, init(config, jax.random.key(0)))
  assert not list(tmp_path.iterdir())


def test_parameters_that_do_not_fit_are_not_saved(tmp_path):
  config, params = checkpoints.load(DATA / "llama")
  with pytest.raises(ValueError, match=r"norm has shape \(3,\), not \(48,\)"):
    checkpoints.save_hf(tmp_path, config, {**params, "norm": jnp.ones(3)})
  del params["norm"]
  with pytest.raises(ValueError, match="params has no norm"):
    checkpoints.save_hf(tmp_path, config, params)
  assert not list(tmp_path.iterdir())


def test_parameters_without_a_place_are_not_saved(tmp_path):
  config, params = checkpoints.load(DATA / "llama")
  extra = {**params, "head": jnp.ones((48, 131))}
  with pytest.raises(ValueError, match="params has head, which the"):
    checkpoints.save_hf(tmp_path, config, extra)
  with pytest.raises(ValueError, match="params: norm is int32, not one of"):
    checkpoints.save_hf(
      tmp_path, config, {**params, "norm": jnp.ones(48, jnp.int32)}
    )
  assert not list(tmp_path.iterdir())


def test_old_configuration_is_gone_before_new_weights_come(tmp_path):
  config, params = checkpoints.load(DATA / "llama")
  shutil.copy(DATA / "llama" / "config.json", tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  # Its own tokenizer files may be named, too.
  checkpoints.save_hf(tmp_path, config, params, tokenizer_from=tmp_path)
  assert (tmp_path / "tokenizer.json").read_text() == "{}"
  again, _ = checkpoints.load(tmp_path)
  assert again == config


def test_tokenizer_files_come_along(tmp_path):
  config, params = checkpoints.load(DATA / "llama")
  given = tmp_path / "given"
  given.mkdir()
  with pytest.raises(FileNotFoundError, match="no tokenizer files"):
    checkpoints.save_hf(tmp_path / "out", config, params, tokenizer_from=given)
  (given / "tokenizer.json").write_text("{}")
  checkpoints.save_hf(tmp_path / "out", config, params, tokenizer_from=given)
  assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


_MEASURE = """
import resource, sys, numpy as np
from arl_jax import checkpoints
import jax
jax.block_until_ready(jax.numpy.ones(8) + 1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
_, params = checkpoints.load(sys.argv[1], dtype=np.float32)
held = sum(x.nbytes for x in jax.tree.leaves(params))
largest = max(x.nbytes for x in jax.tree.leaves(params))
print(peak() - before - held, largest)
"""


@pytest.mark.slow
def test_loading_holds_one_tensor_beyond_the_result(tmp_path):
  # An embedding of 256 MB among 100 MB of others.
  config = ModelConfig(
    vocab_size=1 << 17,
    width=512,
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=64,
    qk_norm=False,
    experts=0,
    dense_width=2048,
    mtp_heads=0,
    tied=True,
  )
  checkpoints.save_hf(tmp_path, config, init(config, jax.random.key(0)))
  done = subprocess.run(
    [sys.executable, "-c", _MEASURE, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
  )
  beyond, largest = map(int, done.stdout.split())
  assert largest == (1 << 17) * 512 * 4
  assert beyond < 1.3 * largest
