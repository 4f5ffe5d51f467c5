"""Environments of episodes: what a user writes, and the worker processes in which it runs."""
