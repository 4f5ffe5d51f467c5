"""Surviving faults: atomic checkpoints, signals, deadlines, and the first root cause on record."""
