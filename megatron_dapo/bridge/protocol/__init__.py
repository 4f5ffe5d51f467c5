"""The part of the weight sync that also runs inside the engine's processes.

Imports torch, the standard library and `megatron_dapo.reshard` (which imports only torch) and nothing else.
"""
