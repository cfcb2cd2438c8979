"""What a server counts, in Prometheus' words."""

from __future__ import annotations

import time
from collections.abc import Iterable

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from arl_jax.serving.service import Load, Service
from arl_jax.types import Sample

_SECONDS = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3, 6, 12, 25, 60, 180, 600)
_GAUGES = (
  *("version", "requests", "running", "waiting", "slots", "slots_in_use"),
)
_COUNTERS = ("sampled_tokens", "prefilled_tokens", "reused_tokens", "steps")
_STATES = ("starting", "serving", "paused", "draining", "drained", "failed")


class Metrics:
  """Counters of one server; a registry of its own, so that tests have many.

  Attributes:
    answers: requests by endpoint and outcome.
    syncs: versions taken in, or not, by outcome.
    sync_seconds: from the look at a version to its use.
  """

  def __init__(self, service: Service):
    registry = prometheus.CollectorRegistry()
    self._registry = registry
    self.answers = prometheus.Counter(
      "arl_requests",
      "Requests by endpoint and outcome.",
      ("endpoint", "outcome"),
      registry=registry,
    )
    self._first = prometheus.Histogram(
      "arl_time_to_first_token_seconds",
      "From a request to its first token.",
      registry=registry,
      buckets=_SECONDS,
    )
    self._between = prometheus.Histogram(
      "arl_time_between_tokens_seconds",
      "Mean over a request's tokens after the first.",
      registry=registry,
      buckets=_SECONDS,
    )
    self.syncs = prometheus.Counter(
      "arl_weight_syncs",
      "Versions taken in, or not, by outcome.",
      ("outcome",),
      registry=registry,
    )
    self.sync_seconds = prometheus.Histogram(
      "arl_weight_sync_seconds",
      "From the look at a version to its use.",
      registry=registry,
      buckets=_SECONDS,
    )
    registry.register(_Loads(service))

  def timer(self) -> Timer:
    """Of a request that begins now."""
    return Timer(self._first, self._between)

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)


class Timer:
  """Times of one request's tokens, seen from the server."""

  def __init__(self, first: prometheus.Histogram, rest: prometheus.Histogram):
    self._histograms = first, rest
    self._began = time.monotonic()
    self._first: float | None = None
    self._tokens = 0

  def on_part(self, part: Sample) -> None:
    now = time.monotonic()
    first, rest = self._histograms
    if len(part.ids) and self._first is None:
      self._first = now
      first.observe(now - self._began)
    self._tokens += len(part.ids)
    if part.finish is not None and self._first and self._tokens > 1:
      rest.observe((now - self._first) / (self._tokens - 1))


class _Loads:
  """Reads the service's state whenever it is asked."""

  def __init__(self, service: Service):
    self._service = service

  def collect(self) -> Iterable[prometheus.Metric]:
    load: Load = self._service.load()
    for name in _GAUGES:
      value = getattr(load, name)
      yield GaugeMetricFamily(f"arl_{name}", _HELP[name], value=value)
    for name in _COUNTERS:
      value = getattr(load, name)
      yield CounterMetricFamily(f"arl_{name}", _HELP[name], value=value)
    states = GaugeMetricFamily(
      "arl_state", "1 for the state the server is in.", labels=("state",)
    )
    for state in _STATES:
      states.add_metric((state,), float(load.state == state))
    yield states


_HELP = {
  "version": "Current policy version.",
  "requests": "Requests that were taken and aren't done.",
  "running": "Requests with a slot.",
  "waiting": "Requests without a slot.",
  "slots": "Slots of the engine.",
  "slots_in_use": "Slots that belong to a session.",
  "sampled_tokens": "Tokens that requests got.",
  "prefilled_tokens": "Tokens computed into caches.",
  "reused_tokens": "Tokens that were in a cache when they were needed.",
  "steps": "Steps of the scheduler.",
}
