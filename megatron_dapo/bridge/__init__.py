"""The weight sync: moves the actor's weights into the rollout engines.

Imports neither megatron nor sglang nor transformers.
"""
