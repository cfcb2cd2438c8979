"""Programs whose work is known: written by hand, and compiled for CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from arl_jax.observability.hlo import account

HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n\n"

SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def entry(body: str) -> str:
  return f"{HEADER}{SUM}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
  ("line", "kind", "sent"),
  [
    # 400 bytes; the group of 4 sends 3/4 of it twice.
    (
      "all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum",
      "all-reduce",
      600,
    ),
    # Groups of 2, in the short notation: 1/2 of it twice.
    (
      "all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum",
      "all-reduce",
      400,
    ),
    # No list means all 8: 7/8 of it twice.
    ("all-reduce(%x), replica_groups={}, to_apply=%sum", "all-reduce", 700),
    # Named axes: y has 4 chips.
    (
      "all-reduce(%x), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%sum",
      "all-reduce",
      600,
    ),
    # A part of 2 of x, and all of y: 8 chips.
    (
      "all-reduce(%x), replica_groups=mesh['x'=4,'y'=4] {'x':(2)2,'y'}",
      "all-reduce",
      700,
    ),
    ("all-to-all(%x), replica_groups=[2,4]<=[8]", "all-to-all", 300),
    (
      "collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
      "collective-permute",
      400,
    ),
  ],
)
def test_collectives_of_equal_size(line, kind, sent):
  text = entry(
    f"  %x = f32[100]{{0}} parameter(0)\n  ROOT %y = f32[100] {line}"
  )
  assert account(text).collective_bytes == {kind: sent}


def test_collectives_that_change_the_size():
  # all-gather to 1600 bytes: 3/4 of them, 1200. reduce-scatter of 1600: 1200.
  text = entry("""  %x = f32[100]{0} parameter(0)
  %g = f32[400]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %r = f32[100]{0} reduce-scatter(%g), replica_groups=[2,4]<=[8],\
 dimensions={0}, to_apply=%sum""")
  result = account(text)
  assert result.collective_bytes == {"all-gather": 1200, "reduce-scatter": 1200}
  # Each reads and writes 400 + 1600 bytes.
  assert result.hbm_bytes == 4000


def test_asynchronous_collectives_count_once():
  text = entry("""  %x = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[256,128]{1,0:T(8,128)(2,1)},\
 u32[]{:S(2)}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather-done(%s)""")
  result = account(text)
  # 256 * 128 * 2 = 65536 bytes, of which 3/4 come over the network.
  assert result.collective_bytes == {"all-gather": 49152}
  assert result.hbm_bytes == 65536 + 16384


def test_a_ragged_exchange_sends_at_most_what_both_sides_hold():
  # The buffer that receives is twice as large: 3/4 of the 400 bytes sent.
  text = entry("""  %x = f32[100]{0} parameter(0)
  %y = f32[200]{0} parameter(1)
  %o = s32[4]{0} parameter(2)
  ROOT %r = f32[200]{0} ragged-all-to-all(%x, %y, %o, %o, %o, /*index=5*/%o),\
 replica_groups={{0,1,2,3}}""")
  assert account(text).collective_bytes == {"ragged-all-to-all": 300}


def test_a_sliced_all_reduce_is_a_reduce_scatter():
  text = f"""{HEADER}{SUM}
%fused (a: f32[800], i: s32[]) -> f32[100] {{
  %a = f32[800]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[800]{{0}} all-reduce(%a), replica_groups={{}}, to_apply=%sum
  ROOT %d = f32[100]{{0}} dynamic-slice(%r, %i), dynamic_slice_sizes={{100}}
}}

ENTRY %main (p: f32[800], q: s32[]) -> f32[100] {{
  %p = f32[800]{{0}} parameter(0)
  %q = s32[] parameter(1)
  ROOT %f = f32[100]{{0}} fusion(%p, %q), kind=kCustom, calls=%fused
}}
"""
  # 3200 bytes, of which 7/8 go out, once.
  assert account(text).collective_bytes == {"reduce-scatter": 2800}


def test_a_collective_spread_over_fusions_counts_once():
  gather = (
    "all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0},"
    ' frontend_attributes={chain_id="0"}'
  )
  text = f"""{HEADER}
%first (a: f32[100]) -> f32[400] {{
  %a = f32[100]{{0}} parameter(0)
  %g = f32[400]{{0}} {gather}
  ROOT %c = f32[400]{{0}} custom-call(%g),\
 custom_call_target="AsyncCollectiveStart"
}}

