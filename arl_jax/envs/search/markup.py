"""The text of an HTML page."""

from __future__ import annotations

import html.parser
import time

_FEED_CHARS = 2**16
# Of markup that isn't closed. The parser looks at it again with all that
# follows, so it may not grow for ever; at the end it takes quadratic time.
_MAX_OPEN_CHARS, _MAX_END_CHARS = 2**22, 2**16
_MAX_SECONDS = 20.0
_DROPPED = frozenset(("script", "style"))
# Begin and end lines of their own; after a paragraph there is an empty line.
_LINES = frozenset(
  [
    "br",
    "dd",
    "dt",
    "li",
    "td",
    "th",
    "tr",
    "caption",
    "legend",
    "option",
    "summary",
    "title",
  ]
)
_PARAGRAPHS = frozenset(
  [
    "address",
    "article",
    "aside",
    "blockquote",
    "body",
    "details",
    "div",
    "dl",
    "fieldset",
    "figcaption",
    "figure",
    "footer",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "header",
    "hr",
    "html",
    "main",
    "nav",
    "ol",
    "p",
    "pre",
    "section",
    "table",
    "ul",
  ]
)


class Page:
  """What a page says.

  Attributes:
    title: of the page, in one line; may be empty.
    text: lines, with an empty one between paragraphs.
    cut: why the end of it is missing; empty if it isn't.
  """

  def __init__(self, markup: str):
    """Reads a page. Raises ValueError if that takes longer than 20 seconds."""
    parser = _Parser()
    deadline = time.monotonic() + _MAX_SECONDS
    self.cut = ""
    for start in range(0, len(markup), _FEED_CHARS):
      parser.feed(markup[start : start + _FEED_CHARS])
      if time.monotonic() > deadline:
        raise ValueError(f"takes over {_MAX_SECONDS:g} s to read")
      if len(parser.rawdata) > _MAX_OPEN_CHARS:
        break
    if len(parser.rawdata) > _MAX_END_CHARS:
      self.cut = "ends within markup"
    else:
      parser.close()
    if parser.within and not self.cut:
      self.cut = f"ends within <{parser.within}>"
    self.title, self.text = parser.result()


class _Parser(html.parser.HTMLParser):
  def __init__(self) -> None:
    super().__init__(convert_charrefs=True)
    # The element whose text isn't the page's, if one is open.
    self.within = ""
    self._title: list[str] = []
    self._lines: list[str] = []
    self._line: list[str] = []
    self._preformatted = 0

  def parse_marked_section(self, i: int, report: bool = True) -> int:
    try:
      return super().parse_marked_section(i, report)
    except AssertionError:
      # `<![` before what HTML doesn't know.
      return self.parse_bogus_comment(i)

  def handle_starttag(self, tag: str, attrs: object) -> None:
    if tag in _DROPPED:
      self.within = tag
    elif tag == "title" and not self._title:
      self._end_line()
      self.within = tag
    else:
      self._edge(tag)
      if tag == "pre":
        self._preformatted += 1

  def handle_startendtag(self, tag: str, attrs: object) -> None:
    # <script/> isn't closed by its slash, but what follows is shown rather
    # than lost.
    self._edge(tag)

  def handle_endtag(self, tag: str) -> None:
    if tag == self.within:
      self.within = ""
    else:
      self._edge(tag)
      if tag == "pre":
        self._preformatted = max(0, self._preformatted - 1)

  def handle_data(self, data: str) -> None:
    if self.within == "title":
      self._title.append(data)
    elif not self.within:
      self._line.append(data)

  def _edge(self, tag: str) -> None:
    if tag in _LINES:
      self._end_line()
    elif tag in _PARAGRAPHS:
      self._end_line()
      if self._lines and self._lines[-1]:
        self._lines.append("")

  def _end_line(self) -> None:
    text = "".join(self._line)
    self._line.clear()
    if self._preformatted:
      self._lines += [line.rstrip() for line in text.splitlines()]
    elif text := " ".join(text.split()):
      self._lines.append(text)

  def result(self) -> tuple[str, str]:
    self._end_line()
    title = " ".join("".join(self._title).split())
    return title, "\n".join(self._lines).strip("\n")
