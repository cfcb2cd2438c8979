import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.checkpoints.quantized import decoded
from arl_jax.checkpoints.safetensors_file import open_folder
from arl_jax.checkpoints.source import Source, Stored

MODELS = pathlib.Path(__file__).parents[1] / "testdata" / "models"
BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


class _Memory(Source):
  """Arrays as a source that counts the elements read of each."""

  def __init__(self, arrays):
    self._arrays = {n: np.asarray(x) for n, x in arrays.items()}
    self.tensors = {
      n: Stored(x.shape, x.dtype) for n, x in self._arrays.items()
    }
    self.counts = {}
    self.closed = False

  def read(self, name, index):
    part = np.array(self._arrays[name][index], order="C")
    self.counts[name] = self.counts.get(name, 0) + part.size
    return part

  def close(self):
    self.closed = True


def _all(source, name):
  return source.read(name, (slice(None),) * len(source.tensors[name].shape))


def _int4_config(**changes):
  weights = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
    "dynamic": False,
    **changes,
  }
  return {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    "ignore": ["lm_head"],
  }


MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [2, 3]}
INT4 = _int4_config()


# Values derived by hand.


def test_mxfp4_values():
  # The low half of a byte comes first: 0x10 is codes 0, 1, that is 0 and .5.
  codes = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
  blocks = np.zeros((1, 2, 2, 16), np.uint8)
  blocks[0, 1, 0, :8] = codes
  blocks[0, 0, 1, 8:] = codes
  # 2^(128 - 127) = 2 and 2^(124 - 127) = 1/8; blocks of zeros don't care.
  scales = np.array([[[0, 128], [124, 0]]], np.uint8)
  source = _Memory({"w_blocks": blocks, "w_scales": scales, "b": np.ones(2)})
  result = decoded(source, MXFP4)
  assert dict(result.tensors) == {
    "b": Stored((2,), np.dtype(np.float64)),
    "w": Stored((1, 64, 2), BF16),
  }
  values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
  read = _all(result, "w")
  assert read.dtype == np.float32
  # Output 1 has them in its first block: inputs 0 to 15.
  assert read[0, :16, 1].tolist() == [v / 8 for v in values]
  # Output 0 in the latter half of its second: inputs 32 + 16 to 63.
  assert read[0, 48:, 0].tolist() == [v * 2 for v in values]
  assert not read[0, 16:, 1].any()
  assert not read[0, :48, 0].any()


def test_mxfp4_scales_at_the_ends():
  # Codes 2 and 7 are 1 and 6. 2^-127 is below float32's normal numbers, but
  # exact; 6 * 2^127 is over its largest; byte 255 is the format's NaN.
  blocks = np.full((1, 3, 1, 16), 0x72, np.uint8)
  scales = np.array([[[0], [254], [255]]], np.uint8)
  result = decoded(_Memory({"w_blocks": blocks, "w_scales": scales}), MXFP4)
  read = _all(result, "w")[0, :2].T.tolist()
  assert read[0] == [2.0**-127, 6 * 2.0**-127]
  assert read[1] == [2.0**127, float("inf")]
  assert np.isnan(read[2]).all()


def test_fp8_values():
  # Sign, four bits of exponent (bias 7), three of mantissa: 0x38 is 2^0, 0x40
  # 2^1, 0xbc -(1 + 4/8), 0x7e 2^8 (1 + 6/8) = 448, 0x01 2^-6 / 8 = 2^-9.
  bits = [
    [0x38, 0x40, 0xBC, 0x38],
    [0x38, 0x7E, 0x01, 0x38],
    [0x38, 0xB8, 0x00, 0x40],
  ]
  # Blocks of [2, 3]: the last row and the last column are blocks of their own.
  scales = [[2.0, 0.5], [10.0, -1.0]]
  source = _Memory(
    {
      "a.weight": np.array(bits, np.uint8).view(F8),
      "a.weight_scale_inv": np.array(scales, np.float32),
      "norm.weight": np.ones(2, np.float32),
    }
  )
  result = decoded(source, FP8)
  assert dict(result.tensors) == {
    "norm.weight": Stored((2,), np.dtype(np.float32)),
    "a.weight": Stored((3, 4), BF16),
  }
  read = _all(result, "a.weight")
  assert read.dtype == np.float32
  assert read.tolist() == [
    [2, 4, -3, 0.5],
    [2, 896, 2**-8, 0.5],
    [10, -10, 0, -2],
  ]
  assert _all(result, "norm.weight").dtype == np.float32
  result.close()
  assert source.closed


