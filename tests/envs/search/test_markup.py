"""Pages to text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search.markup import Page


def text(markup: str) -> str:
  return Page(markup).text


def test_keeps_paragraphs_headings_and_the_title():
  page = Page(
    "<html><head><title>A &amp; B</title><style>p {}</style></head>"
    "<body><h1>Head</h1><p>one\n  <b>two</b>&nbsp;three<p>four"
    "<script>if (a < b) hide()</script></body></html>"
  )
  assert page.title == "A & B"
  assert page.text == "Head\n\none two three\n\nfour"
  assert page.cut == ""


def test_lines_of_lists_and_tables():
  assert text("<ul><li>a<li>b</ul>c<br>d") == "a\nb\n\nc\nd"
  assert text("<table><tr><td>1</td><td>2</td></tr></table>") == "1\n2"


def test_keeps_the_lines_of_preformatted_text():
  assert text("x<pre>def f():\n  return  1\n</pre>y") == (
    "x\n\ndef f():\n  return  1\n\ny"
  )


def test_a_second_title_is_text():
  page = Page("<title>a</title><svg><title>b</title></svg>")
  assert (page.title, page.text) == ("a", "b")


@pytest.mark.parametrize(
  ("markup", "cut"),
  [
    ("<![x [a]>kept<![ 1>", ""),
    ("kept<script>var x", "ends within <script>"),
    ("kept<!-- " + "x" * 70_000, "ends within markup"),
    ("kept<a href='" + "x" * 5_000_000, "ends within markup"),
  ],
)
def test_says_what_the_end_is_lost_in(markup, cut):
  page = Page(markup)
  assert page.cut == cut
  assert page.text == "kept"


@pytest.mark.parametrize(
  "markup",
  [
    "<a " * 100_000,
    "<!--" * 100_000,
    "<![CDATA[" * 50_000,
    "</" * 200_000,
    "<div>" * 100_000,
    "<script>" * 50_000,
    "&" * 300_000,
    "<a x='" + "y='" * 100_000,
  ],
)
def test_hostile_pages_take_no_time(markup):
  began = time.perf_counter()
  Page(markup)
  assert time.perf_counter() - began < 10.0


@settings(max_examples=80, deadline=None)
@given(st.text("<>/![-]?&#x1;='\" apre\n", max_size=120))
def test_any_text_is_a_page(markup):
  page = Page(markup)
  assert "\n\n\n" not in page.text or "<pre" in markup
