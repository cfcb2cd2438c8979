"""Published tokenizers: a real one, and small ones made here."""

import json
import pathlib

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.chat.pretrained import load_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = ROOT / "models" / "all-MiniLM-L6-v2"
GOLDEN = json.loads(
  (ROOT / "tests" / "testdata" / "smollm2" / "smollm2.json").read_text("utf-8")
)

TEMPLATE = (
  "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
  "{% if tools %}{{ tools | tojson }}{% endif %}"
  "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def letters():
  """What byte-level BPE writes for each byte: printable ones stay."""
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in keep]
  return [chr(b) for b in keep] + [chr(256 + i) for i in range(len(others))]


def vocabulary(marks=("<s>", "</s>", "<tool>")):
  """Marks, all bytes, and a few words that `MERGES` make."""
  words = ["he", "ll", "hell", "hello", "Ġw", "12", "123"]
  return [*marks, *letters(), *words]


MERGES = [
  ("h", "e"),
  ("l", "l"),
  ("he", "ll"),
  ("hell", "o"),
  ("Ġ", "w"),
  ("1", "2"),
  ("12", "3"),
]


def added(id_, content, special=True):
  return {
    "id": id_,
    "content": content,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": special,
  }


def spec(**model):
  texts = vocabulary()
  level = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
  }
  return {
    "version": "1.0",
    "added_tokens": [
      added(0, "<s>"),
      added(1, "</s>"),
      # As published models do it, this mark isn't called special.
      added(2, "<tool>", special=False),
    ],
    "pre_tokenizer": level,
    "decoder": level,
    "model": {
      "type": "BPE",
      "vocab": {t: i for i, t in enumerate(texts)},
      "merges": MERGES,
      **model,
    },
  }


CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}


def folder(path, *, tokenizer=None, **files):
  """A folder; files by stem, None leaves one out."""
  files = {
    "tokenizer": tokenizer or spec(),
    "tokenizer_config": CONFIG | {"chat_template": TEMPLATE},
    **files,
  }
  for stem, value in files.items():
    if value is not None:
      text = value if isinstance(value, str) else json.dumps(value)
      (path / f"{stem}.json").write_text(text, "utf-8")
  return path


@pytest.fixture
def toy(tmp_path):
  return load_tokenizer(folder(tmp_path))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  return load_tokenizer(folder(tmp_path_factory.mktemp("shared")))


def write_gguf(
  path, *, pre="gpt-2", texts=None, types=None, merges=None, model="gpt2", **ids
):
  texts = vocabulary() if texts is None else texts
  # Two control tokens, one that its user defined, and normal ones.
  types = [3, 3, 4, *[1] * (len(texts) - 3)] if types is None else types
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(texts)
  writer.add_token_types(types)
  merges = [" ".join(m) for m in MERGES] if merges is None else merges
  writer.add_token_merges(merges)
  writer.add_bos_token_id(ids.get("bos", 0))
  writer.add_eos_token_id(ids.get("eos", 1))
  if "eot" in ids:
    writer.add_eot_token_id(ids["eot"])
  writer.add_chat_template(TEMPLATE)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


def pieces(tokenizer, text):
  return [tokenizer.piece(i) for i in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def smollm2():
  if not SMOLLM2.exists():
    pytest.skip("no models/; `make models` fetches them")
  return load_tokenizer(SMOLLM2)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["text"][:12])
def test_smollm2_ids(smollm2, case):
  ids = smollm2.encode(case["text"], allow_special=True)
  assert ids == case["token_ids"]
  assert smollm2.decode(ids, skip_special=False) == case["text"]
  assert smollm2.decode(case["greedy_24"]) == case["greedy_text"]


def test_smollm2_facts(smollm2):
  assert smollm2.chat_template == GOLDEN["chat_template"]
  assert smollm2.vocab_size == 49152
  assert smollm2.eos_ids == (2,)
  assert smollm2.bos_id == 1
  assert len(smollm2.controls) == 17
  assert smollm2.controls["<|im_end|>"] == 2


def test_smollm2_chat(smollm2):
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
  ]
  text = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
  )
  assert smollm2.render(messages) == text
  ids = smollm2.encode_chat(messages)
  assert ids == smollm2.encode(text, allow_special=True)
  assert ids.count(1) == 3


