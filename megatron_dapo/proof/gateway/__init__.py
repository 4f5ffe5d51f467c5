"""Proof that every token sampled for an agent's requests is trained once, whatever the agent does."""