%middle (a: f32[100], o: f32[400], x: f32[8,8]) -> (f32[400], f32[8,8]) {{
  %a = f32[100]{{0}} parameter(0)
  %o = f32[400]{{0}} parameter(1)
  %x = f32[8,8]{{1,0}} parameter(2)
  %g = f32[400]{{0}} {gather}
  %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}},\
 rhs_contracting_dims={{0}}
  ROOT %t = (f32[400]{{0}}, f32[8,8]{{1,0}}) tuple(%g, %d)
}}

%last (a: f32[100], o: f32[400]) -> f32[400] {{
  %a = f32[100]{{0}} parameter(0)
  %o = f32[400]{{0}} parameter(1)
  %g = f32[400]{{0}} {gather}
  ROOT %c = f32[400]{{0}} custom-call(%a, %o, %g),\
 custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (p: f32[100], x: f32[8,8]) -> f32[400] {{
  %p = f32[100]{{0}} parameter(0)
  %x = f32[8,8]{{1,0}} parameter(1)
  %s = f32[400]{{0}} fusion(%p), kind=kCustom, calls=%first
  %m = (f32[400]{{0}}, f32[8,8]{{1,0}}) fusion(%p, %s, %x), kind=kOutput,\
 calls=%middle
  %k = f32[400]{{0}} get-tuple-element(%m), index=0
  ROOT %d = f32[400]{{0}} fusion(%p, %k), kind=kCustom, calls=%last
}}
"""
  result = account(text)
  assert result.collective_bytes == {"all-gather": 1200}
  assert result.flops == 2 * 8**3
  assert result.opaque_calls == {}
  # The gather moves 400 + 1600 bytes, the dot 256 in and 256 out.
  assert result.hbm_bytes == 2000 + 512


WHILE = f"""{HEADER}
%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %p = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%p), index=1
  %step = s32[] constant(STEP)
  %j = s32[] add(%i, %step)
  %y = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}},\
 rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%j, %y)
}}

%condition (p: (s32[], f32[4,4])) -> pred[] {{
  %p = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}}

ENTRY %main (x: f32[4,4], n: s32[]) -> (s32[], f32[4,4]) {{
  %x = f32[4,4]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %t = (s32[], f32[4,4]{{1,0}}) tuple(START, %x)
  ROOT %loop = (s32[], f32[4,4]{{1,0}}) while(%t), condition=%condition,\
 body=%body CONFIG
}}
"""


@pytest.mark.parametrize(
  ("start", "step", "config", "turns"),
  [
    ("%zero", "1", "", 10),
    # 0, 3, 6 and 9.
    ("%zero", "3", "", 4),
    # What XLA found out goes first.
    ("%n", "1", ', backend_config={"known_trip_count":{"n":"7"}}', 7),
  ],
)
def test_loops_multiply(start, step, config, turns):
  text = WHILE.replace("START", start).replace("STEP", step)
  result = account(text.replace("CONFIG", config))
  assert result.flops == turns * 2 * 4**3
  assert result.unknown_loops == ()


@pytest.mark.parametrize(
  "test",
  [
    "compare(%i, %end), direction=LT",
    "fusion(%end, %i), kind=kLoop, calls=%less",
  ],
)
def test_finds_limits_that_loops_carry(test):
  less = """
%less (e: s32[], i: s32[]) -> pred[] {
  %e = s32[] parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = pred[] compare(%i, %e), direction=LT
}
"""
  text = WHILE.replace("START", "%zero").replace("STEP", "1")
  for old, new in (
    ("CONFIG", ""),
    ("\n%body", f"{less}\n%body"),
    ("%step =", "%kept = s32[] get-tuple-element(%p), index=2\n  %step ="),
    ("tuple(%j, %y)", "tuple(%j, %y, %kept)"),
    (
      "%end = s32[] constant(10)",
      "%end = s32[] get-tuple-element(%p), index=2",
    ),
    ("compare(%i, %end), direction=LT", test),
    (
      "%zero =",
      "%six = s32[] constant(6)\n  %limit = s32[] copy(%six)\n  %zero =",
    ),
    ("tuple(%zero, %x)", "tuple(%zero, %x, %limit)"),
  ):
    assert old in text
    text = text.replace(old, new)
  assert account(text).flops == 6 * 2 * 4**3


def test_a_loop_of_unknown_length_counts_once_and_is_named():
  text = WHILE.replace("START", "%n").replace("STEP", "1")
  result = account(text.replace("CONFIG", ""))
  assert result.flops == 2 * 4**3
  assert result.unknown_loops == ("loop",)


def test_conditionals_cost_their_dearest_branch():
  text = f"""{HEADER}
