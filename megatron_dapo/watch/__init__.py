"""The watch over a run's processes: heartbeats, what is wrong, who is the cause, and whether to start again."""
