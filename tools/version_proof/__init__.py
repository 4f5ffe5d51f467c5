"""Parts of tools/prove_versions.py."""
