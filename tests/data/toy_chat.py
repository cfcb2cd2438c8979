"""A tokenizer of bytes with a chat template, and messages."""

import json

from arl_jax.chat.pretrained import load_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
CHATML = (
  "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n"
  "{% endif %}"
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As ChatML, but thoughts of earlier turns are left out.
FORGETS = CHATML.replace(
  "{{ m.content }}",
  "{{ m.content if loop.last else m.content.split('|')[-1] }}",
)
# As ChatML, but answers of tools in a row are one turn of the user.
JOINS = (
  "{% for m in messages %}{% if m.role == 'tool' %}"
  "{% if loop.first or loop.previtem.role != 'tool' %}"
  "<|im_start|>user\n{% endif %}[{{ m.content }}]"
  "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
  "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters():
  """What byte-level BPE writes for each byte: printable ones stay."""
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in keep]
  return [chr(b) for b in keep] + [chr(256 + i) for i in range(len(others))]


def tokenizer(path, template=CHATML, *, eos="<|im_end|>"):
  """A token a byte, but for marks and for two line breaks in a row."""
  texts = [*MARKS, *letters(), "ĊĊ"]
  level = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    # Else a line break would never join with the one before.
    "use_regex": False,
  }
  spec = {
    "version": "1.0",
    "added_tokens": [
      {
        "id": i,
        "content": mark,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
      }
      for i, mark in enumerate(MARKS)
    ],
    "pre_tokenizer": level,
    "decoder": level,
    "model": {
      "type": "BPE",
      "vocab": {t: i for i, t in enumerate(texts)},
      "merges": [["Ċ", "Ċ"]],
    },
  }
  config = {"eos_token": eos, "chat_template": template}
  (path / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
  (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
  return load_tokenizer(path)


def system(content):
  return {"role": "system", "content": content}


def user(content):
  return {"role": "user", "content": content}


def assistant(content, **more):
  return {"role": "assistant", "content": content, **more}


def tool(content):
  return {"role": "tool", "content": content}
