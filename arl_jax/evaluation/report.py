"""A run's report: one HTML file that needs nothing else to be read."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from arl_jax.observability.run_directory import write_atomically
from arl_jax.types import Episode, Role, Segment, Task

_COLUMNS = 3
_NOT_PLOTTED = ("time", "phase", "step")
# Per colour scheme: text, grid, raw points, curve.
_INKS = {
  "light": ("#1f2933", "#d9dee5", "#9db4e8", "#2f5fd0"),
  "dark": ("#dde3ea", "#39424e", "#4a6196", "#8fb0ff"),
}
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
_CSS = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff;
  --ink: #1f2933; --soft: #5b6775; --line: #dfe3e8; --accent: #2f5fd0;
  --grey: #98a2ae; --prompt: #e8ebef; --sampled: #cfe0ff; --tool: #fdecc8;
  --forced: #e6dcf8; --pruned: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #12161b; --card: #1b2128;
  --ink: #dde3ea; --soft: #98a4b3; --line: #313a45; --accent: #8fb0ff;
  --grey: #6f7b89; --prompt: #2a323c; --sampled: #21407a; --tool: #4d3d15;
  --forced: #42336a; --pruned: #ff9b8f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 18px; }
h2 { font-size: 18px; margin: 0 0 12px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 20px 22px; margin: 0 0 18px; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table.wide { width: 100%; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
td small, .meta { color: var(--soft); font-size: 13px; }
svg { width: 220px; height: 22px; display: block; margin-left: auto; }
.b { stroke: var(--grey); fill: var(--grey); }
.a { stroke: var(--accent); fill: var(--accent); }
.columns { display: flex; flex-wrap: wrap; gap: 12px 70px; }
.legend span, .tokens span { border-radius: 3px; }
.legend { margin: 0 0 14px; font-size: 13px; }
.legend span { padding: 2px 7px; margin-right: 8px; }
.tokens { font: 13px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas,
  monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; }
.tokens span { unicode-bidi: isolate; }
.prompt { background: var(--prompt); } .sampled { background: var(--sampled); }
.tool { background: var(--tool); } .forced { background: var(--forced); }
.carried { opacity: .55; }
.pruned { text-decoration: line-through 2px var(--pruned);
  color: var(--pruned); }
.episode { border-top: 1px solid var(--line); padding-top: 14px;
  margin-top: 20px; }
.segment { border-left: 3px solid var(--line); padding-left: 12px;
  margin: 12px 0; }
.tokens, pre { max-height: 560px; overflow: auto; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
"""


def write_report(
  path_html: str | os.PathLike[str],
  *,
  title: str,
  config: Mapping[str, Any],
  summary: Mapping[str, Any],
  metrics: Sequence[Mapping[str, Any]],
  episodes: Sequence[tuple[str, Task, Episode]],
  decode: Callable[[int], str],
) -> None:
  """Writes the report: no script, no external resource, all text escaped.

  Args:
    path_html: file to write, atomically.
    title: of the page.
    config: resolved configuration, JSON values.
    summary: {"before": {metric: [mean, low, high]}, "after": likewise,
      "seconds": {phase: number}, "tokens_per_second": {what: number}}; any of
      them may be missing, any number None.
    metrics: lines of metrics.jsonl; each number of a phase becomes a curve.
    episodes: a few to show whole, each with a label and its task.
    decode: text of one token id.

  Raises:
    OSError: the file can't be written.
  """
  name = _escape(title)
  settings = _escape(json.dumps(config, indent=2, default=str))
  body = [
    f"<h1>{name}</h1>",
    _section("Before and after", _before_after(summary)),
    _section("Time", _times(summary)),
    *(
      _section(f"Learning curves: {phase}", _curves(phase, lines))
      for phase, lines in _by_phase(metrics).items()
    ),
    _section("Trajectories", _trajectories(episodes, decode)),
    _section(
      "Configuration",
      f"<details><summary>all fields</summary><pre>{settings}</pre></details>",
    ),
  ]
  # The policy keeps whatever a model or a corpus wrote from doing anything,
  # should an escape ever be missed.
  page = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="default-src'
    " 'none'; img-src data:; style-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{name}</title><style>{_CSS}</style></head>\n"
    f"<body><main>\n{chr(10).join(filter(None, body))}\n</main></body></html>\n"
  )
  write_atomically(path_html, page)


def _section(title: str, content: str) -> str:
  if not content:
    return ""
  return f"<section><h2>{_escape(title)}</h2>\n{content}</section>"


def _escape(text: str) -> str:
  """Text for HTML; control characters, which it forbids, made visible."""
  shown = "".join(
    chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text
  )
  return html.escape(shown.replace("\x7f", "\u2421"), quote=True)


def _number(value: Any) -> str:
  if not isinstance(value, (int, float)) or not math.isfinite(value):
    return "–"
  if value and not 1e-3 <= abs(value) < 1e5:
    return f"{value:.3g}"
  return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


# Tables.


def _before_after(summary: Mapping[str, Any]) -> str:
  before = summary.get("before") or {}
  after = summary.get("after") or {}
  rows = [
    f"<tr><td>{_escape(str(name))}</td>{_cell(before.get(name))}"
    f"{_cell(after.get(name))}<td>{_change(before.get(name), after.get(name))}"
    f"</td><td>{_interval_plot(before.get(name), after.get(name))}</td></tr>"
    for name in {**before, **after}
  ]
  if not rows:
    return ""
  return (
    '<table class="wide"><tr><th>metric</th><th>before</th><th>after</th>'
    "<th>change</th><th>intervals</th></tr>" + "".join(rows) + "</table>"
    '<p class="meta">Mean [low, high]; grey is before, coloured is after. ●'
    " marks intervals that don't overlap.</p>"
  )


