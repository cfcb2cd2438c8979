"""Small tokenizers with the marks of each family, made in memory."""

import functools
import pathlib

import pytest

from arl_jax.chat.messages import Tool
from arl_jax.chat.pretrained import PretrainedTokenizer, load_tokenizer
from arl_jax.chat.tokenizer_files import Parts

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "testdata" / "chat"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As published, the tags are tokens that aren't called special.
TAGS = (
  "<tool_call>",
  "</tool_call>",
  "<tool_response>",
  "</tool_response>",
  "<think>",
  "</think>",
)
HARMONY = (
  "<|endoftext|>",
  "<|return|>",
  "<|constrain|>",
  "<|channel|>",
  "<|start|>",
  "<|end|>",
  "<|message|>",
  "<|call|>",
)
_MERGES = [
  "h e",
  "l l",
  "he ll",
  "hell o",
  "Ċ Ċ",
  '" :',
  "t h",
  "th e",
  "Ġ the",
]


@functools.cache
def make(marks, *, ends, template=None):
  """A tokenizer of all bytes, a few merges and some marks."""
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in keep]
  letters = [chr(b) for b in keep] + [chr(256 + i) for i in range(len(others))]
  merges = [tuple(m.split(" ")) for m in _MERGES]
  texts = [*marks, *letters, *("".join(m) for m in merges)]
  level = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
  }
  added = [
    {
      "id": i,
      "content": mark,
      "single_word": False,
      "lstrip": False,
      "rstrip": False,
      "normalized": False,
      "special": mark.startswith("<|"),
    }
    for i, mark in enumerate(marks)
  ]
  vocab = {text: i for i, text in enumerate(texts)}
  spec = {
    "version": "1.0",
    "added_tokens": added,
    "pre_tokenizer": level,
    "decoder": level,
    "model": {"type": "BPE", "vocab": vocab, "merges": merges},
  }
  return PretrainedTokenizer(
    Parts(
      path="made here",
      spec=spec,
      size=0,
      eos_ids=tuple(vocab[end] for end in ends),
      bos_id=None,
      template=template,
      special={},
    )
  )


@pytest.fixture(scope="session")
def chatml():
  """The tags are mere text."""
  return make(CHATML, ends=("<|im_end|>", "<|endoftext|>"))


@pytest.fixture(scope="session")
def qwen():
  template = (DATA / "qwen_like.jinja").read_text("utf-8")
  ends = ("<|im_end|>", "<|endoftext|>")
  return make(CHATML + TAGS, ends=ends, template=template)


@pytest.fixture(scope="session")
def harmony():
  return make(HARMONY, ends=("<|return|>", "<|call|>", "<|endoftext|>"))


@pytest.fixture(scope="session")
def smollm2():
  if not SMOLLM2.exists():
    pytest.skip("no models/; `make models` fetches them")
  return load_tokenizer(SMOLLM2)


@pytest.fixture(scope="session")
def make_tokenizer():
  return make


@pytest.fixture(scope="session")
def tools():
  look = Tool(
    name="look",
    description="Looks at a place.",
    parameters={
      "type": "object",
      "properties": {
        "at": {"type": "string", "description": "The place."},
        "how": {"type": "string", "enum": ["near", "far"], "default": "near"},
      },
      "required": ["at"],
    },
  )
  return (look, Tool(name="wait"))
