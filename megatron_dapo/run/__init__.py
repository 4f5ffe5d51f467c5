"""A run: its plan, the configurations that are derived for it, its start, its processes and an evaluation without training."""
