"""What the files of a published tokenizer say, in one form.

That form is tokenizer.json's, of Hugging Face; a GGUF file is brought into it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from arl_jax.chat.gguf_header import Header

_MAX_TOKENIZER = 1 << 28  # bytes
_MAX_CONFIG = 1 << 24
# Of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_ENDS = ("eos", "eot", "eom")  # Of a text, a turn, a message.

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = (
  r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_O200K = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
  r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(use_regex: bool) -> dict[str, Any]:
  return {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": use_regex,
  }


def _split(regex: str) -> list[dict[str, Any]]:
  split = {
    "type": "Split",
    "pattern": {"Regex": regex},
    "behavior": "Isolated",
    "invert": False,
  }
  return [split, _bytes(False)]


# tokenizer.ggml.pre -> normalizer, steps before BPE, and whether a whole word
# of the vocabulary is taken as it is; as in the models' own tokenizer.json.
_PRE: dict[str, tuple[str | None, list[dict[str, Any]], bool]] = {
  "gpt-2": (None, [_bytes(True)], False),
  "smollm": (
    None,
    [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    False,
  ),
  "llama-bpe": (None, _split(_WORDS % "{1,3}"), True),
  "qwen2": ("NFC", _split(_WORDS % ""), False),
  "gpt-4o": (None, _split(_O200K), True),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
  """What a folder or file says; `spec` is a tokenizer.json."""

  path: str
  spec: dict[str, Any]
  size: int
  eos_ids: tuple[int, ...]
  bos_id: int | None
  template: str | None
  special: dict[str, Any]


def folder_parts(folder: pathlib.Path) -> Parts:
  spec = _read_json(folder / "tokenizer.json", _MAX_TOKENIZER)
  if spec is None:
    raise ValueError(f"{folder}: no tokenizer.json")
  config = _read_json(folder / "tokenizer_config.json") or {}
  special: dict[str, Any] = {}
  for name, value in config.items():
    content = value.get("content") if isinstance(value, dict) else value
    if name.endswith("_token") and isinstance(content, str):
      special[name] = content
  ids = {t["content"]: t["id"] for t in _added_tokens(folder, spec)}
  # The generation's ends are those of turns; the model's only of texts.
  eos: Any = None
  bos: Any = ids.get(special.get("bos_token"))
  for name in ("generation_config.json", "config.json"):
    other = _read_json(folder / name) or {}
    eos = other.get("eos_token_id") if eos is None else eos
    # A null says that there is none, whatever a model's configuration has.
    if bos is None and "bos_token" not in config:
      bos = other.get("bos_token_id")
  if eos is None:
    eos = ids.get(special.get("eos_token"), [])
  eos_ids = eos if isinstance(eos, list) else [eos]
  for name, value in (("eos", eos_ids), ("bos", [0 if bos is None else bos])):
    if not all(type(i) is int for i in value):
      raise ValueError(
        f"{folder}: field '{name}_token_id' is {value!r:.80}, must be integers"
      )
  return Parts(
    path=str(folder),
    spec=spec,
    size=0,
    eos_ids=tuple(dict.fromkeys(eos_ids)),
    bos_id=bos,
    template=_folder_template(folder, config),
    special=special,
  )


def _folder_template(
  folder: pathlib.Path, config: Mapping[str, Any]
) -> str | None:
  text = _read_text(folder / "chat_template.jinja", _MAX_CONFIG)
  found = config.get("chat_template") if text is None else text
  if isinstance(found, list):  # Several under names.
    named = [t for t in found if isinstance(t, dict)]
    texts = {str(t.get("name")): t.get("template") for t in named}
    found = texts.get("default")
  if found is not None and not isinstance(found, str):
    raise ValueError(
      f"{folder}: field 'chat_template' is a {type(found).__name__}, must be a"
      " text"
    )
  return found


def _read_text(path: pathlib.Path, limit: int) -> str | None:
  if not path.exists():
    return None
  with path.open("rb") as file:
    data = file.read(limit + 1)
  if len(data) > limit:
    raise ValueError(f"{path}: more than {limit} bytes")
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not UTF-8: {error}") from error


def _read_json(
  path: pathlib.Path, limit: int = _MAX_CONFIG
) -> dict[str, Any] | None:
  text = _read_text(path, limit)
  if text is None:
    return None
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: a {type(value).__name__}, must be an object")
  return value


def gguf_parts(header: Header) -> Parts:
  prefix = "tokenizer.ggml"
  model = header.get(f"{prefix}.model", str)
  pre = header.get(f"{prefix}.pre", str, "absent")
  if model != "gpt2" or pre not in _PRE:
    raise ValueError(
      f"{header.path}: fields '{prefix}.model' {model!r:.40} and"
      f" '{prefix}.pre' {pre!r:.40}; the first must be 'gpt2', the second one"
      f" of {', '.join(_PRE)}"
    )
  texts = header.get(f"{prefix}.tokens", list)
  kinds = header.get(f"{prefix}.token_type", np.ndarray)
  merges = header.get(f"{prefix}.merges", list)
  if len(kinds) != len(texts) or len(set(texts)) != len(texts):
    raise ValueError(
      f"{header.path}: field '{prefix}.tokens' has {len(texts)} entries,"
      f" {len(set(texts))} different, with {len(kinds)} in token_type; must be"
      " as many"
    )
  ids = {}
  for name in ("bos", *_ENDS, "unknown", "padding"):
    field = f"{prefix}.{name}_token_id"
    if field in header.fields:
      ids[name] = header.get(field, int)
      if not 0 <= ids[name] < len(texts):
        raise ValueError(
          f"{header.path}: field {field!r} is {ids[name]}, must be 0 to"
          f" {len(texts) - 1}"
        )
  # They end turns, so they are marks even where a file calls them normal.
  kinds = kinds.copy()
  kinds[[ids[n] for n in ("bos", *_ENDS) if n in ids]] = _CONTROL
  normalizer, steps, whole_words = _PRE[pre]
  added = [
    {
      "id": i,
      "content": texts[i],
      "single_word": False,
      "lstrip": False,
      "rstrip": False,
      "normalized": False,
      "special": bool(kinds[i] != _USER),
    }
    for i in np.flatnonzero(
      np.isin(kinds, (_UNKNOWN, _CONTROL, _USER))
    ).tolist()
  ]
  spec = {
    "version": "1.0",
    "added_tokens": added,
    "normalizer": normalizer and {"type": normalizer},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    "decoder": _bytes(True),
    "model": {
      "type": "BPE",
      # Rows that only fill a model's table are nothing to encode as.
      "vocab": {t: i for i, t in enumerate(texts) if kinds[i] != _UNUSED},
      "merges": [_merge(header, text) for text in merges],
      "ignore_merges": whole_words,
    },
  }
  names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
  template = "tokenizer.chat_template"
  return Parts(
    path=header.path,
    spec=spec,
    size=len(texts),
    eos_ids=tuple(dict.fromkeys(ids[n] for n in _ENDS if n in ids)),
    bos_id=ids.get("bos"),
    template=header.get(template, str) if template in header.fields else None,
    special={f"{v}_token": texts[ids[k]] for k, v in names.items() if k in ids},
  )


def _merge(header: Header, text: str) -> tuple[str, str]:
  left, _, right = text.partition(" ")
  if not left or not right:
    raise ValueError(
      f"{header.path}: field 'tokenizer.ggml.merges' has {text!r:.80}, must be"
      " two tokens with a space between them"
    )
  return left, right


def _added_tokens(path: pathlib.Path, spec: Mapping[str, Any]) -> list[Any]:
  added = spec.get("added_tokens") or []
  for token in added if isinstance(added, list) else [added]:
    good = isinstance(token, dict) and type(token.get("id")) is int
    if not good or not isinstance(token.get("content"), str):
      raise ValueError(
        f"{path}: field 'added_tokens' has {token!r:.80}, must be a list of"
        " objects with id and content"
      )
  return added
