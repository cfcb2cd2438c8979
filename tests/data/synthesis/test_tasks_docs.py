"""What docs/search.md says of tasks is so."""

import pathlib
import re

from arl_jax.data.synthesis import duplicates, evidence, pipeline, verify
from arl_jax.data.synthesis.domains import DOMAINS

ROOT = pathlib.Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "search.md").read_text()
TEXT = TEXT.partition("## Tasks")[2].partition("\n## ")[0]


def test_names_what_there_is():
  for name in re.findall(r"`([a-z_]+\.py)`", TEXT):
    assert (ROOT / "arl_jax" / "data" / "synthesis" / name).is_file()
  for name in re.findall(r"`(data/[a-z_/]+\.py)`", TEXT):
    assert (ROOT / "arl_jax" / name).is_file()
  assert ", ".join(f"`{name}`" for name in DOMAINS) in TEXT
  program = (ROOT / "launch" / "prepare_tasks.py").read_text()
  for flag in re.findall(r"--(\w+)=", TEXT):
    assert f'"{flag}"' in program or flag == "config"


def test_states_the_limits_that_hold():
  assert evidence.DEPTH == 50
  assert evidence.MAX_FACT_CHUNKS == 3
  assert verify.MAX_DISTRACTORS == 10
  assert {d.quotes.shortest for d in DOMAINS.values()} == {12}
  assert pipeline.SynthesisConfig().near == 0.6
  assert pipeline.SynthesisConfig().per_truth == 4
  assert duplicates.shingles("a b c") != duplicates.shingles("a b d")
