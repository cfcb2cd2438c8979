"""A run whose groups nobody samples: a real queue and a real learner.

python -m tests.runtime.learner_job --role=... is one of its processes.
"""

from launch import role

_HERE = "tests.runtime.learner_job"
_ROLES = {
  "queue": role.ROLES["queue"],
  "learner": role.ROLES["learner"],
  "actor": role.Role(f"{_HERE}.actor", False),
  "server": role.Role(f"{_HERE}.server", False),
}

if __name__ == "__main__":
  role.run(lambda argv: role.main(argv, _ROLES))
