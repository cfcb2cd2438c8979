"""Makes search tasks from a corpus.

  python -m launch.prepare_tasks --out=tasks.jsonl --count=1000 --hops=1,2
  python -m launch.prepare_tasks --index=DIR --domain=filings \
    --author=http://10.0.0.7:8000 --model=my-model --out=tasks.jsonl

Tasks go to FILE, and what became of every attempt to FILE.report.json. Until
all is done, outcomes lie in FILE.partial: the same command goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from absl import app, flags

from arl_jax.data.synthesis.domains import DOMAINS, Domain, domain
from arl_jax.data.synthesis.draft import TaskAuthor
from arl_jax.data.synthesis.endpoint_author import GENERATOR as ENDPOINT
from arl_jax.data.synthesis.endpoint_author import EndpointAuthor
from arl_jax.data.synthesis.journal import FileJournal
from arl_jax.data.synthesis.mined import GENERATOR as MINED
from arl_jax.data.synthesis.mined import MinedAuthor
from arl_jax.data.synthesis.pipeline import Made, Pipeline, SynthesisConfig
from arl_jax.data.task_file import write_tasks
from arl_jax.envs.search import corpus as corpus_lib
from arl_jax.envs.search.index import Index, SearchIndex
from arl_jax.envs.search.stored_index import StoredIndex
from arl_jax.observability.run_directory import write_atomically
from arl_jax.serving.chat_endpoint import ChatEndpoint
from arl_jax.serving.config import read_token
from launch import command

_CORPUS = flags.DEFINE_string(
  "corpus",
  "",
  "Folder of .txt, .md and .rst files; by default what this Python says about"
  " its language and library.",
)
_INDEX = flags.DEFINE_string(
  "index",
  "",
  "Folder of an index by `launch.prepare index`, in place of --corpus: tasks"
  " are about its chunks.",
)
_OUT = flags.DEFINE_string("out", "", "File to write, like tasks.jsonl.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace the file.")
_DOMAIN = flags.DEFINE_string(
  "domain", "docs", f"Kind of the texts: {', '.join(DOMAINS)}."
)
_COUNT = flags.DEFINE_integer("count", 1000, "Tasks, held-out ones included.")
_HOPS = flags.DEFINE_list("hops", ["1", "2"], "Numbers of hops, shared out.")
_SEED = flags.DEFINE_integer("seed", 0, "Of all that is left to chance.")
_HELDOUT = flags.DEFINE_float(
  "heldout_share", 0.2, "Of the documents and of the tasks, for evaluation."
)
_CHUNK_TOKENS = flags.DEFINE_integer(
  "chunk_tokens", 0, "Of a chunk at most (4 characters each); 0: the domain's."
)
_AUTHOR = flags.DEFINE_string(
  "author", "mined", "mined, or the URL of an OpenAI-compatible endpoint."
)
_MODEL = flags.DEFINE_string("model", "default", "Name that requests carry.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Holds the URL's token.")
_CONCURRENCY = flags.DEFINE_integer(
  "concurrency", 8, "Tasks at a time, if an endpoint writes them."
)
_TIMEOUT = flags.DEFINE_float("timeout", 120.0, "Seconds for one answer.")

_CHARS_PER_TOKEN = 4


def main(argv: list[str]) -> None:
  """Raises ValueError or OSError for what can't be."""
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  out = _out()
  kind = domain(_DOMAIN.value)
  config = SynthesisConfig(
    count=_COUNT.value,
    heldout_share=_HELDOUT.value,
    hops=_hops(),
    seed=_SEED.value,
    concurrency=1 if _AUTHOR.value == "mined" else _CONCURRENCY.value,
  )
  began = time.perf_counter()
  index = _index(kind)
  corpus = index.corpus
  print(
    f"{len(corpus.documents)} documents, {len(corpus.chunks)} chunks, indexed"
    f" in {time.perf_counter() - began:.1f} s",
    flush=True,
  )
  began = time.perf_counter()
  partial = out.with_name(out.name + ".partial")
  with FileJournal(partial, _identity(config, index)) as journal:
    if len(journal):
      print(f"going on after {len(journal)} attempts", flush=True)
    try:
      made = asyncio.run(_make(index, kind, config, journal))
    except KeyboardInterrupt:
      print("stopped; the same command goes on", file=sys.stderr)
      sys.exit(130)
    seconds = time.perf_counter() - began
    if not made.tasks:
      print("\n".join(made.report.lines()), file=sys.stderr)
      raise ValueError(
        f"--count is {config.count}, but no attempt gave a task; give a larger"
        " corpus or another --domain"
      )
    report = {
      **made.report.to_json(),
      "seconds": round(seconds, 1),
      "documents": len(corpus.documents),
      "chunks": len(corpus.chunks),
      **_identity(config, index),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    write_atomically(out.with_name(out.name + ".report.json"), text + "\n")
    # Last: whoever sees the file has all of it.
    write_tasks(out, made.tasks)
    journal.remove()
  print("\n".join(made.report.lines()))
  rate = len(made.tasks) / max(seconds, 1e-9)
  print(f"{seconds:.1f} s, {rate:.1f} tasks/s: {out}")


def _out() -> pathlib.Path:
  name = _OUT.value
  path = pathlib.Path(name)
  if not name or path.is_dir():
    raise ValueError(f"--out is {name!r}; name a file like tasks.jsonl")
  if path.exists() and not _OVERWRITE.value:
    raise ValueError(
      f"--out is {name!r}, which exists; --overwrite replaces it"
    )
  if not path.parent.is_dir():
    raise ValueError(f"--out is {name!r}, but {path.parent} is no folder")
  return path


def _hops() -> tuple[int, ...]:
  try:
    return tuple(int(hops) for hops in _HOPS.value)
  except ValueError:
    raise ValueError(
      f"--hops is {','.join(_HOPS.value)!r}, not numbers like 1,2"
    ) from None


def _index(kind: Domain) -> Index:
  if _INDEX.value:
    if _CORPUS.value or _CHUNK_TOKENS.value:
      raise ValueError(
        f"--index is {_INDEX.value!r}, whose documents and chunks are as they"
        " are; leave out --corpus and --chunk_tokens"
      )
    return StoredIndex(_INDEX.value)
  documents = (
    corpus_lib.folder_documents(_CORPUS.value)
    if _CORPUS.value
    else corpus_lib.python_documents(max_modules=None)
  )
  if _CHUNK_TOKENS.value < 0:
    raise ValueError(f"--chunk_tokens is {_CHUNK_TOKENS.value}, not 0 or more")
  return SearchIndex(
    corpus_lib.build_corpus(
      documents,
      count_tokens=lambda text: -(-len(text) // _CHARS_PER_TOKEN),
      max_tokens=_CHUNK_TOKENS.value or kind.chunk_tokens,
    )
  )


def _identity(config: SynthesisConfig, index: Index) -> dict[str, Any]:
  """What the tasks follow from, as JSON values."""
  fields = dataclasses.asdict(config)
  # The tasks don't depend on it.
  fields.pop("concurrency")
  generator = MINED if _AUTHOR.value == "mined" else ENDPOINT
  return {
    "config": fields,
    "domain": _DOMAIN.value,
    "author": _AUTHOR.value,
    "generator": generator,
    "model": _MODEL.value if _AUTHOR.value != "mined" else "",
    "corpus": index.corpus.digest,
  }


async def _make(
  index: Index,
  kind: Domain,
  config: SynthesisConfig,
  journal: FileJournal,
) -> Made:
  shown = time.monotonic()

  def progress(count: int) -> None:
    nonlocal shown
    if time.monotonic() > shown + 5:
      shown = time.monotonic()
      print(f"{count} of {config.count} tasks", flush=True)

  async with _author(index, kind) as author:
    pipeline = Pipeline(index, author, kind, config, journal=journal)
    return await pipeline.make(progress)


@contextlib.asynccontextmanager
async def _author(index: Index, kind: Domain) -> AsyncIterator[TaskAuthor]:
  if _AUTHOR.value == "mined":
    yield MinedAuthor(index.corpus, kind)
    return
  endpoint = ChatEndpoint(
    _AUTHOR.value,
    model=_MODEL.value,
    token=read_token(_TOKEN_FILE.value),
    concurrency=_CONCURRENCY.value,
    timeout=_TIMEOUT.value,
  )
  async with endpoint:
    yield EndpointAuthor(endpoint, index, kind, name=_MODEL.value)


def run() -> None:
  app.run(lambda argv: command.guarded(main, argv))


if __name__ == "__main__":
  run()
