"""Code of the worker processes. Only the standard library: it runs in any interpreter that a user names."""
