"""Documents read from folders of files, one at a time.

Everything that isn't read is counted with its reason. Text is UTF-8, or UTF-16
or UTF-32 with a byte order mark, or HTML in the encoding that it declares.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import IO, Any

import xxhash

from arl_jax.data.json_lines import parse_json
from arl_jax.envs.search.corpus import Document
from arl_jax.envs.search.left_out import LeftOut
from arl_jax.envs.search.markup import Page

TEXT_SUFFIXES = (".md", ".rst", ".txt")
HTML_SUFFIXES = (".htm", ".html")
LINES_SUFFIX = ".jsonl"
SUFFIXES = (*TEXT_SUFFIXES, *HTML_SUFFIXES, LINES_SUFFIX)

# Of a file that is a document, and of a line of JSONL.
MAX_DOCUMENT_BYTES = 16 * 2**20
_SKIP_BYTES = 2**20
_MAX_ID, _MAX_TITLE, _MAX_EXAMPLE = 256, 512, 200

_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_MARKS = (
  (codecs.BOM_UTF8, "utf-8-sig"),
  # A mark of UTF-32 begins with one of UTF-16.
  (codecs.BOM_UTF32_LE, "utf-32"),
  (codecs.BOM_UTF32_BE, "utf-32"),
  (codecs.BOM_UTF16_LE, "utf-16"),
  (codecs.BOM_UTF16_BE, "utf-16"),
)
_DECLARED = re.compile(
  rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]{1,40})",
  re.IGNORECASE,
)
_HEAD_BYTES = 4096
# Python has codecs that aren't encodings of pages, and some that are slow.
_PAGE_CODECS = re.compile(
  r"ascii|iso8859-\d+|cp\d+|koi8-[rut]|mac-roman|gb2312|gbk|gb18030|big5"
  r"|euc_(jp|kr)|shift_jis"
)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
  """A file as it was found.

  Attributes:
    name: its path below the source, with slashes.
    path: where it is.
    size: bytes.
    mtime_ns: when it was changed.
  """

  name: str
  path: str
  size: int
  mtime_ns: int


def list_files(root: pathlib.Path, left_out: LeftOut) -> list[SourceFile]:
  """The files below a folder that documents are read from, sorted by name.

  Links to files are followed, links to folders aren't: they may go in circles.

  Raises:
    ValueError: there is no such folder.
  """
  if not root.is_dir():
    raise ValueError(f"{root} isn't a folder; name one that holds text files")
  found = []

  def failed(error: OSError) -> None:
    left_out.add("folders that can't be read", f"{error.filename}: {error}")

  for folder, folders, files in os.walk(root, onerror=failed):
    below = pathlib.Path(folder).relative_to(root)
    for name in folders:
      if os.path.islink(os.path.join(folder, name)):
        left_out.add("links to folders", shown((below / name).as_posix()))
    for name in files:
      path, relative = os.path.join(folder, name), (below / name).as_posix()
      if not name.lower().endswith(SUFFIXES):
        left_out.add("files of other endings", shown(relative))
        continue
      try:
        status = os.stat(path)
      except OSError as error:
        left_out.add("files that can't be read", f"{shown(relative)}: {error}")
        continue
      if not stat.S_ISREG(status.st_mode):
        left_out.add("pipes, sockets and devices", shown(relative))
        continue
      found.append(
        SourceFile(relative, path, status.st_size, status.st_mtime_ns)
      )
  return sorted(found, key=lambda file: file.name)


class DocumentReader:
  """Iterates over the documents of a file, from a position on.

  Attributes:
    left_out: what wasn't read since the last `begin_part`.
    begin: byte at which that part begins.
    first_line: its number, from 1.
    end: byte up to which was read.
    line: number of the next line.
    failed: whether reading the file failed, so that it should be tried again.
    whole: whether the file is one document.
  """

  def __init__(self, file: SourceFile, begin: int = 0, line: int = 1):
    """Args: file: to read. begin: byte of the first line. line: its number."""
    self._file = file
    self._shown = shown(file.name)
    self.end, self.line, self.failed = begin, line, False
    self.whole = not file.name.lower().endswith(LINES_SUFFIX)
    self.begin_part()

  def begin_part(self) -> None:
    """Begins a part of the file at what is read next."""
    self.left_out = LeftOut()
    self.begin, self.first_line = self.end, self.line
    self._hashed = xxhash.xxh3_128()

  @property
  def digest(self) -> str:
    """Of the bytes from `begin` to `end`."""
    return self._hashed.hexdigest()

  def __iter__(self) -> Iterator[Document]:
    """Yields documents; memory is bounded by the largest allowed one."""
    try:
      with open(self._file.path, "rb") as opened:
        yield from (self._whole if self.whole else self._lines)(opened)
    except OSError as error:
      self.failed = True
      reason = error.strerror or type(error).__name__
      self._leave("files that can't be read", f"{self._shown}: {reason}")

  def _leave(self, reason: str, where: str) -> None:
    self.left_out.add(reason, where[:_MAX_EXAMPLE])

  def _whole(self, opened: IO[bytes]) -> Iterator[Document]:
    name = self._file.name
    data = opened.read(MAX_DOCUMENT_BYTES + 1)
    self.end += len(data)
    self._hashed.update(data)
    if len(data) > MAX_DOCUMENT_BYTES:
      self._leave(f"files of more than {MAX_DOCUMENT_BYTES} bytes", self._shown)
      return
    is_page = name.lower().endswith(HTML_SUFFIXES)
    try:
      text = decoded(data, page=is_page)
    except ValueError as error:
      self._leave("files that aren't text", f"{self._shown}: {error}")
      return
    title = self._shown
    if is_page:
      try:
        page = Page(text)
      except ValueError as error:
        self._leave("pages that are too hard", f"{self._shown}: {error}")
        return
      if page.cut:
        self._leave("ends of pages", f"{self._shown}: {page.cut}")
      title, text = page.title[:_MAX_TITLE] or title, page.text
    if text.strip():
      # A prompt and a tool's argument are split at white space.
      yield Document(identifier(name), title, text)
    else:
      self._leave("empty files", self._shown)

  def _lines(self, opened: IO[bytes]) -> Iterator[Document]:
    opened.seek(self.end)
    while data := opened.readline(MAX_DOCUMENT_BYTES + 1):
      where = f"{self._shown}:{self.line}"
      number, self.line = self.line, self.line + 1
      self._count(data)
      if len(data) > MAX_DOCUMENT_BYTES:
        # The rest of it is passed over in pieces.
        while data and not data.endswith(b"\n"):
          data = opened.readline(_SKIP_BYTES)
          self._count(data)
        self._leave(f"lines of more than {MAX_DOCUMENT_BYTES} bytes", where)
        continue
      if not data.strip():
        continue
      if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
      try:
        document = line_document(parse_json(data, where), self._shown, number)
      except ValueError as error:
        self._leave("lines that aren't documents", str(error))
        continue
      if document.text.strip():
        yield document
      else:
        self._leave("lines without text", where)

  def _count(self, data: bytes) -> None:
    self.end += len(data)
    self._hashed.update(data)


def line_document(value: Any, name: str, line: int) -> Document:
  """The document of a line: {"text", optional "id" and "title"}.

  Args:
    value: of JSON.
    name: of the file.
    line: its number; without an id, the id is `<name>:<line>`.

  Raises:
    ValueError: a field is missing or of another kind; names file and line.
  """
  where = f"{name}:{line}"
  if not isinstance(value, dict):
    raise ValueError(f"{where}: {value!r:.40}, must be an object")
  text = value.get("text")
  if not isinstance(text, str):
    raise ValueError(f"{where}: field text is {text!r:.40}, must be a string")
  if "\0" in text:
    raise ValueError(f"{where}: field text holds a NUL, so it isn't text")
  key = value.get("id")
  if type(key) is int:
    key = str(key)
  if key is None:
    key = where
  elif not isinstance(key, str) or not key.strip() or len(key) > _MAX_ID:
    raise ValueError(
      f"{where}: field id is {key!r:.40}, must be an integer or 1 to"
      f" {_MAX_ID} characters"
    )
  title = value.get("title")
  if title is None:
    title = key
  elif not isinstance(title, str):
    raise ValueError(f"{where}: field title is {title!r:.40}, must be a string")
  title = _BREAKS.sub(" ", title).strip()[:_MAX_TITLE]
  return Document(identifier(key), title, _lines_of(text))


def decoded(data: bytes, *, page: bool) -> str:
  """Text of bytes, by the rule that the module states.

  Args:
    data: of a file.
    page: whether it may declare its encoding as HTML does.

  Raises:
    ValueError: it isn't text by that rule.
  """
  encoding = next((e for mark, e in _MARKS if data.startswith(mark)), "utf-8")
  try:
    text = data.decode(encoding)
  except UnicodeDecodeError as error:
    declared = _declared(data) if page and encoding == "utf-8" else None
    if declared is None:
      raise ValueError(f"byte {error.start} isn't {encoding.upper()}") from None
    try:
      text = data.decode(declared)
    except UnicodeDecodeError as second:
      raise ValueError(
        f"byte {second.start} isn't {declared.upper()}, which it declares"
      ) from None
  if "\0" in text:
    raise ValueError("it holds a NUL")
  return _lines_of(text)


def _declared(data: bytes) -> str | None:
  match = _DECLARED.search(data[:_HEAD_BYTES])
  if match is None:
    return None
  try:
    name = codecs.lookup(match[1].decode("ascii", "replace")).name
  except LookupError:
    return None
  return name if _PAGE_CODECS.fullmatch(name) else None


def _lines_of(text: str) -> str:
  return text.replace("\r\n", "\n").replace("\r", "\n")


def shown(name: str) -> str:
  """A name in one line of valid text, whatever bytes the disk has for it."""
  clean = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
  return _BREAKS.sub(" ", clean)


def identifier(name: str) -> str:
  """An id without white space, from a name or from what a line gives."""
  return "-".join(shown(name).split())
