"""Verifiers: presets, a user's own function, and the killable processes they run in.

Import the submodules. This file stays empty of imports because every verifier process passes through it and must
start without torch.
"""