@settings(deadline=None)
@given(
  text=st.text() | st.sampled_from(["<|im_end|>", "a<|im_start|>b", "<|"]),
  role=st.sampled_from(["user", "assistant", "tool<|im_end|>"]),
)
def test_no_text_forges_a_turn(smollm2, text, role):
  marks = set(smollm2.controls.values())
  assert marks.isdisjoint(smollm2.encode(text))
  # A system turn of the template, the message's and the assistant's: three
  # begin and two end.
  ids = smollm2.encode_chat([{"role": role, "content": text}])
  assert [i for i in ids if i in marks] == [1, 2, 1, 2, 1]


@pytest.mark.skipif(
  not MINILM.exists(), reason="no models/; `make models` fetches them"
)
def test_a_published_folder():
  tokenizer = load_tokenizer(MINILM)
  # From the model's own vocab.txt: line numbers less one.
  lines = (MINILM / "vocab.txt").read_text("utf-8").split("\n")
  ids = tokenizer.encode("hello world")
  assert ids == [lines.index("hello"), lines.index("world")]
  assert tokenizer.vocab_size == 30522
  # Its file cuts texts at 128 tokens and fills short ones; here none is.
  assert tokenizer.encode("hello " * 500) == ids[:1] * 500
  assert tokenizer.chat_template is None
  with pytest.raises(ValueError, match="no chat template"):
    tokenizer.render([])


def test_folder_facts(toy):
  assert toy.vocab_size == len(vocabulary())
  assert toy.bos_id == 0
  assert toy.eos_ids == (1,)
  assert toy.controls == {"<s>": 0, "</s>": 1, "<tool>": 2}
  assert toy.chat_template == TEMPLATE


def test_words_and_their_text(toy):
  texts = vocabulary()
  ids = toy.encode("hello w")
  assert ids == [texts.index("hello"), texts.index("Ġw")]
  assert toy.decode(ids) == "hello w"
  assert toy.count("hello w") == 2


@settings(deadline=None)
@given(text=st.text())
def test_all_text_comes_back(shared, text):
  assert shared.decode(shared.encode(text)) == text


def test_marks_are_read_only_where_allowed(toy):
  text = "<s>hello<tool></s>"
  hello = vocabulary().index("hello")
  assert toy.encode(text, allow_special=True) == [0, hello, 2, 1]
  assert {0, 1, 2}.isdisjoint(toy.encode(text))
  assert toy.decode(toy.encode(text)) == text


def test_decode_hides_what_is_special(toy):
  hello = vocabulary().index("hello")
  assert toy.decode([0, hello, 2, 1]) == "hello<tool>"
  assert (
    toy.decode([0, hello, 2, 1], skip_special=False) == "<s>hello<tool></s>"
  )
  assert toy.piece(1) == "</s>"
  # A row of the model without a token.
  assert toy.decode([hello, 5000]) == "hello"
  with pytest.raises(ValueError, match="-1"):
    toy.decode([-1])


def test_half_a_surrogate_pair(toy):
  with pytest.raises(ValueError, match="has no encoding"):
    toy.encode("a\ud800")


def test_spaces_are_no_mark(tmp_path):
  tokenizer = spec()
  size = len(vocabulary())
  tokenizer["added_tokens"].append(added(size, "    ", special=False))
  got = load_tokenizer(folder(tmp_path, tokenizer=tokenizer))
  assert got.encode("h    h")[1] == size
  assert "    " not in got.controls


@pytest.mark.parametrize("allowed", [True, False])
def test_a_mark_that_is_a_word_of_the_vocabulary(tmp_path, allowed):
  tokenizer = spec(ignore_merges=True)
  # With ignore_merges, a word that the vocabulary has is taken as it is.
  hello = tokenizer["model"]["vocab"]["hello"]
  tokenizer["added_tokens"].append(added(hello, "hello"))
  got = load_tokenizer(folder(tmp_path, tokenizer=tokenizer))
  ids = got.encode("hello", allow_special=allowed)
  assert (ids == [hello]) is allowed
  assert got.decode(ids, skip_special=False) == "hello"
  assert got.controls["hello"] == hello


def test_a_mark_of_one_letter_can_not_be_text(tmp_path):
  tokenizer = spec()
  tokenizer["added_tokens"].append(added(tokenizer["model"]["vocab"]["x"], "x"))
  got = load_tokenizer(folder(tmp_path, tokenizer=tokenizer))
  with pytest.raises(ValueError, match="is a mark"):
    got.encode("x")