%cheap (x: f32[4,4]) -> f32[4,4] {{
  ROOT %x = f32[4,4]{{1,0}} parameter(0)
}}

%dear (x.1: f32[4,4]) -> f32[4,4] {{
  %x.1 = f32[4,4]{{1,0}} parameter(0)
  ROOT %y = f32[4,4]{{1,0}} dot(%x.1, %x.1), lhs_contracting_dims={{1}},\
 rhs_contracting_dims={{0}}
}}

ENTRY %main (x: f32[4,4], n: s32[]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  ROOT %c = f32[4,4]{{1,0}} conditional(%n, %x, %x),\
 branch_computations={{%cheap, %dear}}
}}
"""
  assert account(text).flops == 128


def test_convolutions_count_products_that_are_not_padding():
  # How a TPU writes a batch of 8 products [64, 32] [32, 16]: of the window's
  # 8 * 8 positions the dilation leaves one for each of the batch.
  text = entry("""  %a = bf16[8,64,32]{2,1,0} parameter(0)
  %b = bf16[8,32,16]{2,1,0} parameter(1)
  ROOT %c = bf16[8,64,16]{2,1,0} convolution(%a, %b),\
 window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf""")
  assert account(text).flops == 2 * 8 * 64 * 32 * 16


def test_a_plain_convolution():
  # 10 positions of a window of 3 with padding of 1: 3 * 10 - 2 products, for
  # 2 rows, 4 features in and 5 out.
  text = entry("""  %a = f32[2,10,4]{2,1,0} parameter(0)
  %b = f32[3,4,5]{2,1,0} parameter(1)
  ROOT %c = f32[2,10,5]{2,1,0} convolution(%a, %b),\
 window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f""")
  assert account(text).flops == 2 * 28 * 2 * 4 * 5


def test_only_main_memory_counts_and_with_its_padding():
  # 10 * 64 of bfloat16 in tiles of 8 * 128 lie in 16 * 128. The copy goes to
  # the chip's own memory, and what is computed there stays there.
  text = entry("""  %a = bf16[10,64]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[10,64]{1,0:T(8,128)(2,1)S(1)}, bf16[10,64]{1,0:T(8,128)(2,1)},\
 u32[]{:S(2)}) copy-start(%a)
  %d = bf16[10,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)
  ROOT %n = bf16[10,64]{1,0:T(8,128)(2,1)S(1)} negate(%d)""")
  assert account(text).hbm_bytes == 16 * 128 * 2


def test_slices_and_updates_move_what_they_select():
  text = entry("""  %a = f32[1000,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,100]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,100}
  ROOT %u = f32[1000,100]{1,0} dynamic-update-slice(%a, %s, %i, %i)""")
  # The slice reads and writes 400 bytes and two indices of 4; the update too,
  # without the indices.
  assert account(text).hbm_bytes == (800 + 8) + 800


def test_fusions_move_slices_of_what_they_index():
  text = f"""{HEADER}
%fused (a: f32[1000,100], i: s32[], s: f32[50,100]) -> f32[50,100] {{
  %a = f32[1000,100]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[50,100]{{1,0}} parameter(2)
  %r = f32[1,100]{{1,0}} dynamic-slice(%a, %i, %i),\
 dynamic_slice_sizes={{1,100}}
  %n = f32[1,100]{{1,0}} negate(%r)
  ROOT %u = f32[50,100]{{1,0}} dynamic-update-slice(%s, %n, %i, %i)
}}

