"""Documents, and the chunks a search environment finds and shows.

Two sources need no download: what the Python installation says about its own
language and library, and a folder of text files. `build_corpus` cuts either
into chunks of a bounded number of tokens.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator

from arl_jax.envs.search import chunking

_SUFFIXES = (".md", ".rst", ".txt")
_MAX_FILE_BYTES = 16 * 2**20
# Keeps a few huge modules from drowning the others.
_MAX_MODULE_CHARS = 10_000
# Tests, programs, removed packages and jokes.
_SKIPPED_MODULES = frozenset(
  (
    "antigravity",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "this",
    "turtledemo",
  )
)


@dataclasses.dataclass(frozen=True)
class Document:
  """A text with a name: `doc_id` is unique in a corpus."""

  doc_id: str
  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A part of a document, `chunk_id` is `<doc_id>_<n>` with n from 0."""

  chunk_id: str
  doc_id: str
  text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Documents and their chunks, in the order of the documents.

  Attributes:
    documents: as given to `build_corpus`.
    chunks: of all documents; those of one document are neighbours.
  """

  documents: tuple[Document, ...]
  chunks: tuple[Chunk, ...]

  @functools.cached_property
  def positions(self) -> dict[str, int]:
    """Index in `chunks` of each chunk id."""
    return {c.chunk_id: i for i, c in enumerate(self.chunks)}

  @functools.cached_property
  def _by_document(self) -> dict[str, tuple[Chunk, ...]]:
    grouped: dict[str, list[Chunk]] = {d.doc_id: [] for d in self.documents}
    for chunk in self.chunks:
      grouped[chunk.doc_id].append(chunk)
    return {k: tuple(v) for k, v in grouped.items()}

  def chunk(self, chunk_id: str) -> Chunk:
    """The chunk of that id. Raises KeyError if there is none."""
    return self.chunks[self.positions[chunk_id]]

  def chunks_of(self, doc_id: str) -> tuple[Chunk, ...]:
    """Chunks of a document in order. Raises KeyError if there is none."""
    return self._by_document[doc_id]

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 (hex) of all ids, titles and texts."""
    digest = hashlib.sha256()
    records: tuple[Document | Chunk, ...] = (*self.documents, *self.chunks)
    for record in records:
      for field in dataclasses.astuple(record):
        data = field.encode("utf-8", "surrogatepass")
        # Lengths keep ("ab", "c") apart from ("a", "bc").
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def build_corpus(
  documents: Iterable[Document],
  *,
  count_tokens: Callable[[str], int],
  max_tokens: int = 128,
) -> Corpus:
  """Cuts documents into chunks of at most `max_tokens` tokens.

  Cuts fall between paragraphs, in a longer paragraph between sentences or
  lines, then between words, and only then within a word. Neighbours are merged
  while they fit. A chunk without a letter or digit, or whose text an earlier
  chunk has, is dropped.

  Args:
    documents: with distinct ids.
    count_tokens: tokens of a text.
    max_tokens: of a chunk, at least 1.

  Raises:
    ValueError: two documents share an id, `max_tokens` is below 1, or a single
      character has more tokens than that.
  """
  if max_tokens < 1:
    raise ValueError(f"max_tokens is {max_tokens}, not at least 1")
  documents = tuple(documents)
  seen_ids: set[str] = set()
  seen_texts: set[str] = set()
  chunks = []
  for document in documents:
    if document.doc_id in seen_ids:
      raise ValueError(
        f"doc_id {document.doc_id!r} occurs twice; make it unique"
      )
    seen_ids.add(document.doc_id)
    n = 0
    for text in chunking.cut(document.text, count_tokens, max_tokens):
      if text in seen_texts or not chunking.has_words(text):
        continue
      seen_texts.add(text)
      chunks.append(Chunk(f"{document.doc_id}_{n}", document.doc_id, text))
      n += 1
  return Corpus(documents, tuple(chunks))


