"""Watches a run's processes: heartbeats, failures and their cause, and whether to start again."""
