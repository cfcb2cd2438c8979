"""GGUF files, written as llama.cpp's converter writes them and read back."""

import json
import math
import pathlib
import random
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from arl_jax.checkpoints import gguf_config, gguf_file
from arl_jax.checkpoints.gguf_file import open_gguf

ROOT = pathlib.Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "testdata" / "models"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FAMILIES = {
  "llama": "llama",
  "llama3_rope": "llama",
  "qwen3": "qwen3",
  "qwen3_moe": "qwen3moe",
  "gpt_oss": "gpt-oss",
}
TOP = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}
PARTS = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
  "mlp.gate": "ffn_gate_inp",
  "mlp.router": "ffn_gate_inp",
}


def golden(family):
  folder = GOLDENS / family
  config = json.loads((folder / "config.json").read_text())
  return config, load_file(folder / "model.safetensors")


def permuted(weights, heads):
  """The converter's order of rows: halves of a head interleave."""
  half = weights.shape[0] // heads // 2
  split = weights.reshape(heads, 2, half, *weights.shape[1:])
  return split.swapaxes(1, 2).reshape(weights.shape)


def as_gguf(arch, config, tensors):
  """Names and layouts of the file, from those of Hugging Face."""
  out = {}
  stacks = {}
  for name, value in tensors.items():
    if name in TOP:
      out[TOP[name]] = value
      continue
    _, _, layer, part = name.split(".", 3)
    prefix = f"blk.{layer}."
    stem, _, suffix = part.rpartition(".")
    if arch == "qwen3moe" and part.startswith("mlp.experts."):
      _, _, e, proj, _ = part.split(".")
      key = f"{prefix}ffn_{proj.removesuffix('_proj')}_exps.weight"
      stacks.setdefault(key, {})[int(e)] = value
    elif part == "mlp.experts.gate_up_proj":
      # [E, in, 2 out] -> twice [E, out, in].
      rows = value.swapaxes(1, 2)
      out[prefix + "ffn_gate_exps.weight"] = rows[:, ::2]
      out[prefix + "ffn_up_exps.weight"] = rows[:, 1::2]
    elif part == "mlp.experts.gate_up_proj_bias":
      out[prefix + "ffn_gate_exps.bias"] = value[:, ::2]
      out[prefix + "ffn_up_exps.bias"] = value[:, 1::2]
    elif part == "mlp.experts.down_proj":
      out[prefix + "ffn_down_exps.weight"] = value.swapaxes(1, 2)
    elif part == "mlp.experts.down_proj_bias":
      out[prefix + "ffn_down_exps.bias"] = value
    elif part == "self_attn.sinks":
      out[prefix + "attn_sinks.weight"] = value
    elif arch == "gpt-oss" and stem == "post_attention_layernorm":
      out[prefix + "post_attention_norm.weight"] = value
    else:
      if arch == "llama" and stem == "self_attn.q_proj":
        value = permuted(value, config["num_attention_heads"])
      if arch == "llama" and stem == "self_attn.k_proj":
        value = permuted(value, config["num_key_value_heads"])
      out[f"{prefix}{PARTS[stem]}.{suffix}"] = value
  for key, experts in stacks.items():
    out[key] = np.stack([experts[e] for e in range(len(experts))])
  return out


