"""Builds an index on disk, or brings it up to date.

Source files are taken in order of their names. What a shard holds of files that
haven't changed is used again, whether an index names that shard or a builder
was killed after it had written it: so a second run reads what has changed, and
a run after a kill goes on. Then the table and the BM25 index are made anew from
what the shards hold, and index.json is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence

from arl_jax.envs.search import chunking
from arl_jax.envs.search.chunking import Chunking
from arl_jax.envs.search.documents import (
  DocumentReader,
  SourceFile,
  list_files,
)
from arl_jax.envs.search.embedders import NamedEmbedder
from arl_jax.envs.search.left_out import LeftOut
from arl_jax.envs.search.ranking import Lexicon
from arl_jax.envs.search.reuse import Kept, Pool, Unread
from arl_jax.envs.search.sections import (
  ForeignError,
  Sections,
  check_size,
  flush_folder,
  write_sections,
)
from arl_jax.envs.search.shards import Part, Shard, ShardDraft, StoredShard
from arl_jax.envs.search.store import IndexFolder, Manifest
from arl_jax.envs.search.stored_corpus import StoredCorpus, Table

# Texts of a shard at most, beside what its last document adds.
_SHARD_BYTES = 64 * 2**20
# Texts embedded between two signs of life.
_EMBED_ROWS = 512
_SAY_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """What a build did.

  Attributes:
    documents: in the index.
    chunks: in the index.
    embedded: chunks whose vectors were made.
    files: in the source, of the endings that are read.
    read: files that were read, whole or in part.
    left_out: what isn't in the index.
    changed: whether there is a new version of the index.
    seconds: that it took.
    bytes: of the index.
  """

  documents: int
  chunks: int
  embedded: int
  files: int
  read: int
  left_out: LeftOut
  changed: bool
  seconds: float
  bytes: int


def build_index(
  source: str | os.PathLike[str],
  out: str | os.PathLike[str],
  embedder: NamedEmbedder,
  chunks: Chunking | None = None,
  *,
  overwrite: bool = False,
  verify: bool = False,
  say: Callable[[str], None] = lambda text: None,
) -> Summary:
  """Makes the index of a folder of files.

  Args:
    source: folder of .txt, .md, .rst, .html, .htm and .jsonl files.
    out: folder of the index.
    embedder: of its vectors.
    chunks: how documents are cut.
    overwrite: whether an index that was made otherwise is replaced.
    verify: whether shards are read to see that they are as they were written.
    say: takes lines on how it goes.

  Raises:
    ValueError: `source` holds no text, `out` is another kind of folder, is
      being built by another process, or was made with another embedder or
      other chunks.
    OSError: the disk is full, or an endpoint of embeddings is gone.
  """
  began = time.monotonic()
  root, folder = pathlib.Path(source), IndexFolder(out)
  if _within(folder.path, root):
    raise ValueError(f"out {folder.path} lies in source {root}; choose another")
  listed = LeftOut()
  files = list_files(root, listed)
  if not files:
    raise ValueError(
      f"{root} holds no file ending in .txt, .md, .rst, .html, .htm or .jsonl"
    )
  with folder.building():
    build = _Build(folder, embedder, chunks or Chunking(), say)
    old = build.old_manifest(overwrite)
    shards = build.shards(files, verify)
    left_out = LeftOut(listed.to_json())
    for shard in shards:
      for part in shard.parts:
        left_out.merge(LeftOut(part.left_out))
    manifest = build.commit(old, shards, left_out)
    size = folder.sweep(manifest)
  return Summary(
    documents=manifest.documents,
    chunks=manifest.chunks,
    embedded=build.embedded,
    files=len(files),
    read=len(build.read),
    left_out=LeftOut(manifest.left_out),
    changed=manifest != old,
    seconds=time.monotonic() - began,
    bytes=size,
  )


def _within(inner: pathlib.Path, outer: pathlib.Path) -> bool:
  return inner.resolve().is_relative_to(outer.resolve())


class _Build:
  """One run of a builder.

  Attributes:
    embedded: chunks whose vectors were made.
    read: names of files that were read.
  """

  def __init__(
    self,
    folder: IndexFolder,
    embedder: NamedEmbedder,
    chunks: Chunking,
    say: Callable[[str], None],
  ):
    self.embedded = 0
    self.read: set[str] = set()
    self._folder, self._embedder, self._chunks = folder, embedder, chunks
    self._made_by = {
      "max_tokens": chunks.max_tokens,
      "tolerance": chunks.tolerance,
      "counter": chunks.counter,
      "embedder": embedder.identity,
      "dim": embedder.dim,
    }
    self._say = say
    self._began = self._said = time.monotonic()
    self._draft = ShardDraft()
    self._open: dict[str, Shard] = {}

  def old_manifest(self, overwrite: bool) -> Manifest | None:
    """The index that is there; None if there is none, or it is replaced."""
    try:
      old = self._folder.manifest()
    except FileNotFoundError:
      return None
    except ForeignError:
      if overwrite:
        return None
      raise
    except ValueError as error:
      # What it named can be told from the shards.
      self._say(f"{error}; making it anew")
      return None
    if old.made_by != self._made_by and not overwrite:
      differs = ", ".join(
        f"{name} {old.made_by.get(name)!r} and not {value!r}"
        for name, value in self._made_by.items()
        if old.made_by.get(name) != value
      )
      raise ValueError(
        f"{self._folder.path} was made with {differs}; name another folder or"
        " say --overwrite"
      )
    return old

  def shards(
    self, files: Sequence[SourceFile], verify: bool
  ) -> list[StoredShard]:
    """Shards that hold all files in order; those that are missing are made."""
    self._folder.sweep(None)
    stored = [s for s in self._folder.shards() if s.made_by == self._made_by]
    if verify:
      stored = [shard for shard in stored if self._is_whole(shard)]
    pool = Pool(stored, files)
    units = pool.units(files)
    everything = all(isinstance(unit, Kept) for unit in units)
    made: list[StoredShard] = []
    i = 0
    while i < len(units):
      unit = units[i]
      if isinstance(unit, Kept):
        shard = unit.shard
        end = i + len(shard.parts)
        whole = unit.index == 0 and units[i:end] == [
          Kept(shard, k) for k in range(len(shard.parts))
        ]
        # Small ones join their neighbours, or they would become many.
        large = 2 * shard.info.chunks >= self._chunks.shard_chunks
        if whole and (everything or large):
          self._end_shard(made)
          made.append(shard)
          i = end
          continue
        self._copy(unit, made)
      else:
        self._read(unit, made)
      i += 1
    self._end_shard(made)
    return made

  def _is_whole(self, shard: StoredShard) -> bool:
    try:
      shard.check()
    except (ValueError, OSError) as error:
      self._say(f"{error}; reading its files again")
      return False
    return True

  def _copy(self, unit: Kept, made: list[StoredShard]) -> None:
    shard, parts = unit.shard, unit.shard.parts
    if shard.info.name not in self._open:
      self._open = {shard.info.name: shard.open(self._embedder.dim)}
    opened = self._open[shard.info.name]
    first = sum(part.documents for part in parts[: unit.index])
    self._draft.copy(parts[unit.index], opened, first)
    if self._full:
      self._end_shard(made)

  def _read(self, unit: Unread, made: list[StoredShard]) -> None:
    file = unit.file
    self.read.add(file.name)
    reader = DocumentReader(file, unit.begin, unit.line)
    documents, before = 0, self._draft.chunks

    def part(last: bool) -> Part:
      return Part(
        file=file.name,
        # One that couldn't be read is tried again once it can be.
        size=-1 if reader.failed else file.size,
        mtime_ns=file.mtime_ns,
        begin=reader.begin,
        end=reader.end,
        line=reader.first_line,
        next_line=reader.line,
        last=last,
        digest=reader.digest,
        documents=documents,
        chunks=self._draft.chunks - before,
        left_out=reader.left_out.to_json(),
      )

    for document in reader:
      texts = self._cut(document.text)
      if not texts:
        reader.left_out.add("documents without words", document.doc_id)
      self._draft.add(document, texts)
      documents += 1
      if self._full and not reader.whole:
        self._draft.parts.append(part(False))
        self._end_shard(made)
        reader.begin_part()
        documents, before = 0, 0
    self._draft.parts.append(part(True))
    if self._full:
      self._end_shard(made)

  def _cut(self, text: str) -> list[str]:
    """Texts of a document's chunks, each once."""
    found = chunking.cut(
      text,
      self._chunks.count_tokens,
      self._chunks.max_tokens,
      self._chunks.tolerance,
    )
    return list(dict.fromkeys(filter(chunking.has_words, found)))

  @property
  def _full(self) -> bool:
    return (
      self._draft.chunks >= self._chunks.shard_chunks
      or self._draft.size >= _SHARD_BYTES
    )

  def _end_shard(self, made: list[StoredShard]) -> None:
    """Embeds and writes what has been gathered."""
    draft, self._draft = self._draft, ShardDraft()
    if not draft.parts:
      return
    vectors = []
    for start, texts in draft.unknown():
      for i in range(0, len(texts), _EMBED_ROWS):
        batch = texts[i : i + _EMBED_ROWS]
        vectors.append((start + i, self._embedder(batch)))
        self.embedded += len(batch)
        self._say_progress()
    made.append(
      draft.write(self._folder.path, self._made_by, self._embedder.dim, vectors)
    )

  def _say_progress(self) -> None:
    now = time.monotonic()
    if now - self._said >= _SAY_SECONDS:
      self._said = now
      rate = self.embedded / (now - self._began)
      self._say(f"{self.embedded} chunks embedded, {rate:.0f} a second")

  def commit(
    self,
    old: Manifest | None,
    shards: Sequence[StoredShard],
    left_out: LeftOut,
  ) -> Manifest:
    """Makes shards the index; returns the old manifest if it is the same."""
    infos = [shard.info for shard in shards]
    opened = [shard.open(self._embedder.dim) for shard in shards]
    table = Table.make(opened)
    if not len(table.rows):
      raise ValueError("the source holds no text; give it a file with words")
    for reason, count in (
      ("documents whose id an earlier one has", _missing(table, opened)),
      ("chunks whose text an earlier one has", _repeated(table, opened)),
    ):
      if count:
        left_out.add(reason, "", count)
    if (
      old is not None
      and list(old.shards) == infos
      and old.left_out == left_out.to_json()
      and self._is_there(old)
    ):
      return old
    generation = 1 + max(
      [0 if old is None else old.generation, *self._folder.generations()]
    )
    corpus = StoredCorpus(opened, table)
    self._say(f"indexing the words of {len(table.rows)} chunks")
    words = self._write_words(generation, corpus)
    layout = write_sections(self._folder.table(generation), table.sections())
    manifest = Manifest(
      generation=generation,
      made_by=self._made_by,
      embedder=self._embedder.name,
      shards=infos,
      table=layout,
      words=words,
      digest=corpus.digest,
      chunks=len(table.rows),
      documents=len(table.documents),
      left_out=left_out.to_json(),
    )
    self._folder.write_manifest(manifest)
    return manifest

  def _write_words(
    self, generation: int, corpus: StoredCorpus
  ) -> dict[str, int]:
    partial = self._folder.partial_words(generation)
    final = self._folder.words(generation)
    partial.mkdir()
    try:
      Lexicon.write(corpus.texts(), partial)
    except ValueError as error:  # tantivy's, whatever happened.
      raise OSError(f"{partial}: {' '.join(str(error).split())}") from error
    for path in partial.iterdir():
      if path.suffix == ".lock":
        path.unlink()
      else:
        # Some of tantivy's are its user's alone.
        path.chmod(partial.stat().st_mode & 0o666)
    flush_folder(partial)
    os.rename(partial, final)
    flush_folder(self._folder.path)
    return {path.name: path.stat().st_size for path in final.iterdir()}

  def _is_there(self, old: Manifest) -> bool:
    """Whether the table and the BM25 index of a manifest are whole."""
    words = self._folder.words(old.generation)
    with contextlib.suppress(ValueError, OSError):
      Table.read(Sections(self._folder.table(old.generation), old.table))
      for name, size in old.words.items():
        check_size(words / name, size)
      return True
    return False


def _missing(table: Table, shards: Sequence[Shard]) -> int:
  return sum(s.info.documents for s in shards) - len(table.documents)


def _repeated(table: Table, shards: Sequence[Shard]) -> int:
  return sum(s.info.chunks for s in shards) - len(table.rows)
