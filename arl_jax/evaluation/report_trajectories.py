"""Whole trajectories as HTML: who wrote each token, and what was pruned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from arl_jax.evaluation.report_text import escape, number
from arl_jax.types import Episode, Role, Segment, Task

_CLASSES = {
  Role.PROMPT: "prompt",
  Role.SAMPLED: "sampled",
  Role.TOOL: "tool",
  Role.FORCED: "forced",
}
_LEGEND = (
  ("prompt", "prompt"),
  ("sampled", "sampled here (trained)"),
  ("sampled carried", "sampled, carried over or not trained"),
  ("tool", "tool"),
  ("forced", "written by the harness"),
  ("tool pruned", "pruned later"),
)


def trajectories(
  episodes: Sequence[tuple[str, Task, Episode]], decode: Callable[[int], str]
) -> str:
  """Each episode with its label; "" without any."""
  if not episodes:
    return ""
  legend = "".join(
    f'<span class="{classes}">{text}</span>' for classes, text in _LEGEND
  )
  shown = (_trajectory(*labelled, decode) for labelled in episodes)
  return f'<div class="legend">{legend}</div>' + "\n".join(shown)


def _trajectory(
  label: str, task: Task, episode: Episode, decode: Callable[[int], str]
) -> str:
  reward = "not scored"
  if episode.reward is not None:
    parts = ", ".join(
      f"{name} {number(value)}" for name, value in episode.reward.parts.items()
    )
    reward = f"reward {number(episode.reward.total)}"
    reward += f" ({parts})" if parts else ""
  facts = [
    label,
    f"rollout {episode.rollout_index}",
    f"stopped: {episode.stop_reason.value}",
    f"{episode.turns} turns",
    reward,
  ]
  if pruned := episode.outcome.get("pruned"):
    facts.append(f"pruned: {', '.join(map(str, pruned))}")
  removed = _removed(episode)
  segments = "\n".join(
    _segment(i, episode.segments[i], removed[i], decode)
    for i in _tree_order(episode.segments)
  )
  return (
    f'<div class="episode"><h3>{escape(task.task_id)}: {escape(task.prompt)}'
    f'</h3><div class="meta">{escape(" · ".join(facts))}</div>\n{segments}'
    "</div>"
  )


def _tree_order(segments: Sequence[Segment]) -> list[int]:
  """Indices depth first: each segment before what grew out of it."""
  children: dict[int | None, list[int]] = {}
  for i, segment in enumerate(segments):
    children.setdefault(segment.parent, []).append(i)
  order: list[int] = []
  waiting = children.get(None, [])[::-1]
  while waiting:
    order.append(waiting.pop())
    waiting.extend(children.get(order[-1], [])[::-1])
  return order


def _removed(episode: Episode) -> list[np.ndarray]:
  """Per segment [T] bool: tokens that a later rewrite took out of the view."""
  masks = [np.zeros(len(s), np.bool_) for s in episode.segments]
  for event in episode.events:
    index = event.data.get("segment")
    if event.kind != "rewrite" or not isinstance(index, int):
      continue
    if not 0 <= index < len(masks):
      continue
    parent = episode.segments[index].parent
    if parent is None:
      continue
    for start, end in event.data.get("removed") or ():
      masks[parent][max(start, 0) : max(end, 0)] = True
  return masks


def _segment(
  index: int,
  segment: Segment,
  removed: np.ndarray,
  decode: Callable[[int], str],
) -> str:
  facts = [f"segment {index}", f"agent {segment.agent}"]
  if segment.parent is None:
    facts.append(segment.reason)
  else:
    facts.append(f"{segment.reason}, after segment {segment.parent}")
  facts.append(f"{len(segment)} tokens, {int(segment.trained.sum())} trained")
  if not segment.trainable:
    facts.append("frozen")
  tokens = "".join(
    _token(segment, t, bool(removed[t]), decode) for t in range(len(segment))
  )
  return (
    f'<div class="segment"><div class="meta">{escape(" · ".join(facts))}</div>'
    f'<div class="tokens">{tokens}</div></div>'
  )


def _token(
  segment: Segment, t: int, removed: bool, decode: Callable[[int], str]
) -> str:
  role = Role(int(segment.roles[t]))
  classes, hint = _CLASSES[role], _CLASSES[role]
  if segment.sampled[t]:
    logp, version = segment.behaviour_logp[t], segment.policy_version[t]
    hint += f" · logp {logp:.3f} · version {version}"
  if role is Role.SAMPLED and not segment.trained[t]:
    classes += " carried"
  if removed:
    classes += " pruned"
    hint += " · pruned later"
  text = escape(decode(int(segment.ids[t])))
  return f'<span class="{classes}" title="{hint}">{text}</span>'