def _cell(interval: Sequence[float | None] | None) -> str:
  mean, low, high = interval or (None, None, None)
  return (
    f"<td>{_number(mean)} <small>[{_number(low)}, {_number(high)}]</small></td>"
  )


def _defined(*intervals: Sequence[float | None] | None) -> bool:
  return all(i and all(_number(n) != "–" for n in i) for i in intervals)


def _change(before: Any, after: Any) -> str:
  if not _defined(before, after):
    return "–"
  apart = after[1] > before[2] or after[2] < before[1]
  change = after[0] - before[0]
  sign = "+" if change > 0 else "−" if change < 0 else ""
  return f"{'● ' if apart else ''}{sign}{_number(abs(change))}"


def _interval_plot(before: Any, after: Any) -> str:
  if not _defined(before, after):
    return ""
  low, high = min(before[1], after[1]), max(before[2], after[2])
  scale = 208 / (high - low) if high > low else 0.0
  parts = []
  for name, y, interval in (("b", 6, before), ("a", 16, after)):
    mean, x1, x2 = (6 + (n - low) * scale for n in interval)
    parts.append(
      f'<line class="{name}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y}" y2="{y}"'
      f' stroke-width="2"/><circle class="{name}" cx="{mean:.1f}" cy="{y}"'
      ' r="3.5"/>'
    )
  return f'<svg viewBox="0 0 220 22" aria-hidden="true">{"".join(parts)}</svg>'


def _times(summary: Mapping[str, Any]) -> str:
  tables = []
  for key, heading in (
    ("seconds", "seconds"),
    ("tokens_per_second", "tokens per second"),
  ):
    rows = "".join(
      f"<tr><td>{_escape(str(name))}</td><td>{_number(value)}</td></tr>"
      for name, value in (summary.get(key) or {}).items()
    )
    if rows:
      tables.append(
        f"<table><tr><th></th><th>{heading}</th></tr>{rows}</table>"
      )
  return f'<div class="columns">{"".join(tables)}</div>' if tables else ""


# Curves.


def _by_phase(
  metrics: Iterable[Mapping[str, Any]],
) -> dict[str, list[Mapping[str, Any]]]:
  phases: dict[str, list[Mapping[str, Any]]] = {}
  for line in metrics:
    phases.setdefault(str(line.get("phase")), []).append(line)
  return phases


def _curves(phase: str, lines: Sequence[Mapping[str, Any]]) -> str:
  series: dict[str, list[tuple[float, float]]] = {}
  for line in lines:
    for name, value in line.items():
      if name not in _NOT_PLOTTED and isinstance(value, (int, float)):
        series.setdefault(name, []).append((line.get("step", 0), value))
  # One point (an evaluation, say) is a number for a table, not a curve.
  series = {k: points for k, points in series.items() if len(points) > 1}
  if not series:
    return ""
  light, dark = (_png(series, ink) for ink in ("light", "dark"))
  return (
    '<picture><source media="(prefers-color-scheme: dark)"'
    f' srcset="data:image/png;base64,{dark}"><img'
    f' src="data:image/png;base64,{light}" alt="Curves of {_escape(phase)}:'
    f' {_escape(", ".join(series))}"></picture>'
  )


def _png(series: Mapping[str, Sequence[tuple[float, float]]], ink: str) -> str:
  text, grid, raw, curve = _INKS[ink]
  rows = -(-len(series) // _COLUMNS)
  # Without pyplot: no global state, no display.
  figure = Figure(
    figsize=(11.2, 2.35 * rows),
    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
  )
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
  for axis in axes[len(series) :]:
    axis.set_axis_off()
  for axis, (name, points) in zip(axes, series.items(), strict=False):
    steps, values = np.asarray(points, np.float64).T
    smooth = _smooth(values)
    axis.plot(steps, values, color=curve if smooth is None else raw, lw=1.2)
    if smooth is not None:
      axis.plot(steps, smooth, color=curve, lw=1.9)
    # Names come from users: fonts lack some characters, "$" starts a formula.
    shown = ascii(name)[1:-1]
    axis.set_title(shown, color=text, fontsize=10, loc="left", parse_math=False)
    axis.grid(color=grid, lw=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(colors=text, labelsize=8, length=0)
    axis.spines[:].set_visible(False)
    axis.margins(x=0.02, y=0.12)
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=140, transparent=True)
  return base64.b64encode(out.getvalue()).decode("ascii")


def _smooth(values: np.ndarray) -> np.ndarray | None:
  """Centred moving average, [n] -> [n]; None for few points."""
  if len(values) < 20:
    return None
  width = max(3, len(values) // 12) | 1
  window = np.ones(width)
  total = np.convolve(values, window, "same")
  return total / np.convolve(np.ones_like(values), window, "same")


# Trajectories.


def _trajectories(
  episodes: Sequence[tuple[str, Task, Episode]], decode: Callable[[int], str]
) -> str:
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
      f"{name} {_number(value)}" for name, value in episode.reward.parts.items()
    )
    reward = f"reward {_number(episode.reward.total)}"
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
    f'<div class="episode"><h3>{_escape(task.task_id)}: {_escape(task.prompt)}'
    f'</h3><div class="meta">{_escape(" · ".join(facts))}</div>\n{segments}'
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
    f'<div class="segment"><div class="meta">{_escape(" · ".join(facts))}</div>'
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
  text = _escape(decode(int(segment.ids[t])))
  return f'<span class="{classes}" title="{hint}">{text}</span>'
