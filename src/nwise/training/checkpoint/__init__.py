"""Checkpoints: the files of one, the state in it, and the policy of when to write which."""
