"""Rollout engines: token ids in, token ids with log-probs, versions and a finish reason out. The collector sees only
`base.RolloutEngine`.
"""
