"""Faulty nodes found by their metrics (Minder, arXiv 2411.01791): pure arithmetic on samples, no process and no file."""
