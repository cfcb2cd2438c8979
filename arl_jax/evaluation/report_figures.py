"""Figures of a report, as pictures that need no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from arl_jax.evaluation.report_text import escape
from arl_jax.evaluation.scores import Evaluation
from arl_jax.observability import asynchrony

_COLUMNS = 3
_NOT_PLOTTED = ("time", "phase", "step")


# Colours; the report inverts lightness where its reader wants it dark.
_TEXT, _GRID, _RAW, _CURVE = "#1f2933", "#d9dee5", "#9db4e8", "#2f5fd0"
_LINES = ("#2f5fd0", "#c2571a", "#1d7f5f", "#8a3fb0", "#a12a44", "#6b6b1a")


class Panel(NamedTuple):
  """One plot.

  Attributes:
    title: of it; any text.
    draw: onto axes.
  """

  title: str
  draw: Callable[[Axes], None]


def curves(phase: str, lines: Sequence[Mapping[str, Any]]) -> str:
  """Each metric of a phase over its steps; "" if there are no curves.

  What `asynchrony` shows together isn't drawn again.
  """
  found: dict[str, list[tuple[float, float]]] = {}
  for line in lines:
    for name, value in line.items():
      if name in _NOT_PLOTTED or asynchrony.belongs(name):
        continue
      if isinstance(value, (int, float)):
        found.setdefault(name, []).append((line.get("step", 0), value))
  # One point (an evaluation, say) is a number for a table, not a curve.
  panels = [Panel(k, _curve(v)) for k, v in found.items() if len(v) > 1]
  return picture(panels, f"Curves of {phase}: {_names(panels)}")


def async_figures(lines: Sequence[Mapping[str, Any]]) -> str:
  """Ages of tokens, drops, and what roles did; "" if nothing is known."""
  panels = []
  if ages := asynchrony.staleness(lines):
    panels.append(Panel("trained tokens by staleness", _bars(ages)))
  for title, found in (
    ("dropped, by reason", asynchrony.dropped(lines)),
    ("idle, share of time by role", asynchrony.series(lines, asynchrony.IDLE)),
    *(
      (prefix.removesuffix("_").replace("_", " ") + ", by role", values)
      for prefix in asynchrony.RATES
      if (values := asynchrony.series(lines, prefix))
    ),
  ):
    many = {name: points for name, points in found.items() if len(points) > 1}
    if many:
      panels.append(Panel(title, _lines(many)))
  return picture(panels, f"Asynchrony: {_names(panels)}")


def evaluation_curves(evaluations: Sequence[Evaluation]) -> str:
  """Scores over versions with their intervals; "" without two that stand.

  Args:
    evaluations: by version; the abandoned ones are drawn apart.
  """
  names = dict.fromkeys(name for e in evaluations for name in e.scores)
  panels = []
  for name in names:
    standing, abandoned = (
      np.array(
        [
          (e.version, *e.scores[name])
          for e in evaluations
          if e.abandoned == given_up and None not in e.scores.get(name, (None,))
        ],
        np.float64,
      ).reshape(-1, 4)
      for given_up in (False, True)
    )
    if len(standing) > 1:
      panels.append(Panel(name, _intervals(standing, abandoned)))
  return picture(panels, f"Scores by version: {_names(panels)}")


def picture(panels: Sequence[Panel], alt: str) -> str:
  """HTML with one image; "" without panels."""
  if not panels:
    return ""
  data = f"data:image/png;base64,{_png(panels)}"
  return f'<img class="figure" src="{data}" alt="{escape(alt)}">'


def _names(panels: Sequence[Panel]) -> str:
  return ", ".join(panel.title for panel in panels)


def _png(panels: Sequence[Panel]) -> str:
  rows = -(-len(panels) // _COLUMNS)
  # Without pyplot: no global state, no display.
  width, height = 11.2, 2.35 * rows
  figure = Figure(figsize=(width, height))
  FigureCanvasAgg(figure)
  # Room for numbers of a usual length, in inches: measuring every label takes
  # longer than drawing them.
  figure.subplots_adjust(
    left=0.6 / width,
    right=1 - 0.1 / width,
    bottom=0.3 / height,
    top=1 - 0.35 / height,
    wspace=0.2,
    hspace=0.4,
  )
  axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
  for axis in axes[len(panels) :]:
    axis.set_axis_off()
  for axis, panel in zip(axes, panels, strict=False):
    panel.draw(axis)
    axis.set_title(
      _shown(panel.title),
      color=_TEXT,
      fontsize=10,
      loc="left",
      parse_math=False,
    )
    axis.grid(color=_GRID, lw=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_TEXT, labelsize=8, length=0)
    axis.spines[:].set_visible(False)
    axis.margins(x=0.02, y=0.12)
  out = io.BytesIO()
  # The default level of 6 takes as long as drawing, for a tenth less.
  figure.savefig(
    out,
    format="png",
    dpi=140,
    transparent=True,
    pil_kwargs={"compress_level": 2},
  )
  return base64.b64encode(out.getvalue()).decode("ascii")


def _shown(name: str) -> str:
  """Names come from users, and fonts lack some characters."""
  return ascii(name)[1:-1]


# What panels draw.


def _curve(points: Sequence[tuple[float, float]]):
  def draw(axis: Axes) -> None:
    steps, values = np.asarray(points, np.float64).T
    smooth = _smooth(values)
    raw = _CURVE if smooth is None else _RAW
    axis.plot(steps, values, color=raw, lw=1.2)
    axis.locator_params(nbins=5)
    if smooth is not None:
      axis.plot(steps, smooth, color=_CURVE, lw=1.9)

  return draw


def _lines(found: Mapping[str, Sequence[tuple[float, float]]]):
  def draw(axis: Axes) -> None:
    for n, (name, points) in enumerate(found.items()):
      steps, values = np.asarray(points, np.float64).T
      colour = _LINES[n % len(_LINES)]
      style = ("-", "--", ":")[n // len(_LINES) % 3]
      # A "$" would start a formula, and "_" hide the name.
      label = " " + _shown(name).replace("$", r"\$")
      axis.plot(steps, values, color=colour, ls=style, lw=1.4, label=label)
    axis.legend(fontsize=7, labelcolor=_TEXT, frameon=False, handlelength=1.2)

  return draw


def _bars(shares: Mapping[int, float]):
  def draw(axis: Axes) -> None:
    axis.bar([str(age) for age in shares], [*shares.values()], color=_CURVE)

  return draw


def _intervals(standing: np.ndarray, abandoned: np.ndarray):
  """Both are [n, 4]: version, mean, low, high."""

  def draw(axis: Axes) -> None:
    version, mean, low, high = standing.T
    axis.fill_between(version, low, high, color=_CURVE, alpha=0.18, lw=0)
    axis.plot(version, mean, color=_CURVE, lw=1.6, marker="o", ms=3)
    if len(abandoned):
      axis.plot(abandoned[:, 0], abandoned[:, 1], "x", color=_RAW, ms=4)

  return draw


def _smooth(values: np.ndarray) -> np.ndarray | None:
  """Centred moving average, [n] -> [n]; None for few points."""
  if len(values) < 20:
    return None
  width = max(3, len(values) // 12) | 1
  window = np.ones(width)
  total = np.convolve(values, window, "same")
  return total / np.convolve(np.ones_like(values), window, "same")
