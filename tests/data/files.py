"""Data sets as files."""

import json

from arl_jax.data.sources import SourceConfig, open_source


def chat(text):
  return [
    {"role": "user", "content": text},
    {"role": "assistant", "content": f"{text}!"},
  ]


def write(path, rows, end="\n"):
  lines = (json.dumps(row, ensure_ascii=False) + end for row in rows)
  path.write_bytes("".join(lines).encode())
  return path


def chats(path, texts):
  return write(path, [{"messages": chat(t)} for t in texts])


def opened(path, **config):
  return open_source(SourceConfig(path=str(path), **config))


def texts(source):
  return [source[i]["messages"][0]["content"] for i in range(len(source))]