def test_int4_values():
  # Eight values a word, lowest bits first, each plus 8: 0x76543210 is -8 to -1
  # and 0xfedcba98, as int32 0xfedcba98 - 2^32 = -19088744, is 0 to 7.
  packed = np.zeros((2, 8), np.int32)
  packed[0, :2] = [0x76543210, -19088744]
  packed[1, 7] = 0x76543210
  # A word of zeros is eight times -8.
  scales = np.array([[0.5, 0.25], [3, 2]], BF16)
  source = _Memory(
    {
      "a.weight_packed": packed,
      "a.weight_scale": scales,
      "a.weight_shape": np.array([2, 64], np.int32),
      "b.weight": np.ones(2),
    }
  )
  result = decoded(source, INT4)
  assert dict(result.tensors) == {
    "b.weight": Stored((2,), np.dtype(np.float64)),
    "a.weight": Stored((2, 64), BF16),
  }
  read = _all(result, "a.weight")
  assert read.dtype == np.float32
  assert read[0, :16].tolist() == [n / 2 for n in range(-8, 8)]
  assert read[0, 16:32].tolist() == [-4] * 16
  assert read[0, 32:].tolist() == [-2] * 32
  assert read[1, :32].tolist() == [-24] * 32
  assert read[1, 32:56].tolist() == [-16] * 24
  assert read[1, 56:].tolist() == [2 * n for n in range(-8, 0)]


# Parts.