def folder_documents(path: str | pathlib.Path) -> list[Document]:
  """Reads every .txt, .md and .rst file below a folder, sorted by path.

  The relative path is a document's id; files of white space alone are skipped.

  Raises:
    ValueError: there is no such folder, no such file in it, or a file is not
      UTF-8 text or is larger than 16 MiB.
  """
  root = pathlib.Path(path)
  if not root.is_dir():
    raise ValueError(f"{root} isn't a folder; name one that holds text files")
  files = sorted(
    (p.relative_to(root).as_posix(), p)
    for p in root.rglob("*")
    if p.suffix.lower() in _SUFFIXES and p.is_file()
  )
  if not files:
    raise ValueError(f"{root} holds no file ending in {', '.join(_SUFFIXES)}")
  documents = []
  for name, file in files:
    text = _read_text(file)
    if text.strip():
      # A prompt and a tool's argument are split at white space.
      documents.append(Document("-".join(name.split()), name, text))
  if not documents:
    raise ValueError(f"{root} holds only empty files; at least one needs text")
  return documents


def _read_text(file: pathlib.Path) -> str:
  size = file.stat().st_size
  if size > _MAX_FILE_BYTES:
    raise ValueError(
      f"{file} has {size} bytes, more than {_MAX_FILE_BYTES}; split it"
    )
  data = file.read_bytes()
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{file} isn't UTF-8 (byte {error.start}); convert or remove it"
    ) from None
  if "\0" in text:
    raise ValueError(
      f"{file} holds a NUL byte, so it isn't text; convert or remove it"
    )
  return text.replace("\r\n", "\n").replace("\r", "\n")


def python_documents(*, max_modules: int | None = 120) -> list[Document]:
  """What this Python installation says about its language and library.

  The language reference by topic (`topic.<name>`), without paragraphs that an
  earlier topic has, then one document a module (`module.<name>`): its
  docstring and those of its public functions, classes and methods, read from
  the source without importing it. Contents follow the Python version.

  Args:
    max_modules: keep the modules with the most text; None for all.

  Raises:
    ValueError: `max_modules` is negative.
  """
  if max_modules is not None and max_modules < 0:
    raise ValueError(f"max_modules is {max_modules}, not 0, more or None")
  modules = list(_modules())
  # By name among equals, so that the choice does not depend on the disk.
  modules.sort(key=lambda d: (-len(d.text), d.doc_id))
  kept = sorted(modules[:max_modules], key=lambda d: d.doc_id)
  return _topics() + [
    dataclasses.replace(d, text=d.text[:_MAX_MODULE_CHARS]) for d in kept
  ]


def _topics() -> list[Document]:
  from pydoc_data import topics  # Half a megabyte, wanted only here.

  seen: set[str] = set()
  documents = []
  for name, text in sorted(topics.topics.items()):
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
      plain = " ".join(paragraph.split())
      # Topics quote whole sections of each other; short paragraphs are kept
      # because they are headings and signatures.
      if len(plain) < 60 or plain not in seen:
        kept.append(paragraph)
      seen.add(plain)
    document_id = "topic." + "-".join(name.split())
    documents.append(Document(document_id, name, "\n\n".join(kept)))
  return documents


def _modules() -> Iterator[Document]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  for file in sorted((*root.glob("*.py"), *root.glob("*/__init__.py"))):
    name = file.parent.name if file.stem == "__init__" else file.stem
    if name.startswith("_") or name in _SKIPPED_MODULES:
      continue
    try:
      tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
      continue  # Some distributions ship templates under a module's name.
    text = "\n\n".join(_docstrings(tree, name))
    if text:
      yield Document(f"module.{name}", name, text)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _docstrings(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
  if isinstance(node, ast.Module):
    text = ast.get_docstring(node)
    if text:
      yield text
  for child in node.body:
    if not isinstance(child, _Definition) or child.name.startswith("_"):
      continue
    text = ast.get_docstring(child)
    name = f"{prefix}.{child.name}"
    if text:
      yield f"{name}({_arguments(child)})\n{text}"
    if isinstance(child, ast.ClassDef):
      yield from _docstrings(child, name)


def _arguments(node: _Definition) -> str:
  if isinstance(node, ast.ClassDef):
    return ", ".join(ast.unparse(base) for base in node.bases)
  return ast.unparse(node.args)
