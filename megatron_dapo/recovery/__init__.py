"""Surviving faults: atomic checkpoints, signals, heartbeats and their watcher, and the culprit on record."""
