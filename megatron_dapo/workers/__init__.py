"""Processes in which users' functions, verifiers and environments run: killable, limited, with JSON lines over pipes."""
