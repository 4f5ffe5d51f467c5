"""The processes that verifiers run in: pool, dispatcher, worker, supervisor, and pools of several verifiers.

This file stays empty of imports because every verifier process passes through it.
"""
