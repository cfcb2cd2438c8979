"""A run's report: one HTML file that needs nothing else to be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl_jax.evaluation.report_figures import (
  async_figures,
  curves,
  evaluation_curves,
)
from arl_jax.evaluation.report_text import escape, number
from arl_jax.evaluation.report_trajectories import trajectories
from arl_jax.evaluation.scores import Evaluation, valid
from arl_jax.observability import asynchrony
from arl_jax.observability.run_directory import write_atomically
from arl_jax.types import Episode, Task

_CSS = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff;
  --ink: #1f2933; --soft: #5b6775; --line: #dfe3e8; --accent: #2f5fd0;
  --grey: #98a2ae; --prompt: #e8ebef; --sampled: #cfe0ff; --tool: #fdecc8;
  --forced: #e6dcf8; --pruned: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #12161b; --card: #1b2128;
  --ink: #dde3ea; --soft: #98a4b3; --line: #313a45; --accent: #8fb0ff;
  --grey: #6f7b89; --prompt: #2a323c; --sampled: #21407a; --tool: #4d3d15;
  --forced: #42336a; --pruned: #ff9b8f; }
  .figure { filter: invert(1) hue-rotate(180deg); } }
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
.note { border-left: 3px solid var(--accent); padding-left: 12px; }
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
  evaluations: Sequence[Evaluation] = (),
  notes: Sequence[str] = (),
) -> None:
  """Writes the report: no script, no external resource, all text escaped.

  Args:
    path_html: file to write, atomically.
    title: of the page.
    config: resolved configuration, JSON values.
    summary: {"before": {metric: [mean, low, high]}, "after": likewise,
      "seconds": {phase: number}, "tokens_per_second": {what: number}}; any of
      them may be missing, any number None. Numbers beside them are those of
      the last update.
    metrics: lines of metrics.jsonl; each number of a phase becomes a curve.
    episodes: a few to show whole, each with a label and its task.
    decode: text of one token id.
    evaluations: of versions, in order of their lines.
    notes: what is to be said first, such as that the run isn't finished.

  Raises:
    OSError: the file can't be written.
  """
  name = escape(title)
  settings = escape(json.dumps(config, indent=2, default=str))
  body = [
    f"<h1>{name}</h1>",
    *(f'<p class="note">{escape(note)}</p>' for note in notes),
    _section("Before and after", _before_after(summary)),
    _section("Last update", _table("", summary)),
    _section("Scores by version", _evaluations(evaluations)),
    _section("Time", _times(summary)),
    _section("Staleness, drops and roles", _asynchrony(metrics)),
    *(
      _section(f"Learning curves: {phase}", curves(phase, lines))
      for phase, lines in _by_phase(metrics).items()
    ),
    _section("Trajectories", trajectories(episodes, decode)),
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
  return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


# Tables.


def _before_after(summary: Mapping[str, Any]) -> str:
  before = _intervals(summary.get("before"))
  after = _intervals(summary.get("after"))
  rows = [
    f"<tr><td>{escape(str(name))}</td>{_cell(before.get(name))}"
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


def _intervals(found: Any) -> dict[str, Sequence[float | None]]:
  """Those of a file that holds what it should; the rest is left out."""
  items = found.items() if isinstance(found, Mapping) else ()
  return {
    str(name): interval
    for name, interval in items
    if isinstance(interval, Sequence)
    and len(interval) == 3
    and all(x is None or isinstance(x, int | float) for x in interval)
  }


def _cell(interval: Sequence[float | None] | None) -> str:
  mean, low, high = interval or (None, None, None)
  return (
    f"<td>{number(mean)} <small>[{number(low)}, {number(high)}]</small></td>"
  )


def _defined(*intervals: Sequence[float | None] | None) -> bool:
  return all(i and all(number(n) != "–" for n in i) for i in intervals)


def _change(before: Any, after: Any) -> str:
  if not _defined(before, after):
    return "–"
  apart = after[1] > before[2] or after[2] < before[1]
  change = after[0] - before[0]
  sign = "+" if change > 0 else "−" if change < 0 else ""
  return f"{'● ' if apart else ''}{sign}{number(abs(change))}"


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
  return _columns(
    _table("seconds", summary.get("seconds")),
    _table("tokens per second", summary.get("tokens_per_second")),
  )


def _table(heading: str, values: Any) -> str:
  """Names and numbers; "" unless there are any. What is no number is left out.

  Args:
    heading: of the numbers.
    values: numbers or None by name.
  """
  rows = "".join(
    f"<tr><td>{escape(str(name))}</td><td>{number(value)}</td></tr>"
    for name, value in (values if isinstance(values, Mapping) else {}).items()
    if value is None or isinstance(value, int | float)
  )
  if not rows:
    return ""
  return f"<table><tr><th></th><th>{escape(heading)}</th></tr>{rows}</table>"


def _columns(*tables: str) -> str:
  if not any(tables):
    return ""
  return f'<div class="columns">{"".join(tables)}</div>'


# Versions, and what many processes did.


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
  if not evaluations:
    return ""
  standing = valid(evaluations)
  best = max(
    (e for e in standing if e.reward is not None),
    key=lambda e: (e.reward, e.version),
    default=None,
  )
  rows = "".join(_evaluation_row(e, e is best) for e in evaluations)
  table = (
    '<details><summary>all versions</summary><table class="wide"><tr>'
    "<th>version</th><th>reward</th><th>seconds</th><th></th></tr>"
    f"{rows}</table></details>"
  )
  count = len(standing)
  words = "1 version is" if count == 1 else f"{count} versions are"
  words += " scored on the held-out tasks."
  if best is not None:
    words += f" The best is {best.version}, with reward {number(best.reward)}."
  by_version = sorted(evaluations, key=lambda e: e.version)
  # What two lineages scored under one number is drawn once.
  drawn = [e for e in by_version if e.abandoned or e in standing]
  return f"<p>{words}</p>{evaluation_curves(drawn)}{table}"


def _evaluation_row(evaluation: Evaluation, best: bool) -> str:
  words = [f"lineage {evaluation.lineage}"]
  if best:
    words.append("best")
  if evaluation.abandoned:
    words.append("given up")
  if evaluation.skipped:
    words.append(f"skipped: {evaluation.skipped}")
  return (
    f"<tr><td>{evaluation.version}</td>{_cell(evaluation.scores.get('reward'))}"
    f"<td>{number(evaluation.seconds)}</td><td>{escape(', '.join(words))}</td>"
    "</tr>"
  )


def _asynchrony(metrics: Sequence[Mapping[str, Any]]) -> str:
  """Of all phases together; only RL has any."""
  idle = asynchrony.series(metrics, asynchrony.IDLE)
  means = {
    role: sum(v for _, v in points) / len(points)
    for role, points in idle.items()
  }
  ages = asynchrony.staleness(metrics)
  drops = asynchrony.dropped(metrics)
  return async_figures(metrics) + _columns(
    _table(
      "share of trained tokens",
      {f"{age} versions old": share for age, share in ages.items()},
    ),
    _table("dropped", {name: p[-1][1] for name, p in drops.items()}),
    _table("share of time idle", means),
  )


def _by_phase(
  metrics: Sequence[Mapping[str, Any]],
) -> dict[str, list[Mapping[str, Any]]]:
  phases: dict[str, list[Mapping[str, Any]]] = {}
  for line in metrics:
    phases.setdefault(str(line.get("phase")), []).append(line)
  return phases
