"""Data sets by number."""

import io
import json
import pathlib
import pickle
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given
from hypothesis import strategies as st

from arl_jax import records, types
from arl_jax.data import json_lines
from arl_jax.data.sources import SourceConfig, open_source
from tests.data.files import chat, chats, opened, texts, write

ROOT = pathlib.Path(__file__).parents[2]
CHATS = ROOT / "examples" / "data" / "chats.jsonl"


class TestConfig:
  @pytest.mark.parametrize(
    ("change", "problem"),
    [
      ({"kind": "csv"}, r"data\[0\]\.kind is 'csv', none of"),
      ({"path": ""}, r"data\[0\]\.path is ''"),
      ({"split": ""}, r"data\[0\]\.split is ''"),
      ({"field": ""}, r"data\[0\]\.field is ''"),
      ({"weight": 0.0}, r"data\[0\]\.weight is 0\.0, not > 0"),
      ({"weight": float("nan")}, r"data\[0\]\.weight is nan"),
      ({"weight": float("inf")}, r"data\[0\]\.weight is inf"),
    ],
  )
  def test_names_the_field(self, change, problem):
    with pytest.raises(ValueError, match=problem):
      SourceConfig(**{"path": "p", **change}).validate("data[0]")

  def test_is_checked_when_opened(self):
    with pytest.raises(ValueError, match=r"source\.path is ''"):
      open_source(SourceConfig())


