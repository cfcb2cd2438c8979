"""A corpus of made-up words, each of which occurs four times."""

import random


def write(folder):
  """Twenty files of eight paragraphs."""
  draw = random.Random(0)
  syllables = [c + v for c in "bdklmnrst" for v in "aeiou"]
  words = sorted({"".join(draw.sample(syllables, 3)) for _ in range(330)})
  stream = words * 4
  draw.shuffle(stream)
  for d in range(20):
    lines = []
    for s in range(8):
      picked = [stream.pop() for _ in range(8)]
      lines.append(f"{' '.join(picked)} Item_{d}_{s}.")
    (folder / f"d{d}.txt").write_text("\n\n".join(lines))
