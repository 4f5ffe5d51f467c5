"""Collecting rollout batches: engines generate, verifiers score, groups are filtered, topped up and carried over. No
torch.distributed.
"""
