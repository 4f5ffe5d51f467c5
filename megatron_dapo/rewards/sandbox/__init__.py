"""The sandbox of programs that a model wrote. Empty of imports: every verifier process passes through it."""
