"""The learner: groups of episodes in, one update out."""
