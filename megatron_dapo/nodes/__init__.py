"""Nodes of a run: their metrics, the slowest ranks, and faulty nodes (Minder, arXiv 2411.01791)."""

# As in the published evaluation: among fewer nodes it is unclear which one is the outlier.
MIN_NODES = 4
