"""Episodes: conversations of the policy with environments, each one completion."""
