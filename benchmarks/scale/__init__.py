"""Parts of benchmarks/scale_start.py."""
