"""Tasks made from a corpus. No jax.

`clues` makes small tasks of words, for policies trained from scratch. The rest
is the published pipeline: a `TaskAuthor` proposes drafts, and everything that
it says is checked before it becomes a task.
"""

from arl_jax.data.synthesis.clues import GENERATOR, TaskSet, synthesise

__all__ = ["GENERATOR", "TaskSet", "synthesise"]
