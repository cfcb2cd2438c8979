"""Logits that transformers computes from saved folders, against its own.

python tests/interop/transformers_reads.py FOLDER

FOLDER is what `save_families.py` wrote. Runs in an environment of its own, with
torch, transformers and safetensors, but without this project and JAX. Exit
status 1: a family is missing, lacks a tensor, or has other logits.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "models"

# float32 on both sides; found are up to 3e-5.
TOLERANCE = 2e-3


def compare(golden: pathlib.Path, saved: pathlib.Path) -> tuple[bool, str]:
  """Whether all is right, and what is to be said of it."""
  if not golden.is_dir() or not saved.is_dir():
    return False, f"isn't in both {golden.parent} and {saved.parent}"
  model, loading = transformers.AutoModelForCausalLM.from_pretrained(
    saved, dtype=torch.float32, local_files_only=True, output_loading_info=True
  )
  # transformers makes up what is missing, perhaps just as it was.
  if missing := loading["missing_keys"]:
    return False, f"lacks {', '.join(sorted(missing))}"
  ids, mask, logits = (
    np.load(golden / f"{name}.npy")
    for name in ("input_ids", "attention_mask", "logits")
  )
  with torch.no_grad():
    got = model.eval()(
      input_ids=torch.from_numpy(ids).long(),
      attention_mask=torch.from_numpy(mask).long(),
    ).logits.numpy()
  real = mask > 0
  difference = float(np.abs(got[real] - logits[real]).max())
  return difference <= TOLERANCE, f"logits differ by up to {difference:.1e}"


def main(argv: list[str]) -> None:
  if len(argv) != 2 or not pathlib.Path(argv[1]).is_dir():
    sys.exit(f"error: arguments are {argv[1:]}, must be one folder")
  transformers.utils.logging.disable_progress_bar()
  folder = pathlib.Path(argv[1])
  failed = False
  for name in sorted({f.name for f in (*GOLDEN.iterdir(), *folder.iterdir())}):
    right, said = compare(GOLDEN / name, folder / name)
    print(f"{name}: {'ok' if right else 'FAILED'}, {said}", flush=True)
    failed |= not right
  sys.exit(1 if failed else 0)


if __name__ == "__main__":
  main(sys.argv)
