"""Tasks come back from a file as they went in, or not at all."""

import json

import pytest

from arl_jax.data.task_file import read_tasks, write_tasks
from arl_jax.records import to_json
from arl_jax.types import Episode, StopReason, Task
from tests.data.synthesis import linked_corpus


def task(name="t", split="train", **truth):
  return Task(
    task_id=name,
    prompt="Which town is it?",
    split=split,
    truth={
      "answer": "Kirkwall",
      "relevant": ["a_0", "b_0", "c_0"],
      "facts": [["a_0"], ["b_0", "c_0"]],
      "answer_chunks": ["a_0"],
      "distractors": ["e_0"],
      **truth,
    },
    provenance={"source": "docs_1", "ranks": [1, None]},
  )


def test_reads_what_was_written(tmp_path):
  tasks = [task("a"), task("b", "heldout"), task("c")]
  write_tasks(tmp_path / "tasks.jsonl", tasks)
  found = read_tasks(tmp_path / "tasks.jsonl")
  assert found.train == (tasks[0], tasks[2])
  assert found.heldout == (tasks[1],)
  # A folder's files are one.
  write_tasks(tmp_path / "u.jsonl", [task("d")])
  whole = read_tasks(tmp_path)
  assert [t.task_id for t in whole.train] == ["a", "c", "d"]
  assert whole.digest != found.digest


def changed(**fields):
  return json.dumps({**to_json(task()), **fields}).encode()


EPISODE = to_json(
  Episode(
    task_id="t",
    rollout_index=0,
    segments=(),
    events=(),
    stop_reason=StopReason.ANSWERED,
    outcome={},
    turns=0,
  )
)
TRUTH = dict(task().truth)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"not JSON", "not JSON"),
    (b"[]", "must be an object"),
    (b"\xff", "isn't UTF-8"),
    (b"{" + b'"a": {' * 100, "JSON"),
    (changed()[:-1] + b', "split": "train"}', "is there twice"),
    (b"x" * ((1 << 20) + 1), "a line of more than 1048576 bytes"),
    (json.dumps(EPISODE).encode(), "kind is 'Episode', not 'Task'"),
    (changed(schema_version=2), "schema_version 2"),
    (changed(more=1), "malformed Task"),
    (changed(task_id=""), "task_id is ''"),
    (changed(task_id=7), "task_id is 7"),
    (changed(task_id="x" * 1025), "not a text of 1 to 1024"),
    (changed(prompt=None), "prompt is None"),
    (changed(prompt="x" * 65537), "not a text of 1 to 65536"),
    (changed(split="test"), "split is 'test'"),
    (changed(truth=[]), "truth is \\[\\], not an object"),
    (changed(provenance=3), "provenance is 3"),
    (changed(truth={}), "truth.relevant is None, not a list"),
    (changed(truth={**TRUTH, "relevant": []}), "truth.relevant is empty"),
    (changed(truth={**TRUTH, "relevant": [3]}), "an id in truth.relevant is 3"),
    (changed(truth={**TRUTH, "answer_chunks": ["z"]}), "'z', which isn't rel"),
    (changed(truth={**TRUTH, "facts": 3}), "truth.facts is 3"),
    (changed(truth={**TRUTH, "facts": [["z"]]}), "truth.facts\\[0\\] is"),
    (changed(truth={**TRUTH, "facts": [[]]}), "truth.facts\\[0\\] is"),
    (changed(truth={**TRUTH, "distractors": ["a_0"]}), "'a_0', which is rel"),
    (changed(truth={**TRUTH, "relevant": ["a"] * 4097}), "not a list of chunk"),
    (json.dumps(to_json(task("first"))).encode(), "'first', which is there tw"),
  ],
)
def test_refuses_a_line_by_its_number(tmp_path, line, message):
  path = tmp_path / "tasks.jsonl"
  good = json.dumps(to_json(task("first"))).encode()
  path.write_bytes(good + b"\n\n" + line + b"\n")
  with pytest.raises(ValueError, match=message) as error:
    read_tasks(path)
  # The blank line counts.
  assert f"{path}:3" in str(error.value)
  assert len(str(error.value)) < 500 + len(str(path))


def test_refuses_a_file_without_tasks(tmp_path):
  with pytest.raises(ValueError, match="doesn't exist"):
    read_tasks(tmp_path / "none.jsonl")
  (tmp_path / "empty.jsonl").write_bytes(b"\n")
  with pytest.raises(ValueError, match="holds no example"):
    read_tasks(tmp_path / "empty.jsonl")


def test_tasks_of_another_corpus_are_seen(tmp_path):
  corpus = linked_corpus.town_index().corpus
  write_tasks(tmp_path / "t.jsonl", [task()])
  read_tasks(tmp_path / "t.jsonl").check(corpus)
  write_tasks(tmp_path / "t.jsonl", [task(distractors=["e_7"])])
  with pytest.raises(ValueError, match="task t has 'e_7' in its distractors"):
    read_tasks(tmp_path / "t.jsonl").check(corpus)


def test_a_failed_write_leaves_what_was_there(tmp_path):
  path = tmp_path / "t.jsonl"
  write_tasks(path, [task("old")])

  def broken():
    yield task("new")
    raise RuntimeError("killed")

  with pytest.raises(RuntimeError):
    write_tasks(path, broken())
  assert [t.task_id for t in read_tasks(path).train] == ["old"]
  assert list(tmp_path.iterdir()) == [path]
