"""Transports of the weight sync: implementations of `base.Transport`."""
