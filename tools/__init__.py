"""Scripts that make what the repository ships; run from its root as `python -m tools.<name>`."""
