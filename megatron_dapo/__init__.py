"""DAPO, VAPO and T-PPO on Megatron-core: exact losses under any layout, verified weight sync, exact resume."""

__version__ = "0.1.0"
