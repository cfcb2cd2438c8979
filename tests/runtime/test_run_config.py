"""Every field is checked by name before anything is written."""

import dataclasses
import pathlib

import pytest

from arl_jax.rewards.search import SearchReward
from arl_jax.runtime.config import Config
from arl_jax.types import Task
from configs import context1_gpt_oss_20b

MODELS = pathlib.Path(__file__).parents[1] / "testdata" / "models"


def set_field(config, path, value):
  *owners, last = path.split(".")
  for name in owners:
    config = getattr(config, name)
  setattr(config, last, value)


def flat(config, prefix=""):
  leaves = {}
  for field in dataclasses.fields(config):
    value, name = getattr(config, field.name), f"{prefix}{field.name}"
    if dataclasses.is_dataclass(value):
      leaves |= flat(value, f"{name}.")
    else:
      leaves[name] = value
  return leaves


def test_the_default_resolves_to_itself():
  config = Config()
  config.resolve()
  assert config == Config()


# What the field can't be, with what its error must say.
@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("checkpoint_every", 0),
    ("weights.base_every", 0),
    ("weights.quota_bytes", -1),
    ("weights.dtype", "int8"),
    ("keep_checkpoints", 0),
    ("corpus.chunk_tokens", 0),
    ("corpus.vocab_size", 0),
    ("tasks.train", 0),
    ("tasks.heldout", 0),
    ("tasks.clue_words", 0),
    ("tasks.hops", -1),
    ("search.handles", 0),
    ("search.results", 0),
    ("search.snippet_tokens", 0),
    ("search.grep_limit", 0),
    ("search.max_answer", 0),
    ("search.beta", -1.0),
    ("search.final_beta", 0.0),
    ("search.beta_epochs", 0),
    ("rl.order", "sorted"),
    ("script.diligence", 1.5),
    ("agent.token_budget", 100),
    ("agent.max_turns", 0),
    ("agent.temperature", 0.0),
    ("agent.nudge_mode", "blink"),
    ("script.largest_answer", 0),
    ("script.run", 0),
    ("script.search", -1.0),
    ("model.width", 0),
    ("model.head_dim", 7),
    ("model.head_dim", 0),
    ("model.kv_heads", 3),
    ("model.experts_per_token", 9),
    ("model.expert_width", 0),
    ("model.mtp_heads", 2),
    ("engine.max_concurrent_decodes", 0),
    ("engine.decode_steps", 0),
    ("serve_mesh.tensor", 0),
    # Without actors there are no servers.
    ("serve_mesh.tensor", 2),
    ("learner.row_length", 100),
    ("learner.microbatch_tokens", 0),
    ("warm_start.episodes", 0),
    ("warm_start.steps", -1),
    ("warm_start.steps", 399),
    ("warm_start.opening_steps", -1),
    ("warm_start.opening_row_length", 0),
    ("warm_start.batch_tokens", 0),
    ("warm_start.optimizer.name", "sgd"),
    ("warm_start.optimizer.learning_rate", 0.0),
    ("warm_start.optimizer.muon_learning_rate", -1.0),
    ("rl.steps", -1),
    ("rl.tasks_per_step", 0),
    ("rl.group_size", 1),
    ("rl.substeps", 0),
    ("learner.loss", "reinforce"),
    ("rl.baseline", "median"),
    ("rl.optimizer.learning_rate", float("nan")),
    ("report_episodes", -1),
  ],
)
def test_an_impossible_value_is_named(path, value):
  config = Config()
  set_field(config, path, value)
  name = path.split(".")[0 if path.startswith("serve_mesh") else -1]
  with pytest.raises(ValueError, match=name) as error:
    config.resolve()
  assert "\n" not in str(error.value)


def test_hosts_of_a_replica_have_parts_of_one_size():
  config = Config()
  config.cluster.actors, config.cluster.server_hosts = 1, 2
  config.serve_mesh.tensor = 3
  with pytest.raises(ValueError, match=r"serve_mesh .*'tensor': 3.* 2 hosts"):
    config.resolve()
  config.serve_mesh.fsdp = -1
  config.resolve()


def test_a_replay_has_no_actors():
  config = Config(mode="train_only", replay="runs/one")
  config.cluster.actors = 1
  with pytest.raises(ValueError, match=r"cluster\.actors is 1, but with mode"):
    config.resolve()


class TestSmoke:
  def test_reduces_and_stays_valid(self):
    config = Config(smoke=True)
    config.resolve()
    whole, small = flat(Config()), flat(config)
    smaller = {k for k in whole if small[k] != whole[k]} - {"smoke"}
    assert {"tasks.train", "warm_start.steps", "rl.steps"} <= smaller
    assert all(small[k] < whole[k] for k in smaller)

  def test_keeps_what_is_smaller_already(self):
    config = Config(smoke=True)
    config.rl.steps = 1
    config.tasks.heldout = 5
    config.resolve()
    assert (config.rl.steps, config.tasks.heldout) == (1, 5)

  def test_is_the_same_when_resolved_twice(self):
    config = Config(smoke=True)
    config.resolve()
    once = dataclasses.asdict(config)
    config.resolve()
    assert dataclasses.asdict(config) == once

  def test_an_impossible_value_is_still_named(self):
    config = Config(smoke=True)
    config.rl.group_size = 0
    with pytest.raises(ValueError, match="group_size"):
      config.resolve()

  def test_no_configuration_shares_its_parts(self):
    Config(smoke=True).resolve()
    assert Config().rl.steps != 2


def test_the_published_run_is_one_that_can_be():
  """Its numbers are those of the report, or where it says none, our choice."""
  config = context1_gpt_oss_20b.get_config()
  config.checkpoint = str(MODELS / "gpt_oss")
  config.resolve()
  assert config.model.sinks
  agent, search, rl = config.agent, config.search, config.rl
  assert (agent.token_budget, agent.soft_threshold) == (32_768, 16_384)
  assert (agent.hard_threshold, agent.max_turns) == (24_326, 128)
  assert agent.nudge_mode == "vanish"
  assert (rl.tasks_per_step, rl.group_size) == (128, 8)
  assert (rl.substeps, rl.epochs, rl.max_staleness) == (4, 5, 0)
  reward = SearchReward(
    beta=search.beta,
    final_beta=search.final_beta,
    beta_epochs=search.beta_epochs,
  )
  task = Task(task_id="t", prompt="?", truth={}, provenance={"epoch": 4})
  assert (reward.beta, reward.beta_of(task)) == (4.0, 2.0)
  assert (search.grep_limit, search.max_answer) == (5, 30)
  assert config.learner.loss == "cispo"
  assert config.learner.row_length == agent.token_budget