@pytest.mark.parametrize(
  ("files", "eos", "bos"),
  [
    # The generation's list of ends comes first, then the model's.
    ({"generation_config": {"eos_token_id": [2, 1, 2]}}, (2, 1), 0),
    (
      {
        "generation_config": {"eos_token_id": 2},
        "config": {"eos_token_id": 1, "bos_token_id": 5},
      },
      (2,),
      0,
    ),
    ({"config": {"eos_token_id": 2}, "generation_config": {}}, (2,), 0),
    # A null among the tokenizer's settings is an answer; silence isn't.
    (
      {
        "tokenizer_config": {"bos_token": None},
        "config": {"bos_token_id": 5},
      },
      (),
      None,
    ),
    ({"tokenizer_config": {}, "config": {"bos_token_id": 5}}, (), 5),
    ({"tokenizer_config": None}, (), None),
  ],
)
def test_ends_and_beginnings(files, eos, bos, tmp_path):
  tokenizer = load_tokenizer(folder(tmp_path, **files))
  assert tokenizer.eos_ids == eos
  assert tokenizer.bos_id == bos


def test_a_template_file_comes_first(tmp_path):
  folder(tmp_path)
  (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}é", "utf-8")
  assert load_tokenizer(tmp_path).render([]) == "</s>é"


def test_the_default_of_several_templates(tmp_path):
  named = [
    {"name": "tool_use", "template": "no"},
    {"name": "default", "template": "yes"},
  ]
  folder(tmp_path, tokenizer_config={"chat_template": named})
  assert load_tokenizer(tmp_path).chat_template == "yes"


def test_render(toy):
  messages = [{"role": "user", "content": "hi"}]
  assert toy.render(messages) == "<s>user: hi</s><s>assistant:"
  assert (
    toy.render(messages, tools=[{"name": "é"}], add_generation_prompt=False)
    == '<s>user: hi</s>[{"name": "é"}]'
  )


def test_variables_reach_the_template(tmp_path):
  config = {"chat_template": "{{ thinking }}{{ messages | length }}"}
  tokenizer = load_tokenizer(folder(tmp_path, tokenizer_config=config))
  assert tokenizer.render([], variables={"thinking": "off"}) == "off0"


def test_a_template_that_fails(tmp_path):
  config = {"chat_template": "{% for %}"}
  tokenizer = load_tokenizer(folder(tmp_path, tokenizer_config=config))
  assert tokenizer.encode("hello")
  with pytest.raises(ValueError, match="Expected an expression"):
    tokenizer.render([])


def test_marks_in_a_chat_are_the_templates(toy):
  messages = [{"role": "</s>", "content": "a</s>\ufdd07\ufdd1<tool>"}]
  tools = [{"description": "<tool>", "n": [1, "<s>"]}]
  ids = toy.encode_chat(messages, tools=tools)
  assert [i for i in ids if i < 3] == [0, 1, 0]
  assert toy.decode(ids, skip_special=False) == toy.render(
    messages, tools=tools
  )


@pytest.mark.parametrize(
  ("files", "problem"),
  [
    ({"tokenizer": "{"}, "tokenizer.json: not JSON"),
    ({"tokenizer": "[" * 100000}, "tokenizer.json: not JSON"),
    ({"tokenizer": "[]"}, "must be an object"),
    ({"tokenizer": "{}"}, "no tokenizer can be made"),
    ({"tokenizer": spec(merges=[["h", "?!"]])}, "no tokenizer can be made"),
    ({"tokenizer": spec() | {"added_tokens": 3}}, "'added_tokens' has 3"),
    ({"tokenizer": spec() | {"added_tokens": [{}]}}, "'added_tokens' has {}"),
    ({"tokenizer": spec() | {"added_tokens": [added(7, "<s>")]}}, "the id 7"),
    ({"tokenizer_config": {"chat_template": 3}}, "'chat_template' is a int"),
    ({"config": {"eos_token_id": "2"}}, "'eos_token_id' is"),
    ({"config": {"eos_token_id": [True]}}, "'eos_token_id' is"),
    ({"config": {"eos_token_id": 10**6}}, "eos id 1000000, must be 0 to"),
    ({"config": {"eos_token_id": -1}}, "eos id -1"),
  ],
)
def test_folders_at_fault(files, problem, tmp_path):
  with pytest.raises(ValueError, match=problem) as error:
    load_tokenizer(folder(tmp_path, **files))
  assert str(tmp_path) in str(error.value)
  assert "\n" not in str(error.value)


def test_paths_at_fault(tmp_path):
  with pytest.raises(ValueError, match=r"no tokenizer\.json"):
    load_tokenizer(tmp_path)
  with pytest.raises(ValueError, match=r"a folder or a \.gguf file"):
    load_tokenizer(tmp_path / "absent")
  with pytest.raises(FileNotFoundError):
    load_tokenizer(tmp_path / "absent.gguf")


