"""The mathematics of a step in plain torch, with no knowledge of processes, engines or configs.

    rewards  -> length_reward -> dynamic_sampling -> advantages (reinforce_pp)
    logprobs -> off_policy, policy_loss, kl        -> [P] token losses and metric SUMS
    mask     -> aggregation -> the weight of every token, from global denominators

A function whose result could depend on how the batch is split takes its global divisor as an argument.
"""
