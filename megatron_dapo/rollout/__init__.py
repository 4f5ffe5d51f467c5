"""Collects rollout batches: engines generate, verifiers score, and groups are filtered, topped up and carried over.
Does not use torch.distributed.
"""
