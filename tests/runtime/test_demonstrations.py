"""Demonstrations in files are what a warm start shows, or are refused."""

import asyncio
import copy
import dataclasses

import pytest

from arl_jax.actors.jobs import Interrupted
from arl_jax.problems.search import SearchProblem
from arl_jax.runtime import demonstrations, recorded_groups, warm_start
from arl_jax.runtime.config import Config
from tests import made_up_corpus

EPISODES = 70  # Two files.


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp("corpus")
  made_up_corpus.write(path)
  config = Config()
  config.corpus.path = str(path)
  config.corpus.vocab_size, config.corpus.chunk_tokens = 800, 24
  config.tasks.train, config.tasks.heldout, config.tasks.clue_words = 24, 6, 2
  config.warm_start.episodes = EPISODES
  return config


@pytest.fixture(scope="module")
def problem(config):
  return SearchProblem(config)


def record(
  out, config, problem, *, teacher="script", stop=lambda: False, seeds=None
):
  """What a folder holds, and the seeds of the episodes that were played."""
  played = [] if seeds is None else seeds

  def client_of(job):
    played.append(job.seed)
    return problem.demonstrator(job.task, job.seed)

  return asyncio.run(
    demonstrations.record(
      out,
      warm_start.jobs(config, problem),
      problem,
      client_of,
      config,
      made_from={"teacher": teacher},
      concurrency=4,
      on_done=lambda done: None,
      should_stop=stop,
    )
  )


def shown(config, problem, folder="", **fields):
  config = copy.deepcopy(config)
  config.warm_start.demonstrations = str(folder)
  for name, value in fields.items():
    setattr(config.warm_start, name, value)
  return warm_start.play(
    config, problem, on_done=lambda done: None, should_stop=lambda: False
  )


def ids(episodes):
  return [[s.ids.tolist() for s in e.segments] for e in episodes]


@pytest.fixture(scope="module")
def recorded(config, problem, tmp_path_factory):
  out = tmp_path_factory.mktemp("shown") / "out"
  record(out, config, problem)
  return out


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_recorded_is_shown(config, problem, recorded, kept):
  played = shown(config, problem, filter=kept)
  again = shown(config, problem, recorded, filter=kept)
  assert ids(again) == ids(played)
  assert [e.reward for e in again] == [e.reward for e in played]
  assert (len(again) == EPISODES) != kept
  assert len(list((recorded / "groups").iterdir())) == 2


def test_a_recording_that_was_stopped_goes_on(
  config, problem, recorded, tmp_path
):
  seeds = []
  with pytest.raises(Interrupted):
    record(
      tmp_path / "out",
      config,
      problem,
      stop=lambda: len(seeds) >= 66,
      seeds=seeds,
    )
  assert [p.name for p in (tmp_path / "out/groups").iterdir()] == [
    "000001.jsonl"
  ]
  rest = []
  groups = record(tmp_path / "out", config, problem, seeds=rest)
  assert len(groups) == EPISODES
  assert len(rest) == EPISODES - 64
  for name in ("000001.jsonl", "000002.jsonl"):
    whole = (recorded / "groups" / name).read_bytes()
    assert (tmp_path / "out/groups" / name).read_bytes() == whole


def test_a_folder_of_something_else_is_left_alone(
  config, problem, recorded, tmp_path
):
  with pytest.raises(ValueError, match="made with another teacher; go on"):
    record(recorded, config, problem, teacher="other")
  fewer = copy.deepcopy(config)
  fewer.warm_start.episodes, fewer.agent.max_turns = 3, 2
  with pytest.raises(ValueError, match="another agent, episodes; go on"):
    record(recorded, fewer, problem)
  (tmp_path / "notes.txt").write_text("mine")
  with pytest.raises(ValueError, match="holds something else"):
    record(tmp_path, config, problem)
  assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
  (tmp_path / "cut").mkdir()
  (tmp_path / "cut/demonstrations.json").write_text('{"teach')
  with pytest.raises(ValueError, match=r"demonstrations\.json is damaged"):
    record(tmp_path / "cut", config, problem)


def test_a_teacher_that_always_fails_is_no_teacher(
  config, problem, tmp_path, caplog
):
  class Absent:
    async def sample(self, *_, **__):
      raise ConnectionError("nobody there")

    async def close(self, session):
      pass

  with pytest.raises(ValueError, match="all of the 64 episodes failed"):
    asyncio.run(
      demonstrations.record(
        tmp_path / "out",
        warm_start.jobs(config, problem),
        problem,
        lambda job: Absent(),
        config,
        made_from={},
        concurrency=4,
        on_done=lambda done: None,
        should_stop=lambda: False,
      )
    )
  assert "nobody there" in caplog.text


def changed(groups, **fields):
  """The same, with another first segment."""
  (episode,) = groups[0].episodes
  first = dataclasses.replace(episode.segments[0], **fields)
  episode = dataclasses.replace(
    episode, segments=(first, *episode.segments[1:])
  )
  return [dataclasses.replace(groups[0], episodes=(episode,)), *groups[1:]]


def heldout(problem, groups):
  (episode,) = groups[0].episodes
  task = problem.heldout[0]
  episode = dataclasses.replace(episode, task_id=task.task_id)
  return [
    dataclasses.replace(groups[0], task=task, episodes=(episode,)),
    *groups[1:],
  ]


def test_what_cannot_be_shown_is_refused(config, problem, recorded, tmp_path):
  groups = demonstrations.read(
    dataclasses.replace(
      config,
      warm_start=dataclasses.replace(
        config.warm_start, demonstrations=str(recorded)
      ),
    ),
    problem,
  )
  first = groups[0].episodes[0].segments[0]
  other = first.ids.copy()
  other[1] += 1
  unknown = first.ids.copy()
  unknown[-1] = 800
  for name, some, reason in (
    ("heldout", heldout(problem, groups), "which is held out"),
    ("prompt", changed(groups, ids=other), "another tokenizer, other tools"),
    ("unknown", changed(groups, ids=unknown), "the id 800; the tokenizer has"),
    ("nothing", [], "whose files hold no episode"),
  ):
    recorded_groups.write(tmp_path / name, 1, some)
    with pytest.raises(ValueError, match=reason):
      shown(config, problem, tmp_path / name)
  with pytest.raises(ValueError, match="holds no recorded groups"):
    shown(config, problem, tmp_path / "none")
  recorded_groups.write(tmp_path / "cut", 1, groups[:2])
  file = tmp_path / "cut/groups/000001.jsonl"
  file.write_bytes(file.read_bytes()[:-50])
  with pytest.raises(ValueError, match="holds what is no group"):
    shown(config, problem, tmp_path / "cut")
  short = copy.deepcopy(config)
  longest = max(len(s) for g in groups for e in g.episodes for s in e.segments)
  short.learner.row_length = longest - 1
  with pytest.raises(ValueError, match=f"a segment of {longest} tokens"):
    shown(short, problem, recorded)