ENTRY %main (a: f32[1000,100], i: s32[], s: f32[50,100]) -> f32[50,100] {{
  %a = f32[1000,100]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[50,100]{{1,0}} parameter(2)
  ROOT %f = f32[50,100]{{1,0}} fusion(%a, %i, %s), kind=kLoop, calls=%fused
}}
"""
  # A row in, a row out, and the index.
  assert account(text).hbm_bytes == 400 + 400 + 4


def test_custom_calls():
  text = entry("""  %a = f32[100]{0} parameter(0)
  %k.12 = f32[100]{0} custom-call(%a), custom_call_target="tpu_custom_call",\
 frontend_attributes={kernel_metadata={
"note":"over two lines"
}}, backend_config={"custom_call_config":{"body":"abc"}}
  %m = f32[100]{0} custom-call(%k.12), custom_call_target="AllocateBuffer"
  %t = f32[100]{0} custom-call(%m), custom_call_target="topk"
  ROOT %g = f32[100]{0} custom-call(%t), custom_call_target="tpu_custom_call",\
 backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000",\
"transcendentals":"0","bytes_accessed":"70"}}}""")
  result = account(text)
  assert result.opaque_calls == {"k": 1, "topk": 1}
  assert result.flops == 5000
  # Operand and result of the two that say nothing, and the 70 of the third.
  assert result.hbm_bytes == 800 + 800 + 70


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("HloModule m", "has no ENTRY"),
    (
      entry("  %x = f32[] parameter(0)\n  ROOT %y = f32[] all-reduce(%x)"),
      "%y has no replica_groups",
    ),
  ],
)
def test_names_what_it_cannot_read(text, message):
  with pytest.raises(ValueError, match=message):
    account(text)


def test_agrees_with_xla_without_loops():
  def f(x, a, b):
    return jax.nn.gelu(x @ a) @ b

  x, a, b = jnp.ones((512, 256)), jnp.ones((256, 1024)), jnp.ones((1024, 256))
  compiled = jax.jit(f).lower(x, a, b).compile()
  result, xla = account(compiled.as_text()), compiled.cost_analysis()
  assert result.flops == 2 * 2 * 512 * 256 * 1024
  # XLA adds the elementwise work of gelu.
  assert result.flops == pytest.approx(xla["flops"], rel=0.05)
  assert result.hbm_bytes == pytest.approx(xla["bytes accessed"], rel=0.05)


def test_agrees_with_xla_on_attention_and_its_gradient():
  def f(q, k, v):
    scores = jnp.einsum("bhtk,bhuk->bhtu", q, k)
    return jnp.einsum("bhtu,bhuk->bhtk", jax.nn.softmax(scores), v).sum()

  args = (jnp.ones((2, 4, 256, 64)),) * 3
  compiled = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(*args).compile()
  result, xla = account(compiled.as_text()), compiled.cost_analysis()
  # Scores forward, and four products backward; the output goes unused.
  assert result.flops == 5 * 2 * 2 * 4 * 256 * 256 * 64
  assert result.hbm_bytes == pytest.approx(xla["bytes accessed"], rel=0.05)


@pytest.mark.parametrize("remat", [False, True])
def test_multiplies_a_scan_out(remat):
  def layer(x, w):
    return jnp.tanh(x @ w), None

  def loss(x, ws):
    body = jax.checkpoint(layer) if remat else layer
    return jax.lax.scan(body, x, ws)[0].sum()

  x, ws = jnp.ones((128, 64)), jnp.ones((12, 64, 64))
  compiled = jax.jit(jax.grad(loss, argnums=1)).lower(x, ws).compile()
  result = account(compiled.as_text())
  # One product forward and two backward in each of 12 layers; one more where
  # the forward pass is done again.
  one = 2 * 128 * 64 * 64
  assert result.flops == 12 * one * (4 if remat else 3)
  assert result.unknown_loops == ()


def test_nested_loops_and_calls():
  def inner(x, _):
    return x @ x, None

  def outer(x, _):
    return jax.lax.scan(inner, x, None, length=3)[0], None

  def f(x):
    return jax.lax.scan(outer, x, None, length=5)[0]

  compiled = jax.jit(f).lower(jnp.eye(32)).compile()
  assert account(compiled.as_text()).flops == 15 * 2 * 32**3


def test_collectives_of_a_program_on_eight_devices():
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))

  def layer(w, _):
    whole = jax.lax.all_gather(w, "y", tiled=True)
    return jax.lax.psum_scatter(whole * whole, "y", tiled=True), None

  def f(w):
    w = jax.lax.scan(layer, w, None, length=3)[0]
    return jax.lax.psum(w, "x")

  compiled = (
    jax.jit(
      jax.shard_map(
        f,
        mesh=mesh,
        in_specs=PartitionSpec("y"),
        out_specs=PartitionSpec("y"),
        check_vma=False,
      )
    )
    .lower(jnp.ones((4096,)))
    .compile()
  )
  # 4096 floats are 16384 bytes, over 4 devices 4096 each. Three times 3/4 of
  # the whole, both ways; then a sum over 2: 4096 * 2 / 2.
  assert account(compiled.as_text()).collective_bytes == {
    "all-reduce": 4096,
    "all-gather": 3 * 12288,
    "reduce-scatter": 3 * 12288,
  }
