"""Verifiers: presets, services, a sandboxed program, and a user's own function by name.

This file stays empty of imports because every verifier process passes through it.
"""
