"""Strict JSON: one object, one meaning, bounded."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.chat.strict_json import MAX_CHARS, MAX_DEPTH, measure, parse_object

values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**20), 10**20)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(st.characters(exclude_categories=["Cs"])),
  lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab"), v),
  max_leaves=8,
)
objects = st.dictionaries(
  st.text(st.characters(exclude_categories=["Cs"]), max_size=4), values
)


@settings(max_examples=60, deadline=None)
@given(objects, st.sampled_from([None, 2]), st.booleans())
def test_objects_are_read_as_json_has_them(value, indent, escapes):
  text = json.dumps(value, indent=indent, ensure_ascii=escapes)
  got, spelled = parse_object(f" \n{text}\t")
  assert got == value
  assert {k: json.loads(v) for k, v in spelled.items()} == value
  assert all(v in text for v in spelled.values())


def test_values_as_they_are_spelled():
  _, spelled = parse_object('{"a" : {"b":1.50 ,"c": "\\u00e9"} , "d":[ ]}')
  assert spelled == {"a": '{"b":1.50 ,"c": "\\u00e9"}', "d": "[ ]"}


@pytest.mark.parametrize(
  ("text", "problem"),
  [
    ("", "not a JSON object"),
    ("[]", "not a JSON object"),
    ('"a"', "not a JSON object"),
    ("\u00a0{}", "not a JSON object"),
    ("{", "a key must stand at character 1"),
    ("{'a': 1}", "a key must stand"),
    ('{"a": 1,}', "a key must stand"),
    ('{"a": 1 "b": 2}', "',' must stand"),
    ('{"a" 1}', "':' must stand"),
    ('{"a": }', "expecting value"),
    ('{"a": 1} x', "text after"),
    ('{"a": 1}{"a": 1}', "text after"),
    ('{"a": "b\nc"}', "control character"),
    ('{"a": "b', "unterminated string"),
    ('{"a": "b\\', "not JSON"),
    ('{"a": NaN}', "NaN isn't JSON"),
    ('{"a": [Infinity]}', "Infinity isn't JSON"),
    ('{"a": -Infinity}', "-Infinity isn't JSON"),
    ('{"a": 1e999}', "too large"),
    ('{"a": 1%s}' % ("0" * 5000), "too large"),
    ('{"a": 1, "a": 1}', "'a' is there twice"),
    ('{"a": 1, "\\u0061": 2}', "'a' is there twice"),
    ('{"a": {"b": 1, "b": 2}}', "'b' is there twice"),
    ('{"a": "\\ud800"}', "surrogate"),
    ('{"\\udc00": 1}', "surrogate"),
    ('{"a": ["\ud800"]}', "surrogate"),
    ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nested deeper"),
    ('{"a": ' + "[" * 500_000, "nested deeper"),
    ('{"a":' * 500_000, "must be at most"),
    ('{"a": "%s"}' % ("x" * MAX_CHARS), "must be at most"),
  ],
)
def test_what_is_no_object(text, problem):
  with pytest.raises(ValueError, match=problem) as error:
    parse_object(text)
  assert len(str(error.value)) < 300


def test_many_keys_take_no_long_time():
  # Compared with each other, these would take minutes.
  keys = ",".join(f'"{i}":0' for i in range(90_000))
  assert len(parse_object(f"{{{keys}}}")[0]) == 90_000
  with pytest.raises(ValueError, match="'89999' is there twice"):
    parse_object(f'{{"a": {{{keys},"89999":0}}}}')


def test_brackets_in_strings_are_no_depth():
  text = '{"a": "%s\\"["}' % ("[" * 1000)
  assert parse_object(text)[0] == {"a": "[" * 1000 + '"['}


def test_the_deepest():
  inner = MAX_DEPTH - 1
  assert parse_object('{"a": ' + "[" * inner + "]" * inner + "}")


@settings(deadline=None)
@given(st.text('{}[]",:\\ a1u0', max_size=30))
def test_no_text_breaks_it(text):
  try:
    got, _ = parse_object(text)
  except ValueError:
    return
  assert got == json.loads(text)


def test_parsed_values_are_measured():
  measure({"a": [1, "x", None, 1.5, True]}, 200)
  deep = []
  for _ in range(100_000):
    deep = [deep]
  with pytest.raises(ValueError, match="nested deeper"):
    measure(deep, 1000)
  for value, problem in (
    (deep, "at most 200"),
    ({"a": float("nan")}, "nan isn't"),
    ({1: 2}, "a key"),
    ({"a": (1,)}, "a tuple"),
    (["x" * 300], "at most 200"),
  ):
    with pytest.raises(ValueError, match=problem):
      measure(value, 200)
