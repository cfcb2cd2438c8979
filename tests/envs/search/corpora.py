"""Small folders of made-up text, and indexes of them."""

import json
import random

from arl_jax.envs.search import builder
from arl_jax.envs.search.chunking import Chunking
from arl_jax.envs.search.corpus import Corpus
from arl_jax.envs.search.embedders import named_embedder
from arl_jax.envs.search.index import SearchIndex
from arl_jax.envs.search.stored_index import StoredIndex

WORDS = [c + v + d for c in "bdklm" for v in "aeiou" for d in "nrst"]
EMBEDDER = named_embedder("hashed:32")
# A shard of 12 chunks, each of about 16 tokens: many of both of few files.
SMALL = Chunking(max_tokens=16, tolerance=4, shard_chunks=12)


def sentence(draw: random.Random) -> str:
  return " ".join(draw.choices(WORDS, k=draw.randint(3, 14))) + "."


def write(root, seed=0, files=12):
  """Writes text, pages and lines, some of them the same."""
  draw = random.Random(seed)
  root.mkdir(exist_ok=True)
  for i in range(files):
    paragraphs = [sentence(draw) for _ in range(draw.randint(1, 8))]
    if i % 4 == 3:
      lines = [{"text": p, "id": f"{i}-{n}"} for n, p in enumerate(paragraphs)]
      (root / f"f{i}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    elif i % 4 == 2:
      text = "".join(f"<p>{p}</p>" for p in paragraphs)
      (root / f"f{i}.html").write_text(f"<title>Page {i}</title>{text}")
    else:
      # A paragraph that others have as well.
      shared = ["the same everywhere, word by word."] if i % 3 == 0 else []
      (root / f"f{i}.txt").write_text("\n\n".join(paragraphs + shared))


def build(source, out, embedder=EMBEDDER, chunks=SMALL, **options):
  return builder.build_index(source, out, embedder, chunks, **options)


def contents(index: StoredIndex):
  """Everything that an index holds and finds; equal for equal indexes."""
  corpus = index.corpus
  queries = [*WORDS[:20], "ban der kit", "the same everywhere", "zzz"]
  return {
    "chunks": list(corpus.chunks),
    "documents": list(corpus.documents),
    "digest": corpus.digest,
    "hits": [index.search(query, limit=60) for query in queries],
    "greps": [index.grep(p, limit=100) for p in ("ban", r"\bk\w+\.", "^d")],
  }


def in_memory(index: StoredIndex) -> SearchIndex:
  """The same chunks in an index in memory."""
  corpus = Corpus(tuple(index.corpus.documents), tuple(index.corpus.chunks))
  return SearchIndex(corpus, embed=EMBEDDER)
