"""What the programs share: flags and errors, said in one line."""

from __future__ import annotations

import functools
import runpy
import signal
import sys
from collections.abc import Callable

from absl import app, flags, logging

from arl_jax.actors.jobs import Interrupted
from arl_jax.runtime.host_memory import keep_freed_memory


def run(
  main: Callable[[list[str]], None], config: object, default: str
) -> None:
  """Runs a program.

  Args:
    main: takes what is no flag.
    config: an example of what --config gives.
    default: file that --config names if it isn't given. As the flag's own
      default it would be read, with the flags below it, on import.
  """
  keep_freed_memory()
  logging.set_verbosity(logging.WARNING)
  app.run(
    functools.partial(guarded, main),
    flags_parser=functools.partial(_parse_flags, config, default),
  )


def stop_on_signals(
  what: str = "stopping after this step",
) -> Callable[[], bool]:
  """The first Ctrl-C or SIGTERM asks the run to stop; a second one ends it."""
  asked: list[int] = []

  def ask(number: int, _: object) -> None:
    if asked:
      raise KeyboardInterrupt
    asked.append(number)
    print(f"\n{what}; again to stop at once", file=sys.stderr)

  signal.signal(signal.SIGINT, ask)
  signal.signal(signal.SIGTERM, ask)
  return lambda: bool(asked)


def _parse_flags(config: object, default: str, argv: list[str]) -> list[str]:
  """Parses flags; whatever is wrong with them is one line."""
  if not any(a.lstrip("-").startswith("config=") for a in argv[1:]):
    argv = [argv[0], f"--config={default}", *argv[1:]]
  try:
    return flags.FLAGS(argv)
  except KeyError as error:
    # It comes with jax, which not every program needs.
    from arl_jax.runtime.config import explain_field

    fields = [a.partition("=")[0].partition("config.")[2] for a in argv]
    example = _named(argv) or config
    reasons = [explain_field(example, field) for field in fields if field]
    problem = "; ".join(filter(None, reasons)) or f"no field {error}"
  except Exception as error:  # A configuration is code and may raise any.
    # The library's reason for a failed load comes after its own first line.
    kind = "" if isinstance(error, flags.Error) else type(error).__name__ + " "
    problem = kind + " ".join(str(error).split())[:300]
  print(f"error: {problem}", file=sys.stderr)
  sys.exit(2)


def _named(argv: list[str]) -> object | None:
  """What the file that --config names gives, None if it can't be read."""
  paths = [a.partition("=")[2] for a in argv if a.lstrip("-")[:7] == "config="]
  try:
    return runpy.run_path(paths[-1])["get_config"]()
  except Exception:  # It is code and may raise any; this is about a flag.
    return None


def guarded(main: Callable[[list[str]], None], argv: list[str]) -> None:
  """Runs `main`; known errors are one line and an exit code."""
  try:
    main(argv)
  except Interrupted:
    print("stopped at a checkpoint; go on with --resume", file=sys.stderr)
    sys.exit(130)
  except KeyboardInterrupt:
    print("stopped at once; --resume goes on from the last checkpoint")
    sys.exit(130)
  except (ValueError, OSError) as error:
    reason = getattr(error, "strerror", None) or str(error)
    if (file := getattr(error, "filename", None)) and str(file) not in reason:
      reason = f"{file}: {reason}"
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(1)