def llama3_factors(config):
  """Divisors of rope's frequencies, by the published rule."""
  rope = config["rope_parameters"]
  context = rope["original_max_position_embeddings"]
  factors = []
  for i in range(config["head_dim"] // 2):
    wavelength = (
      2 * math.pi * rope["rope_theta"] ** (2 * i / config["head_dim"])
    )
    if wavelength < context / rope["high_freq_factor"]:
      factors.append(1.0)
    elif wavelength > context / rope["low_freq_factor"]:
      factors.append(rope["factor"])
    else:
      smooth = (context / wavelength - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
      )
      factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
  return np.array(factors, np.float32)


def stored(name, value, kind):
  """Data and type in the file; what doesn't fit a type stays float32."""
  value = np.ascontiguousarray(value)
  if kind == Kind.F32 or value.ndim < 2 or name.endswith("bias"):
    return value, Kind.F32
  if kind == Kind.F16:
    return value.astype(np.float16), kind
  if kind == Kind.BF16:
    return value.astype(ml_dtypes.bfloat16).view(np.uint8), kind
  if value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
    return value, Kind.F32
  return quants.quantize(value, kind), kind


def expected(family, name, value, kind):
  """What is read for a tensor of Hugging Face's that was stored as `kind`."""
  # Quantisation is by rows, which these tensors have along their second axis.
  swapped = family == "gpt_oss" and name.endswith(
    ("experts.gate_up_proj", "experts.down_proj")
  )
  rows = value.swapaxes(1, 2) if swapped else value
  data, kind = stored(name, rows, kind)
  if kind == Kind.BF16:
    data = data.view(ml_dtypes.bfloat16)
  elif kind not in (Kind.F32, Kind.F16):
    data = quants.dequantize(data, kind)
  return data.swapaxes(1, 2) if swapped else data


def write(path, family, kind=Kind.F32, *, edit=None, fields=None):
  """Writes a golden as a file; `edit` may change its tensors by name."""
  config, tensors = golden(family)
  arch = FAMILIES[family]
  rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
  writer = gguf.GGUFWriter(path, arch)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_key_length(config["head_dim"])
  writer.add_value_length(config["head_dim"])
  writer.add_rope_dimension_count(config["head_dim"])
  writer.add_rope_freq_base(rope["rope_theta"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  if "num_experts_per_tok" in config:
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(
      config.get("moe_intermediate_size", config["intermediate_size"])
    )
  if family == "gpt_oss":
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(
      rope["original_max_position_embeddings"]
    )
  for name, value in (fields or {}).items():
    add = {str: writer.add_string, int: writer.add_uint32}
    add.get(type(value), writer.add_float32)(name, value)
  out = as_gguf(arch, config, tensors)
  if rope.get("rope_type") == "llama3":
    out["rope_freqs.weight"] = llama3_factors(config)
  for name, value in (edit(out) if edit else out).items():
    data, used = stored(name, value, kind)
    writer.add_tensor(name, data, raw_dtype=used)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return config, tensors


def whole(source, name):
  return source.read(name, (slice(None),) * len(source.tensors[name].shape))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """Bytes of a small file."""
  path = tmp_path_factory.mktemp("small") / "m.gguf"
  write(path, "llama3_rope", Kind.Q8_0)
  return path.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
  "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q8_0]
)
def test_tensors_are_those_that_were_converted(family, kind, tmp_path):
  _, tensors = write(tmp_path / "m.gguf", family, kind)
  with open_gguf(tmp_path / "m.gguf")[1] as source:
    assert set(source.tensors) == set(tensors)
    for name, value in tensors.items():
      right = expected(family, name, value, kind)
      got = whole(source, name)
      assert got.dtype == right.dtype, name
      assert got.flags.c_contiguous
      np.testing.assert_array_equal(got, right, err_msg=name)
      stored_ = source.tensors[name]
      assert stored_.shape == got.shape
      # As stored where it is a float type, else bfloat16.
      quantised = right.dtype == np.float32 and not np.array_equal(right, value)
      assert stored_.dtype == (ml_dtypes.bfloat16 if quantised else right.dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_a_part_is_that_part_of_the_whole(family, kind, tmp_path):
  write(tmp_path / "m.gguf", family, kind)
  rng = random.Random(0)
  with open_gguf(tmp_path / "m.gguf")[1] as source:
    for name, stored_ in source.tensors.items():
      everything = whole(source, name)
      for _ in range(4):
        ends = [sorted(rng.choices(range(n + 1), k=2)) for n in stored_.shape]
        index = tuple(slice(*pair) for pair in ends)
        got = source.read(name, index)
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, everything[index], err_msg=name)
        assert got.dtype == everything.dtype


def test_a_part_dequantises_its_blocks_alone(tmp_path, monkeypatch):
  write(tmp_path / "m.gguf", "llama3_rope", Kind.Q8_0)
  seen = []

  def spy(data, kind):
    seen.append(data.nbytes)
    return dequantize(data, kind)

  dequantize = quants.dequantize
  with open_gguf(tmp_path / "m.gguf")[1] as source:
    monkeypatch.setattr(gguf_file.quants, "dequantize", spy)
    # A block of Q8_0 is 32 values in 34 bytes. Three rows of two blocks each;
    # then columns 40 to 49 of five rows, which lie in the second block.
    source.read("model.layers.0.mlp.down_proj.weight", (slice(3), slice(None)))
    source.read(
      "model.layers.0.mlp.down_proj.weight", (slice(1, 6), slice(40, 50))
    )
  assert seen == [3 * 2 * 34, 5 * 34]


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_is_that_of_the_model(family, tmp_path):
  config, _ = write(tmp_path / "m.gguf", family)
  got, source = open_gguf(tmp_path / "m.gguf")
  source.close()
  for field in (
    *("model_type", "architectures", "vocab_size", "hidden_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
    *("attention_bias", "bos_token_id", "eos_token_id", "hidden_act"),
    "intermediate_size",
  ):
    assert got[field] == config[field], field
  rope = config.get("rope_parameters") or {
    "rope_type": "default",
    "rope_theta": config["rope_theta"],
  }
  assert got["rope_parameters"] == rope
  if family == "qwen3_moe":
    assert got["num_experts"] == config["num_local_experts"]
    for field in ("num_experts_per_tok", "moe_intermediate_size"):
      assert got[field] == config[field]
    assert got["norm_topk_prob"] is config["norm_topk_prob"]
  if family == "gpt_oss":
    for field in (
      *("num_local_experts", "num_experts_per_tok", "sliding_window"),
      *("layer_types", "swiglu_alpha", "swiglu_limit"),
    ):
      assert got[field] == config[field], field


@pytest.mark.parametrize(
  ("context", "factor", "head_dim", "theta"),
  # Of Llama 3.1, 3.2 and a made-up model.
  [(8192, 8.0, 128, 5e5), (8192, 32.0, 64, 5e5), (4096, 4.0, 128, 1e5)],
)
def test_llama3_rope_is_recovered(context, factor, head_dim, theta):
  rope = {
    "rope_type": "llama3",
    "rope_theta": theta,
    "factor": factor,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": context,
  }
  factors = llama3_factors({"head_dim": head_dim, "rope_parameters": rope})
  got = gguf_config._llama3(None, theta, head_dim, factors)
  assert got == rope


def test_rope_scaling_of_qwen3(tmp_path):
  fields = {
    "qwen3.rope.scaling.type": "yarn",
    "qwen3.rope.scaling.factor": 4.0,
    "qwen3.rope.scaling.original_context_length": 64,
    "qwen3.rope.scaling.yarn_attn_factor": 1.5,
  }
  write(tmp_path / "m.gguf", "qwen3", fields=fields)
  config, source = open_gguf(tmp_path / "m.gguf")
  source.close()
  assert config["rope_parameters"] == {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.5,
  }


def test_biases_of_llama_are_in_rope_order_too(tmp_path):
  bias = np.arange(64, dtype=np.float32)  # Four heads of 16.

  def edit(tensors):
    return tensors | {"blk.0.attn_q.bias": permuted(bias, 4)}

  write(tmp_path / "m.gguf", "llama3_rope", edit=edit)
  config, source = open_gguf(tmp_path / "m.gguf")
  with source:
    name = "model.layers.0.self_attn.q_proj.bias"
    np.testing.assert_array_equal(whole(source, name), bias)
    np.testing.assert_array_equal(
      source.read(name, (slice(5, 40),)), bias[5:40]
    )
  assert config["attention_bias"] is True


def test_what_was_read_outlives_the_file(tmp_path):
  _, tensors = write(tmp_path / "m.gguf", "llama")
  _, source = open_gguf(tmp_path / "m.gguf")
  got = whole(source, "model.norm.weight")
  source.close()
  source.close()
  np.testing.assert_array_equal(got, tensors["model.norm.weight"])
  with pytest.raises(ValueError, match="closed"):
    whole(source, "model.norm.weight")


def test_indices_are_checked(tmp_path):
  write(tmp_path / "m.gguf", "llama")
  with open_gguf(tmp_path / "m.gguf")[1] as source:
    for index in ((), (slice(None),), (slice(0, 200), slice(None))):
      with pytest.raises(ValueError, match=r"embed_tokens"):
        source.read("model.embed_tokens.weight", index)
    with pytest.raises(ValueError, match=r"no tensor 'token_embd\.weight'"):
      source.read("token_embd.weight", (slice(None), slice(None)))


def replace(name, value):
  return lambda tensors: tensors | {name: value}


def without(name):
  return lambda tensors: {k: v for k, v in tensors.items() if k != name}


ZEROS = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
  ("family", "edit", "fields", "problem"),
  [
    ("llama", replace("blk.0.odd.weight", ZEROS), {}, "'blk.0.odd.weight' is"),
    ("llama", replace("blk.2.attn_k.bias", ZEROS), {}, "with 2 layers"),
    ("llama", replace("blk.00.attn_k.bias", ZEROS), {}, "unknown"),
    (
      "qwen3",
      replace("rope_freqs.weight", ZEROS[0]),
      {},
      "'rope_freqs.weight'",
    ),
    ("llama", replace("rope_freqs.weight", ZEROS), {}, "must have 4 values"),
    ("llama", replace("rope_freqs.weight", ZEROS[0, :4]), {}, "isn't Llama 3"),
    ("llama", replace("blk.0.attn_q.weight", ZEROS), {}, "48 rows"),
    ("llama", replace("token_embd.weight", ZEROS), {}, "48 columns"),
    ("llama", without("token_embd.weight"), {}, "is absent"),
    ("llama", None, {"llama.expert_count": 8}, "'llama.expert_count' is '8'"),
    ("llama", None, {"llama.logit_scale": 2.0}, "'llama.logit_scale' is '2.0'"),
    ("llama", None, {"split.count": 3}, "'split.count' is 3"),
    ("llama", None, {"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ("qwen3_moe", replace("blk.0.ffn_up_exps.weight", ZEROS), {}, "8 experts"),
    ("gpt_oss", without("blk.0.ffn_up_exps.weight"), {}, "has none"),
    ("gpt_oss", without("blk.1.ffn_gate_exps.bias"), {}, "has none"),
  ],
)
def test_foreign_tensors_and_fields_are_named(
  family, edit, fields, problem, tmp_path
):
  write(tmp_path / "m.gguf", family, edit=edit, fields=fields)
  with pytest.raises(ValueError, match=problem) as error:
    open_gguf(tmp_path / "m.gguf")
  assert str(error.value).startswith(f"{tmp_path}/m.gguf: ")
  assert "\n" not in str(error.value)


def raw(fields, tensors=b"", tensor_count=0, field_count=None, version=3):
  """A file by hand: fields as (name, type, bytes of the value)."""
  data = b"GGUF" + struct.pack(
    "<IQQ",
    version,
    tensor_count,
    len(fields) if field_count is None else field_count,
  )
  for name, kind, value in fields:
    data += struct.pack("<Q", len(name)) + name.encode()
    data += struct.pack("<I", kind) + value
  return data + tensors


def text(value):
  return struct.pack("<Q", len(value)) + value.encode()


def entry(name, shape, kind, offset):
  return text(name) + struct.pack(
    f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset
  )


ARCH = ("general.architecture", 8, text("llama"))


@pytest.mark.parametrize(
  ("data", "problem"),
  [
    (b"", "not a GGUF file"),
    (b"PK\3\4" + bytes(100), "not a GGUF file"),
    (raw([], version=1), "version 1"),
    (raw([], version=3 << 24), "version 50331648"),
    (raw([], field_count=1 << 62), "claims"),
    (raw([], tensor_count=1 << 62), "claims"),
    (raw([ARCH, ARCH]), "'general.architecture' is there twice"),
    (raw([("a", 8, struct.pack("<Q", 1 << 60))]), "'a' is cut short"),
    (raw([("a", 9, struct.pack("<IQ", 4, 1 << 61))]), "'a' is cut short"),
    (raw([("a", 9, struct.pack("<IQ", 8, 1 << 61))]), "'a' is cut short"),
    (
      raw([("a", 9, struct.pack("<IQ", 9, 1) + bytes(9))]),
      "'a' has unknown type 9",
    ),
    (raw([("a", 77, bytes(8))]), "'a' has unknown type 77"),
    (raw([("a", 7, b"\2")]), "'a' is 2"),
    (raw([("a", 8, struct.pack("<Q", 1) + b"\xff")]), "isn't UTF-8"),
    (raw([("general.alignment", 4, struct.pack("<I", 24))]), "is 24"),
    (raw([ARCH], entry("t", [32, 1 << 40], 0, 0), 1), "cut short"),
    (raw([ARCH], entry("t", [1 << 63] * 4, 0, 0), 1), "cut short"),
    (raw([ARCH], entry("t", [4], 0, 1 << 63), 1), "cut short"),
    (raw([ARCH], entry("t", [4] * 5, 0, 0), 1), "5 axes"),
    (raw([ARCH], entry("t", [0], 0, 0), 1), "must be positive"),
    (raw([ARCH], entry("t", [33], 8, 0), 1), "multiple of 32 for Q8_0"),
    (raw([ARCH], entry("t", [4], 250, 0), 1), "unknown type 250"),
    (raw([ARCH], entry("t", [256], 15, 0) + bytes(999), 1), "type Q8_K"),
    (raw([]), "'general.architecture' is absent"),
    (raw([("general.architecture", 4, bytes(4))]), "is a int, must be a str"),
    (raw([("general.architecture", 8, text("bert"))]), "is 'bert'"),
    (raw([ARCH]), "'llama.block_count' is absent"),
    (
      raw([ARCH, ("llama.block_count", 4, struct.pack("<I", 1 << 31))]),
      "must be 1 to",
    ),
  ],
)
def test_hostile_headers(data, problem, tmp_path):
  (tmp_path / "m.gguf").write_bytes(data)
  with pytest.raises(ValueError, match=problem) as error:
    open_gguf(tmp_path / "m.gguf")
  assert str(error.value).startswith(f"{tmp_path}/m.gguf: ")


def test_truncated_files(small, tmp_path):
  path = tmp_path / "m.gguf"
  lengths = [*range(0, 3000, 7), *range(3000, len(small) - 32, 997)]
  for length in [*lengths, len(small) - 32]:
    path.write_bytes(small[:length])
    with pytest.raises(ValueError, match=r"cut short|not a GGUF"):
      open_gguf(path)


@settings(max_examples=300, deadline=None)
@given(
  edits=st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=4
  )
)
def test_damaged_headers_raise_one_line(small, tmp_path_factory, edits):
  path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
  data = bytearray(small)
  for at, value in edits:
    data[at] = value
  path.write_bytes(data)
  problem = ""
  try:
    _, source = open_gguf(path)
    with source:
      for name in source.tensors:
        whole(source, name)
  except ValueError as error:
    problem = str(error)
  assert "\n" not in problem


def test_missing_file(tmp_path):
  with pytest.raises(FileNotFoundError):
    open_gguf(tmp_path / "m.gguf")


@pytest.mark.skipif(
  not SMOLLM2.exists(), reason="no models/; `make models` fetches them"
)
def test_a_published_model():
  config, source = open_gguf(SMOLLM2)
  assert config["hidden_size"] == 576
  assert config["num_hidden_layers"] == 30
  assert config["tie_word_embeddings"] is True
  assert config["eos_token_id"] == 2
  raw_ = {t.name: t for t in gguf.GGUFReader(SMOLLM2).tensors}
  with source:
    # 9 tensors a layer, embedding and last norm.
    assert len(source.tensors) == 30 * 9 + 2
    for theirs, ours, heads in (
      ("attn_q", "self_attn.q_proj", 9),
      ("attn_k", "self_attn.k_proj", 3),
      ("ffn_down", "mlp.down_proj", 0),
    ):
      tensor = raw_[f"blk.7.{theirs}.weight"]
      right = quants.dequantize(tensor.data, tensor.tensor_type)
      got = whole(source, f"model.layers.7.{ours}.weight")
      np.testing.assert_array_equal(
        permuted(got, heads) if heads else got, right
      )
