"""Stands in for NVIDIA apex: the signatures of its Python and of its extensions' functions, computed by torch."""