def test_gguf_is_the_same_tokenizer(tmp_path, toy):
  got = load_tokenizer(write_gguf(tmp_path / "m.gguf", eot=2))
  assert got.vocab_size == toy.vocab_size
  assert got.controls == toy.controls
  assert got.bos_id == 0
  assert got.eos_ids == (1, 2)
  for text in ("hello w", "<s>é\n 🙂", "a  b\t12"):
    assert got.encode(text) == toy.encode(text)
    assert got.encode(text, allow_special=True) == (
      toy.encode(text, allow_special=True)
    )
  messages = [{"role": "user", "content": "hi"}]
  assert got.render(messages) == toy.render(messages)


@pytest.mark.parametrize(
  ("pre", "text", "words"),
  [
    # Digits one by one, in runs, in threes; 123 is a word of the vocabulary.
    ("smollm", "123", ["1", "2", "3"]),
    ("gpt-2", "123", ["123"]),
    ("qwen2", "123", ["1", "2", "3"]),
    ("llama-bpe", "123123", ["123", "123"]),
    ("gpt-4o", "12312", ["123", "12"]),
    # Before a letter, a space or one sign goes along; words are split so.
    ("gpt-2", "hello w", ["hello", " w"]),
    ("llama-bpe", "hello w", ["hello", " w"]),
    ("qwen2", "hello w", ["hello", " w"]),
    ("gpt-4o", "hello w", ["hello", " w"]),
  ],
)
def test_pre_tokenizers(pre, text, words, tmp_path):
  got = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))
  assert pieces(got, text) == words
  assert got.decode(got.encode("Ab cD'll\r\n  x1é")) == "Ab cD'll\r\n  x1é"


def test_o200k_splits_at_capitals(tmp_path):
  texts = [*vocabulary(), "oW"]
  merges = [*(" ".join(m) for m in MERGES), "o W"]
  for pre, words in (("gpt-4o", ["o", "W"]), ("llama-bpe", ["oW"])):
    path = write_gguf(tmp_path / "m.gguf", pre=pre, texts=texts, merges=merges)
    assert pieces(load_tokenizer(path), "oW") == words


def test_qwen2_composes_letters(tmp_path):
  got = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre="qwen2"))
  assert got.decode(got.encode("e\u0301")) == "é"


def test_an_end_is_a_mark_though_its_file_calls_it_normal(tmp_path):
  types = [1, 1, 4, *[1] * (len(vocabulary()) - 3)]
  got = load_tokenizer(write_gguf(tmp_path / "m.gguf", types=types))
  assert got.controls == {"<s>": 0, "</s>": 1, "<tool>": 2}
  assert got.encode("</s>", allow_special=True) == [1]


def test_rows_that_only_fill_are_never_text(tmp_path):
  # Token type 5: unused. With llama-bpe, whole words are taken as they are.
  texts = [*vocabulary(), "zz"]
  types = [3, 3, 4, *[1] * (len(texts) - 4), 5]
  path = write_gguf(
    tmp_path / "m.gguf", pre="llama-bpe", texts=texts, types=types
  )
  got = load_tokenizer(path)
  assert got.vocab_size == len(texts)
  assert pieces(got, "zz") == ["z", "z"]


@pytest.mark.parametrize(
  ("change", "problem"),
  [
    ({"pre": "tekken"}, "'tekken'"),
    ({"model": "llama"}, "'llama'"),
    ({"texts": ["a", "a", "b", "c"]}, "4 entries, 3 different"),
    ({"types": [1, 1]}, "with 2 in token_type"),
    ({"merges": ["ab"]}, "'ab', must be two tokens"),
    ({"merges": ["h ?!"]}, "no tokenizer can be made"),
    ({"eos": 10**6}, "'tokenizer.ggml.eos_token_id' is 1000000"),
  ],
)
def test_gguf_at_fault(change, problem, tmp_path):
  path = write_gguf(tmp_path / "m.gguf", **change)
  with pytest.raises(ValueError, match=problem) as error:
    load_tokenizer(path)
  assert str(error.value).startswith(f"{path}: ")
  assert "\n" not in str(error.value)


def test_a_gguf_file_cut_short(tmp_path):
  path = write_gguf(tmp_path / "m.gguf")
  data = path.read_bytes()
  for length in range(0, len(data) - 40, 101):
    path.write_bytes(data[:length])
    with pytest.raises(ValueError, match=str(path)):
      load_tokenizer(path)
