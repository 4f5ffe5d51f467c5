"""Hostile files for every reader of files from outside (tools/fuzz_files.py)."""
