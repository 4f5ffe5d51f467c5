"""Nodes of a run: their metrics, the slowest ranks, and faulty nodes (Minder, arXiv 2411.01791)."""

# As in the published evaluation: among fewer nodes it is not plain which one is unlike the others.
MIN_NODES = 4
