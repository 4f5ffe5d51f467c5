"""Verifiers: presets, services, a sandboxed program, and a user's own function by name. Empty of imports: every verifier process passes through it."""
