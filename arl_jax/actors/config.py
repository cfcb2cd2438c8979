"""The part of a run's configuration that actors read. Imports no jax."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from arl_jax.agents.harness import AgentConfig
from arl_jax.agents.scripted import ScriptConfig
from arl_jax.cluster.config import ClusterConfig
from arl_jax.problems.search_config import (
  CorpusConfig,
  SearchConfig,
  TaskConfig,
)

if typing.TYPE_CHECKING:
  from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def _make(cls, **values):
  return dataclasses.field(default_factory=lambda: cls(**values))


@dataclasses.dataclass(kw_only=True, slots=True)
class ActorConfig:
  """What a process that runs episodes is made from.

  Attributes:
    seed: of tasks, parameters, demonstrations and rollouts.
    problem: "package.module:name" of what makes the `Problem` from this
      configuration, in every process of the run.
    tokenizer: of a published model, a folder or a .gguf file; its chat format
      is what agents speak. Empty trains a small one on the corpus.
    corpus: what is searched.
    tasks: made from it.
    search: the environment and its reward.
    agent: budgets of an episode.
    script: who plays the demonstrations.
    cluster: processes of the run, and where they find each other.
  """

  seed: int = 0
  problem: str = "arl_jax.problems.search:SearchProblem"
  tokenizer: str = ""
  corpus: CorpusConfig = _make(CorpusConfig)
  tasks: TaskConfig = _make(TaskConfig)
  search: SearchConfig = _make(SearchConfig)
  agent: AgentConfig = _make(AgentConfig)
  script: ScriptConfig = _make(ScriptConfig)
  cluster: ClusterConfig = _make(ClusterConfig)


def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
  """A configuration from what `dataclasses.asdict` made of it.

  Fields of `data` that `cls` doesn't have are left out, so that a whole run's
  configuration gives an `ActorConfig`.

  Raises:
    ValueError: a field is missing.
  """
  hints = typing.get_type_hints(cls)
  values = {}
  for field in dataclasses.fields(cls):
    if field.name not in data:
      raise ValueError(f"the configuration lacks {cls.__name__}.{field.name}")
    values[field.name] = _value(hints[field.name], data[field.name])
  return cls(**values)


def _value(hint: Any, value: Any) -> Any:
  if isinstance(hint, types.UnionType):
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    return value if value is None else _value(options[0], value)
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return from_json(hint, value)
  if isinstance(value, list):
    (inner, *_) = (*typing.get_args(hint), Any)
    items = [_value(inner, item) for item in value]
    return items if typing.get_origin(hint) is list else tuple(items)
  return value
