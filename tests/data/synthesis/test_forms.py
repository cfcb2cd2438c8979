"""What counts as the same name, and what doesn't."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.data.synthesis.forms import forms, holds, squeeze


@pytest.mark.parametrize(
  ("text", "name"),
  [
    ("a TestCase fails", "TestCase"),
    ("a test case fails", "TestCase"),
    ("some Test-Cases fail", "test_case"),
    ("the testcase's name", "TestCase"),
    ("the TESTCASES’ names", "test case"),
    ("one test case", "TestCases"),
    ("Café Zürich opened", "cafe zurich"),
    ("left the Hague early", "The Hague"),
    ("in Hague courts", "The Hague"),
    ("two libraries", "library"),
    ("a library", "libraries"),
    ("many boxes", "box"),
    ("a box", "boxes"),
    ("it cost 1,250,000 dollars", "1250000"),
    ("it cost 1250000 dollars", "1,250,000"),
    ("pi is 3.14159", "3.14159"),
    ("on March 3, 2021 they met", "2021-03-03"),
    ("on 2021-03-03 they met", "3 March 2021"),
    ("on the 3rd of March 2021", "March 3, 2021"),
    ("Mar. 3 2021", "2021-03-03"),
    ("March\n 3 ,\t2021", "2021-03-03"),
    ("AT&T said", "at&t"),
    ("read_text() reads", "read_text"),
    ("os.path.join joins", "path.join"),
  ],
)
def test_holds_a_form(text, name):
  assert holds(text, name)


@pytest.mark.parametrize(
  ("text", "name"),
  [
    # Within a longer word.
    ("ThreadingHTTPServer", "HTTPServer"),
    ("the prereading of texts", "reading"),
    ("a contest case", "test case"),
    # Other words, other numbers, other dates.
    ("a case test", "test case"),
    ("35 degrees", "3.5"),
    ("3.51 degrees", "3.5"),
    ("on March 4, 2021", "2021-03-03"),
    ("on March 3, 2020", "2021-03-03"),
    # Regular plurals only.
    ("many mice", "mouse"),
    ("the glas", "glass"),
    # Nothing to look for.
    ("anything", ""),
    ("any thing?", "?!"),
    ("", "name"),
  ],
)
def test_holds_none(text, name):
  assert not holds(text, name)


def test_a_date_is_still_its_parts():
  assert holds("on March 3, 2021", "2021")
  assert holds("on March 3, 2021", "March 3")


def test_forms_of_a_name():
  assert forms("The Box") == {
    *("thebox", "theboxs", "theboxes", "box", "boxs", "boxes")
  }
  assert forms("...") == frozenset()


@settings(deadline=None)
@given(st.text())
def test_a_name_with_letters_holds_itself(name):
  assert holds(name, name) == bool(squeeze(name))
  assert holds(f"before {name} after", name) == bool(squeeze(name))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["alpha", "beta", "x1"]), min_size=1))
def test_dress_does_not_matter(words):
  plain = " ".join(words)
  for sign in "-_./ ":
    assert holds(f"see {sign.join(words).upper()}!", plain)
  assert squeeze("_".join(words)) == squeeze(plain)
