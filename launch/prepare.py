"""Prepares data before a run.

  python -m launch.prepare index --source=DOCUMENTS --out=INDEX

makes the search index of a folder of .txt, .md, .rst, .html, .htm and .jsonl
files (a line is {"text": ..., optional "id" and "title"}), or brings it up to
date. A run that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys

import tokenizers
from absl import app, flags

from arl_jax.envs.search.builder import Summary, build_index
from arl_jax.envs.search.chunking import Chunking, quarter_of_bytes
from arl_jax.envs.search.embedders import named_embedder
from launch import command

_SOURCE = flags.DEFINE_string("source", "", "Folder of documents.")
_OUT = flags.DEFINE_string("out", "", "Folder of the index.")
_EMBEDDER = flags.DEFINE_string(
  "embedder",
  "hashed",
  "What makes vectors: hashed, hashed:DIM, minilm:FOLDER or openai:URL#MODEL"
  " (with the key in OPENAI_API_KEY).",
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Of a chunk.")
_TOLERANCE = flags.DEFINE_integer(
  "tolerance", 100, "Tokens by which a document's last chunk may be longer."
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  "",
  "A tokenizer.json, or a folder with one, that counts tokens; by default a"
  " quarter of the bytes is taken for their number.",
)
_SHARD_CHUNKS = flags.DEFINE_integer(
  "shard_chunks", 4096, "Chunks that are on the disk before the next are read."
)
_OVERWRITE = flags.DEFINE_bool(
  "overwrite", False, "Replace an index that was made otherwise."
)
_VERIFY = flags.DEFINE_bool(
  "verify", False, "Read all that is there to see whether it is damaged."
)


def main(argv: list[str]) -> None:
  if argv[1:] != ["index"]:
    raise ValueError(
      f"unexpected arguments {argv[1:]}; say `index` and flags such as --source"
    )
  for name, value in (("source", _SOURCE.value), ("out", _OUT.value)):
    if not value:
      raise ValueError(f"--{name} is missing; name a folder")
  chunks = _chunking()
  embedder = named_embedder(_EMBEDDER.value)
  try:
    summary = build_index(
      _SOURCE.value,
      _OUT.value,
      embedder,
      chunks,
      overwrite=_OVERWRITE.value,
      verify=_VERIFY.value,
      say=lambda line: print(line, file=sys.stderr, flush=True),
    )
  except KeyboardInterrupt:
    print("stopped; the same command goes on", file=sys.stderr)
    sys.exit(130)
  _report(summary)


def _chunking() -> Chunking:
  count, counter = quarter_of_bytes, "bytes/4"
  if _TOKENIZER.value:
    file = pathlib.Path(_TOKENIZER.value)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
      tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing more special.
      raise ValueError(f"--tokenizer: {file} can't be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    counter = f"tokenizer:{hashlib.sha256(file.read_bytes()).hexdigest()[:32]}"

    def count(text: str) -> int:
      return len(tokenizer.encode(text, add_special_tokens=False).ids)

  return Chunking(
    max_tokens=_MAX_TOKENS.value,
    tolerance=_TOLERANCE.value,
    count_tokens=count,
    counter=counter,
    shard_chunks=_SHARD_CHUNKS.value,
  )


def _report(summary: Summary) -> None:
  for reason, count, example in summary.left_out:
    print(f"left out: {count} {reason}{f', as {example}' if example else ''}")
  rate = summary.embedded / max(summary.seconds, 1e-9)
  print(
    f"{summary.documents} documents in {summary.chunks} chunks,"
    f" {summary.bytes} bytes"
  )
  print(
    f"{summary.read} of {summary.files} files read, {summary.embedded} chunks"
    f" embedded in {summary.seconds:.1f} s, {rate:.0f} a second"
    + ("" if summary.changed else "; nothing has changed")
  )


def run() -> None:
  app.run(lambda argv: command.guarded(main, argv))


if __name__ == "__main__":
  run()
