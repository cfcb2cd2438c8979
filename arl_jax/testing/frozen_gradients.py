"""A function whose stopped gradients are stopped for finite differences too.

A difference of two values sees through `jax.lax.stop_gradient`, a gradient
doesn't. Holding what passes through it at its values of one point makes both
answer the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

# Primitives that do nothing but call a function, under the names of all
# supported versions of JAX.
_CALLS = {
  "checkpoint",
  "closed_call",
  "core_call",
  "custom_jvp_call",
  "custom_vjp_call",
  "jit",
  "pjit",
  "remat",
  "remat2",
}

Stop = Callable[[Any], Any]


class UnsupportedError(Exception):
  """A gradient is stopped inside a primitive that can't be followed."""


def frozen(function: Callable[[Any], Any], at: jax.Array) -> Callable:
  """`function` with what it stops gradients of held at its values for `at`.

  Args:
    function: array in, array out; without effects.
    at: where the values are taken.

  Returns:
    A function of arrays like `at`; custom derivative rules are taken out of it.

  Raises:
    UnsupportedError: a loop or a branch holds a stop_gradient.
  """
  closed = jax.make_jaxpr(function)(at)
  values: list[Any] = []

  def record(value):
    values.append(value)
    return value

  _run(closed.jaxpr, closed.consts, [at], record)

  def replayed(x):
    remaining = iter(values)
    (result,) = _run(
      closed.jaxpr, closed.consts, [x], lambda _: next(remaining)
    )
    return result

  return replayed


def primitives(function: Callable[[Any], Any], at: jax.Array) -> set[str]:
  """Names of what `function` applies, at any depth."""
  return {e.primitive.name for e in _equations(jax.make_jaxpr(function)(at))}


def narrowest_float(function: Callable[[Any], Any], at: jax.Array) -> Any:
  """Floating type with the fewest bits in what `function` computes."""
  equations = _equations(jax.make_jaxpr(function)(at))
  values = (v.aval for e in equations for v in e.outvars)
  types = (v.dtype for v in values if hasattr(v, "dtype"))
  floats = [t for t in types if jnp.issubdtype(t, jnp.floating)]
  return min(floats, key=lambda t: jnp.finfo(t).bits, default=at.dtype)


def _run(
  jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], stop: Stop
) -> list[Any]:
  """Evaluates a jaxpr, with `stop` in the place of stop_gradient."""
  variables = [*jaxpr.constvars, *jaxpr.invars]
  values = dict(zip(variables, [*consts, *args], strict=True))

  def read(atom):
    return atom.val if isinstance(atom, Literal) else values[atom]

  for equation in jaxpr.eqns:
    inputs = [read(atom) for atom in equation.invars]
    outputs = _apply(equation, inputs, stop)
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list[Any], stop: Stop) -> Sequence[Any]:
  primitive, params = equation.primitive, equation.params
  if primitive.name == "stop_gradient":
    return [stop(inputs[0])]
  if primitive.name in _CALLS:
    called = params["jaxpr" if "jaxpr" in params else "call_jaxpr"]
    return _run(_open(called), getattr(called, "consts", ()), inputs, stop)
  for inner in jaxprs_in_params(params):
    if any(e.primitive.name == "stop_gradient" for e in _equations(inner)):
      raise UnsupportedError(f"a stop_gradient inside {primitive.name}")
  outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
  return outputs if primitive.multiple_results else [outputs]


def _open(jaxpr: Any) -> Any:
  """A jaxpr without its constants; newer versions of JAX keep them apart."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def _equations(jaxpr: Any) -> Iterator[Any]:
  """Those of a jaxpr and of all it holds."""
  for equation in _open(jaxpr).eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from _equations(inner)
