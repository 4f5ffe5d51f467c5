"""Injects faults into runs on a virtual cluster and judges how the runs take them."""
