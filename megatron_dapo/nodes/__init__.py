"""Faulty nodes found by their metrics (Minder, arXiv 2411.01791): pure arithmetic on samples, no process and no file."""

MIN_NODES = 4  # that are compared, as in the published evaluation: among fewer it is not plain who is unlike the others