class TestJsonl:
  def test_examples_by_number(self, tmp_path):
    # U+2028 ends a line for Python's splitlines, not for JSONL.
    path = chats(tmp_path / "a.jsonl", ["é 🙂", "a\u2028b\nc", ""])
    source = opened(path)
    assert len(source) == 3
    assert source[0] == {"messages": chat("é 🙂"), "where": f"{path}:1"}
    assert texts(source) == ["é 🙂", "a\u2028b\nc", ""]
    assert [e["where"] for e in source] == [f"{path}:{n}" for n in (1, 2, 3)]
    for index in (-1, 3):
      with pytest.raises(IndexError, match="must be 0 to 2"):
        source[index]

  def test_blank_lines_and_line_ends(self, tmp_path):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"messages": chat("x")}).encode()
    path.write_bytes(b"\n \t\n" + row + b"\r\n\r\n" + row)
    source = opened(path)
    assert texts(source) == ["x", "x"]
    assert [e["where"][-2:] for e in source] == [":3", ":5"]

  def test_field_and_tools(self, tmp_path):
    rows = [
      {"id": 7, "turns": chat("a"), "messages": 3, "tools": [{"name": "t"}]},
      {"turns": chat("b"), "tools": None},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    source = opened(path, field="turns")
    assert source[0]["messages"] == chat("a")
    assert source[0]["tools"] == [{"name": "t"}]
    assert set(source[1]) == {"messages", "where"}

  def test_folder_and_pattern(self, tmp_path):
    for name in ("b", "a", "c"):
      (tmp_path / name).mkdir()
      chats(tmp_path / name / "x.jsonl", [name])
    chats(tmp_path / "z.jsonl", ["z"])
    chats(tmp_path / "y.jsonl", ["y1", "y2"])
    (tmp_path / "notes.txt").write_text("no data")
    (tmp_path / "folder.jsonl").mkdir()
    assert texts(opened(tmp_path)) == ["y1", "y2", "z"]
    assert texts(opened(tmp_path / "*" / "x.jsonl")) == ["a", "b", "c"]
    assert texts(opened(tmp_path / "[ab]" / "*")) == ["a", "b"]
    odd = chats(tmp_path / "odd[1].jsonl", ["odd"])
    assert texts(opened(odd)) == ["odd"]

  def test_no_file(self, tmp_path):
    with pytest.raises(ValueError, match=r"absent\.jsonl doesn't exist"):
      opened(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"no file that matches \*\.jsonl"):
      opened(tmp_path)
    with pytest.raises(ValueError, match=r"no file that matches q\*"):
      opened(tmp_path / "q*")
    (tmp_path / "blank").write_text(" \n\n")
    with pytest.raises(ValueError, match="holds no example"):
      opened(tmp_path / "blank")

  @pytest.mark.parametrize(
    ("line", "problem"),
    [
      (b"{", "not JSON: .* at character 1"),
      (b'{"messages": []} {}', "not JSON: Extra data at character 17"),
      (b"[1]", r"\[1\], must be an object"),
      (b"7", "7, must be an object"),
      (b'{"messages": [], "x": NaN}', "NaN, must be a finite number"),
      (b'{"messages": [], "x": -Infinity}', "-Infinity, must be a finite"),
      (b'{"messages": [], "x": 1e999}', "1e999, must be a finite"),
      (b'{"messages": [], "x": ' + b"9" * 5000 + b"}", "not strict JSON"),
      (b'{"messages": [], "messages": []}', "the key 'messages' is there twi"),
      (b'{"messages": [{"a": 1, "a": 2}]}', "the key 'a' is there twice"),
      (b'{"messages": ["\xff"]}', "byte 15 isn't UTF-8"),
      (b'{"messages": ["\xed\xa0\x80"]}', "byte 15 isn't UTF-8"),
      (b'{"messages": ["\\ud800"]}', "half of a surrogate pair"),
      (b'\xef\xbb\xbf{"messages": []}', "not JSON"),
      (b'{"messages": ' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 levels"),
      (b"[" * 100000, "not strict JSON"),
      (b'{"chat": [], "id": 1}', "no field 'messages'; there is chat, id"),
      (b"{}", "no field 'messages'; there is none"),
      (b'{"messages": "hi"}', "'messages' is 'hi', must be a list"),
    ],
  )
  def test_a_line_at_fault(self, line, problem, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": []}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=problem) as error:
      opened(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)

  def test_as_deep_as_allowed(self, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": ' + b"[" * 63 + b"]" * 63 + b', "x": "[["}')
    assert len(opened(path)) == 1

  def test_pairs_of_surrogates_are_letters(self, tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": "🙂"}]}
    path.write_text(json.dumps(row, ensure_ascii=True))
    assert texts(opened(path)) == ["🙂"]

  @pytest.mark.parametrize("end", [b"", b"\n"])
  def test_a_line_too_long(self, end, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_CHUNK", 8)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "bcdefghijk"}' + end)
    made = json_lines.JsonLines(path, dict, max_line=19)
    assert made[0]["a"] == "bcdefghijk"
    with pytest.raises(ValueError, match=r"a\.jsonl:1: a line of more than 18"):
      json_lines.JsonLines(path, dict, max_line=18)

  @given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b""))),
    chunk=st.integers(1, 12),
  )
  def test_lines_don_t_depend_on_chunks(self, lines, chunk):
    data = b"\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(json_lines, "_CHUNK", chunk)
      got = list(json_lines._lines(io.BytesIO(data), "f", 100))
    blank = b" \t\r"
    assert [(n, line) for n, _, line in got] == [
      (n, line) for n, line in enumerate(lines, 1) if line.strip(blank)
    ]
    assert all(data[at : at + len(line)] == line for _, at, line in got)

  def test_a_file_that_changes(self, tmp_path):
    path = chats(tmp_path / "a.jsonl", ["a", "b", "c"])
    source = opened(path)
    path.write_bytes(path.read_bytes().replace(b'"b!"', b'"q!"'))
    assert texts(opened(path)) == ["a", "b", "c"]
    assert source[2]["messages"] == chat("c")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has changed since"):
      source[1]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 has changed since"):
      source[0]

  def test_digest(self, tmp_path):
    whole = opened(chats(tmp_path / "whole.jsonl", "abc"))
    (tmp_path / "parts").mkdir()
    chats(tmp_path / "parts" / "1.jsonl", "ab")
    with (tmp_path / "parts" / "1.jsonl").open("a") as file:
      file.write("\n\n")
    chats(tmp_path / "parts" / "2.jsonl", "c")
    assert opened(tmp_path / "parts").digest == whole.digest
    others = [chats(tmp_path / n, n) for n in ("abd", "ab", "acb", "abcc")]
    digests = {opened(path).digest for path in others}
    rows = [{"messages": chat(t), "other": []} for t in "abc"]
    both = write(tmp_path / "both", rows)
    digests |= {opened(both).digest, opened(both, field="other").digest}
    assert len(digests | {whole.digest}) == 7

  def test_can_be_sent_to_another_process(self, tmp_path):
    source = opened(chats(tmp_path / "a", "ab"), field="messages")
    copy = pickle.loads(pickle.dumps(source))
    assert texts(copy) == ["a", "b"]
    assert copy.digest == source.digest


def group(name, rewards):
  def segment(n):
    return types.Segment(
      ids=np.arange(n, dtype=np.int32),
      roles=np.full(n, types.Role.SAMPLED, np.uint8),
      sampled=np.ones(n, np.bool_),
      behaviour_logp=np.full(n, -0.1, np.float32),
      policy_version=np.zeros(n, np.int32),
    )

  episodes = [
    types.Episode(
      task_id=name,
      rollout_index=i,
      segments=(segment(i + 1),),
      events=(),
      stop_reason=types.StopReason.ANSWERED,
      outcome={},
      turns=1,
      reward=types.Reward(total=reward),
    )
    for i, reward in enumerate(rewards)
  ]
  task = types.Task(task_id=name, prompt="?", truth={})
  return types.Group(group_id=name, task=task, episodes=tuple(episodes))


class TestGroups:
  def test_come_back_as_they_were(self, tmp_path):
    made = [group("a", [0.0, 1.0]), group("b", [0.5])]
    path = write(tmp_path / "g.jsonl", [records.to_json(g) for g in made])
    source = opened(path, kind="groups")
    assert len(source) == 2
    assert source[1]["where"] == f"{path}:2"
    for i, one in enumerate(made):
      assert records.to_json(source[i]["group"]) == records.to_json(one)
    np.testing.assert_array_equal(source[0]["group"].rewards, [0.0, 1.0])

  def test_at_fault(self, tmp_path):
    good = records.to_json(group("a", [1.0]))
    path = tmp_path / "g.jsonl"
    for row, problem in (
      (good["task"], "schema_version"),
      (good | {"schema_version": 0}, "reads 1"),
      (records.to_json(group("a", []).task), "'Task', must be 'Group'"),
      (good | {"surplus": 1}, "malformed Group record"),
      (good | {"episodes": [{}]}, "malformed Group record"),
    ):
      write(path, [good, row])
      with pytest.raises(ValueError, match=problem) as error:
        opened(path, kind="groups")
      assert str(error.value).startswith(f"{path}:2: ")


MESSAGES = tfds.features.Sequence(
  {"role": tfds.features.Text(), "content": tfds.features.Text()}
)


def prepare(path, features, rows):
  """Makes a prepared data set; its folder."""

  class Chats(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded; looking for checksums needs importlib_resources.
    url_infos = {}  # noqa: RUF012

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      yield from enumerate(rows)

  tfds.disable_progress_bar()
  builder = Chats(data_dir=path, file_format="array_record")
  builder.download_and_prepare()
  return pathlib.Path(builder.data_dir)


class TestTfds:
  @pytest.fixture(scope="class")
  @classmethod
  def folder(cls, tmp_path_factory):
    rows = [{"id": i, "messages": chat(f"é {i}")} for i in range(10)]
    features = {"id": tfds.features.Scalar(np.int64), "messages": MESSAGES}
    return prepare(tmp_path_factory.mktemp("tfds"), features, rows)

  def test_the_same_messages(self, folder):
    source = opened(folder, kind="tfds")
    assert len(source) == 10
    # The library writes examples in an order of its own.
    assert sorted(texts(source)) == [f"é {i}" for i in range(10)]
    example = source[3]
    assert example["messages"] == chat(example["messages"][0]["content"])
    assert example["where"] == f"{folder} train example 3"
    assert "tensorflow" not in sys.modules
    with pytest.raises(IndexError, match="must be 0 to 9"):
      source[10]

  def test_splits_and_their_digests(self, folder):
    whole = opened(folder, kind="tfds")
    assert opened(folder, kind="tfds").digest == whole.digest
    head = opened(folder, kind="tfds", split="train[:40%]")
    tail = opened(folder, kind="tfds", split="train[40%:]")
    assert texts(head) + texts(tail) == texts(whole)
    assert len({whole.digest, head.digest, tail.digest}) == 3

  def test_lists_of_messages_and_flags(self, tmp_path):
    message = {
      "role": tfds.features.Text(),
      "content": tfds.features.Text(),
      "train": tfds.features.Scalar(np.bool_),
    }
    row = [
      {"role": "user", "content": "hi", "train": False},
      {"role": "assistant", "content": "", "train": True},
    ]
    folder = prepare(
      tmp_path,
      {"turns": tfds.features.Sequence(message)},
      [{"turns": row}, {"turns": []}],
    )
    source = opened(folder, kind="tfds", field="turns")
    made = sorted((source[i]["messages"] for i in range(2)), key=len)
    assert made == [[], row]
    assert type(made[1][0]["train"]) is bool

  @pytest.mark.parametrize(
    ("config", "problem"),
    [
      ({"split": "test"}, "test can't be read: .*test"),
      ({"field": "chat"}, "no field 'chat'; there is id, messages"),
    ],
  )
  def test_what_isn_t_there(self, config, problem, folder):
    with pytest.raises(ValueError, match=problem) as error:
      opened(folder, kind="tfds", **config)
    assert "\n" not in str(error.value)

  def test_a_folder_of_something_else(self, tmp_path):
    with pytest.raises(ValueError, match=r"dataset_info\.json doesn't exist"):
      opened(tmp_path, kind="tfds")

  def test_a_field_that_isn_t_messages(self, folder):
    with pytest.raises(ValueError, match="'id' is a int, must be a Sequence"):
      opened(folder, kind="tfds", field="id")

  def test_no_module_is_imported_that_a_file_names(self, folder, tmp_path):
    for name in ("dataset_info.json", "features.json"):
      text = (folder / name).read_text()
      text = text.replace("tensorflow_datasets.core.features.scalar", "this")
      (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"'pythonClassName' is 'this\.Scalar"):
      opened(tmp_path, kind="tfds")
    (tmp_path / "features.json").write_text('{"type": "this.X", "content": {}}')
    with pytest.raises(ValueError, match=r"'type' is 'this\.X'"):
      opened(tmp_path, kind="tfds")
    assert "this" not in sys.modules