def _random_mxfp4(draw):
  experts, out, count = (draw(st.integers(1, 3)) for _ in range(3))
  random = np.random.default_rng(draw(st.integers(0, 99)))
  blocks = random.integers(0, 256, (experts, out, count, 16), np.uint8)
  scales = random.integers(100, 150, (experts, out, count), np.uint8)
  source = _Memory({"w_blocks": blocks, "w_scales": scales})

  def expected(e, i, o):
    byte = int(blocks[e, o, i // 32, i % 32 // 2])
    code = byte >> 4 if i % 2 else byte & 15
    exponent, half = (code >> 1) & 3, (code & 1) / 2
    value = (1 + half) * 2.0 ** (exponent - 1) if exponent else half
    return (
      value * (-1) ** (code >> 3) * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    )

  def needed(e, i, o):
    return {"w_blocks": e * o * i(32) * 16, "w_scales": e * o * i(32)}

  return source, MXFP4, "w", (experts, count * 32, out), expected, needed


def _random_fp8(draw):
  out, inner, tall, wide = (draw(st.integers(1, 9)) for _ in range(4))
  random = np.random.default_rng(draw(st.integers(0, 99)))
  # No NaN: those are the codes 0x7f and 0xff.
  bits = random.integers(0, 0x7F, (out, inner), np.uint8)
  bits |= random.integers(0, 2, bits.shape, np.uint8) << 7
  weight = bits.view(F8)
  shape = (-(-out // tall), -(-inner // wide))
  dtype = draw(st.sampled_from([np.float32, BF16, np.float16]))
  scales = random.normal(size=shape).astype(dtype)
  source = _Memory({"w.weight": weight, "w.weight_scale_inv": scales})

  def expected(o, i):
    scale = np.float32(scales[o // tall, i // wide])
    return np.float32(weight[o, i]) * scale

  def needed(o, i):
    return {"w.weight": o * i, "w.weight_scale_inv": o(tall) * i(wide)}

  config = {"quant_method": "fp8", "weight_block_size": [tall, wide]}
  return source, config, "w.weight", (out, inner), expected, needed


def _random_int4(draw):
  out, count = (draw(st.integers(1, 3)) for _ in range(2))
  group = draw(st.sampled_from([8, 32, 128]))
  random = np.random.default_rng(draw(st.integers(0, 99)))
  values = random.integers(-8, 8, (out, count * group))
  packed = np.zeros((out, count * group // 8), np.uint32)
  for i in range(8):
    packed |= (values[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
  scales = random.normal(size=(out, count)).astype(BF16)
  source = _Memory(
    {
      "w.weight_packed": packed.view(np.int32),
      "w.weight_scale": scales,
      "w.weight_shape": np.array(values.shape),
    }
  )

  def expected(o, i):
    return values[o, i] * float(scales[o, i // group])

  def needed(o, i):
    return {
      "w.weight_packed": o * i(group) * group // 8,
      "w.weight_scale": o * i(group),
      "w.weight_shape": 2,
    }

  config = _int4_config(group_size=group)
  return source, config, "w.weight", values.shape, expected, needed


class _Span(int):
  """Length of a slice; called with a block's size, blocks that hold it."""

  def __new__(cls, start, stop):
    self = super().__new__(cls, stop - start)
    self.blocks = lambda size: len({i // size for i in range(start, stop)})
    return self

  def __call__(self, size):
    return self.blocks(size)


@pytest.mark.parametrize("kind", [_random_mxfp4, _random_fp8, _random_int4])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_parts_are_right_and_need_their_own_blocks_only(kind, data):
  source, config, name, shape, expected, needed = kind(data.draw)
  result = decoded(source, config)
  assert dict(result.tensors) == {name: Stored(shape, BF16)}
  spans = []
  for size in shape:
    start = data.draw(st.integers(0, size))
    spans.append((start, data.draw(st.integers(start, size))))
  index = tuple(slice(*span) for span in spans)
  whole = np.array(
    [expected(*map(int, at)) for at in np.ndindex(*shape)], np.float32
  )
  assert _all(result, name).tolist() == whole.reshape(shape).tolist()
  source.counts.clear()
  part = result.read(name, index)
  assert part.dtype == np.float32
  assert part.flags.c_contiguous
  assert part.tolist() == whole.reshape(shape)[index].tolist()
  if part.size:
    assert source.counts == needed(*(_Span(*span) for span in spans))


def test_other_indices_and_names_are_refused():
  source = _Memory(
    {
      "w_blocks": np.zeros((1, 1, 1, 16), np.uint8),
      "w_scales": np.zeros((1, 1, 1), np.uint8),
    }
  )
  with decoded(source, MXFP4) as result:
    with pytest.raises(ValueError, match=r"index .* of tensor 'w' must be"):
      result.read("w", (slice(0, 2), slice(None), slice(None)))
    with pytest.raises(ValueError, match="no tensor 'w_blocks'"):
      result.read("w_blocks", (slice(None),) * 4)
  assert source.closed


# Faults.


def test_without_quantisation_the_source_stays():
  source = _Memory({"w": np.zeros(2), "attn.k_scale": np.zeros(1)})
  assert decoded(source, None) is source


@pytest.mark.parametrize(
  "name",
  [
    "w_blocks",
    "w_scales",
    "a.weight_scale_inv",
    "a.weight_packed",
    "a.weight_scale",
    "a.weight_shape",
    "a.weight_zero_point",
    "a.qweight",
  ],
)
def test_leftovers_are_refused(name):
  source = _Memory({"x": np.zeros(1), name: np.zeros(1)})
  with pytest.raises(
    ValueError, match=f"tensor '{name}' is part of .* no quan"
  ):
    decoded(source, None)


U1, I4, F4 = np.uint8, np.int32, np.float32


def _z(dtype, *shape):
  return np.zeros(shape, dtype)


_MX = {"w_blocks": _z(U1, 2, 3, 4, 16), "w_scales": _z(U1, 2, 3, 4)}
_F8 = {"w.weight": _z(F8, 3, 4), "w.weight_scale_inv": _z(F4, 2, 2)}
_I4 = {
  "w.weight_packed": _z(I4, 3, 8),
  "w.weight_scale": _z(BF16, 3, 2),
  "w.weight_shape": np.array([3, 64]),
}


def _without(arrays, name):
  return {n: x for n, x in arrays.items() if n != name}


@pytest.mark.parametrize(
  ("arrays", "config", "message"),
  [
    ({}, {}, "quant_method None must be one of mxfp4, fp8, compressed-tensors"),
    ({}, {"quant_method": "gptq"}, "quant_method 'gptq' must be one of"),
    ({}, {"quant_method": []}, r"quant_method \[\] must be one of"),
    # mxfp4
    (_without(_MX, "w_scales"), MXFP4, "'w_blocks' must .* partner 'w_scales'"),
    (_without(_MX, "w_blocks"), MXFP4, "'w_scales' must .* partner 'w_blocks'"),
    (_MX | {"w": _z(F4, 2)}, MXFP4, "'w' is stored both plain and quantised"),
    (
      _MX | {"w_blocks": _z(U1, 2, 3, 4, 8)},
      MXFP4,
      r"'w_blocks' has shape \(2, 3, 4, 8\); must be \[E, out, blocks, 16\]",
    ),
    (_MX | {"w_blocks": _z(U1, 2, 3, 64)}, MXFP4, "'w_blocks' has shape"),
    (_MX | {"w_blocks": _z(I4, 2, 3, 4, 16)}, MXFP4, "dtype int32; must be ui"),
    (
      _MX | {"w_scales": _z(U1, 2, 3, 5)},
      MXFP4,
      r"'w_scales' has shape \[2, 3, 5\]; must be \[2, 3, 4\]",
    ),
    (
      _MX | {"w_scales": _z(F4, 2, 3, 4)},
      MXFP4,
      "dtype float32; must be uint8",
    ),
    (_MX | _F8, MXFP4, "'w.weight_scale_inv' is part .* quant_method 'mxfp4'"),
    # fp8
    (
      _F8,
      {"quant_method": "fp8"},
      "weight_block_size None must be two positive",
    ),
    (_F8, FP8 | {"weight_block_size": [2]}, r"weight_block_size \[2\] must be"),
    (_F8, FP8 | {"weight_block_size": [2, 0]}, "two positive integers"),
    (_F8, FP8 | {"weight_block_size": [2, True]}, "two positive integers"),
    (_F8, FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' of fp8 must be 'e4m3'"),
    (_without(_F8, "w.weight"), FP8, "'w.weight_scale_inv' must .* 'w.weight'"),
    (
      _without(_F8, "w.weight_scale_inv"),
      FP8,
      "'w.weight' is fp8; must have a partner 'w.weight_scale_inv'",
    ),
    (_F8 | {"w.weight": _z(F8, 3)}, FP8, r"shape \(3,\); must be \[out, in\]"),
    (_F8 | {"w.weight": _z(F4, 3, 4)}, FP8, "float32; must be float8_e4m3fn"),
    (
      _F8 | {"w.weight_scale_inv": _z(F4, 1, 2)},
      FP8,
      r"'w.weight_scale_inv' has shape \[1, 2\]; must be \[2, 2\]",
    ),
    (_F8 | {"w.weight_scale_inv": _z(U1, 2, 2)}, FP8, "uint8; must be float32"),
    (_F8 | _MX, FP8, "'w_blocks' is part of"),
    # compressed-tensors
    (_without(_I4, "w.weight_shape"), INT4, "partner 'w.weight_shape'"),
    (_without(_I4, "w.weight_scale"), INT4, "partner 'w.weight_scale'"),
    (_without(_I4, "w.weight_packed"), INT4, "partner 'w.weight_packed'"),
    (_I4 | {"w.weight": _z(F4, 3)}, INT4, "'w.weight' is stored both"),
    (
      _I4 | {"w.weight_packed": _z(I4, 3, 7)},
      INT4,
      r"'w.weight_packed' has shape \(3, 7\).* in a multiple of 32",
    ),
    (_I4 | {"w.weight_packed": _z(I4, 24)}, INT4, r"shape \(24,\)"),
    (_I4 | {"w.weight_packed": _z(F4, 3, 8)}, INT4, "float32; must be int32"),
    (
      _I4 | {"w.weight_scale": _z(BF16, 3, 1)},
      INT4,
      r"'w.weight_scale' has shape \[3, 1\]; must be \[3, 2\]",
    ),
    (_I4 | {"w.weight_shape": _z(I4, 3)}, INT4, r"\[3\]; must be \[2\]"),
    (_I4 | {"w.weight_shape": _z(F4, 2)}, INT4, "float32; must be int32 or"),
    (
      _I4 | {"w.weight_zero_point": _z(I4, 1, 2)},
      INT4,
      "'w.weight_zero_point' is part of",
    ),
    (_I4, _int4_config(num_bits=8), "group_0.weights.num_bits 8 must be 4"),
    (_I4, _int4_config(symmetric=False), "symmetric False must be True"),
    (_I4, _int4_config(strategy="channel"), "'channel' must be 'group'"),
    (_I4, _int4_config(type="float"), "type 'float' must be 'int'"),
    (_I4, _int4_config(actorder="group"), "actorder 'group' must be None"),
    (_I4, _int4_config(group_size=None), "group_size None must be a multiple"),
    (_I4, _int4_config(group_size=-8), "group_size -8 must be a multiple"),
    (_I4, _int4_config(group_size=12), "group_size 12 must be a multiple"),
    (_I4, INT4 | {"format": "int-quantized"}, "format 'int-quantized' must be"),
    (_I4, INT4 | {"config_groups": {}}, "config_groups {} must be"),
    (_I4, INT4 | {"config_groups": {"a": {}}}, "config_groups.a must have"),
    (_I4, INT4 | {"config_groups": {"a": None}}, "config_groups.a must have"),
    (
      _I4,
      INT4
      | {
        "config_groups": {
          "a": _int4_config()["config_groups"]["group_0"],
          "b": _int4_config(group_size=64)["config_groups"]["group_0"],
        }
      },
      r"group_size must be the same; it is \[32, 64\]",
    ),
  ],
)
def test_faults_are_value_errors_that_say_what(arrays, config, message):
  with pytest.raises(ValueError, match=message) as caught:
    decoded(_Memory(arrays), config)
  assert "\n" not in str(caught.value)


def test_padded_int4_is_refused_when_read():
  # 60 of 64 values: only the stored shape tells.
  arrays = _I4 | {"w.weight_shape": np.array([3, 60])}
  result = decoded(_Memory(arrays), INT4)
  with pytest.raises(ValueError, match=r"is \[3, 60\]; must be \[3, 64\]"):
    _all(result, "w.weight")


# Checkpoints as found in the wild. Beside each slice are the values of the same
# model before it was quantised, from the code that made it.


def _open(family):
  config = json.loads((MODELS / family / "config.json").read_text())
  source = open_folder(MODELS / family)
  return decoded(source, config["quantization_config"])


def test_gpt_oss_checkpoint():
  with _open("gpt_oss_mxfp4") as source:
    shapes = {
      n.removeprefix("model.layers.2.mlp.experts."): s.shape
      for n, s in source.tensors.items()
      if ".2.mlp.experts." in n
    }
    # E = 8, width 64, expert width 32 (twice: gate and up).
    assert shapes == {
      "gate_up_proj": (8, 64, 64),
      "gate_up_proj_bias": (8, 64),
      "down_proj": (8, 32, 64),
      "down_proj_bias": (8, 64),
    }
    name = "model.layers.2.mlp.experts.gate_up_proj"
    read = _all(source, name)
    before = [0.0065, -0.1314, 0.2443, 0.0525]
    assert read[5, :4, 0].tolist() == [0, -0.125, 0.25, 0.0625]
    np.testing.assert_allclose(read[5, :4, 0], before, atol=0.04)
    before = [0.3922, 0.3364, -0.2683, -0.1101]
    np.testing.assert_allclose(read[5, 33, 60:], before, atol=0.04)
    name = "model.layers.2.mlp.experts.down_proj"
    part = source.read(name, (slice(5, 6), slice(31, 32), slice(60, 64)))
    before = [-0.1699, 0.0345, 0.0019, -0.3610]
    np.testing.assert_allclose(part[0, 0], before, atol=0.04)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert _all(source, name).dtype == BF16


def test_deepseek_checkpoint():
  with _open("deepseek_v3_fp8") as source:
    assert not [n for n in source.tensors if "scale" in n]
    # 24 rows in blocks of 16: the second is partial.
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert source.tensors[name] == Stored((24, 64), BF16)
    read = _all(source, name)
    # Three bits of mantissa: half a step is 1/16 of the value at most.
    before = [-0.25448, 0.028741, 0.44724, 0.11573]
    np.testing.assert_allclose(read[:4, 0], before, rtol=1 / 16)
    part = source.read(name, (slice(23, 24), slice(60, 64)))
    before = [0.020700, 0.063529, -0.025019, 0.035017]
    np.testing.assert_allclose(part[0], before, rtol=1 / 16)
    assert part.tolist() == read[23:, 60:].tolist()
    # All of one, by another way.
    with open_folder(MODELS / "deepseek_v3_fp8") as stored:
      name = "model.layers.2.self_attn.kv_b_proj.weight"
      scales = _all(stored, f"{name}_scale_inv")
      spread = np.kron(scales, np.ones((16, 16), np.float32))
      expected = _all(stored, name).astype(np.float32) * spread
    assert _all(source, name).tolist() == expected.tolist()
    assert _all(source, "lm_head.weight").dtype == np.float32


@pytest.mark.parametrize(
  ("family", "plain", "tolerance"),
  [
    # Of rms error, relative. The step from 2 to 3 of a 4-bit float is 2/5 of
    # the value between, so up to 1/5 off, and about half of that on average.
    ("gpt_oss_mxfp4", "gpt_oss", 0.15),
    # Three bits of mantissa: at most 1/16 off.
    ("deepseek_v3_fp8", "deepseek_v3", 1 / 16),
  ],
)
def test_every_tensor_is_near_what_was_quantised(family, plain, tolerance):
  with _open(family) as source, open_folder(MODELS / plain) as before:
    assert set(source.tensors) == set(before.tensors)
    for name, stored in source.tensors.items():
      assert stored.shape == before.tensors[name].shape
      exact = _all(before, name)
      error = np.linalg.norm(_all(source, name).astype(np.float32) - exact)
      assert error <= tolerance * np.linalg.norm(exact), name
