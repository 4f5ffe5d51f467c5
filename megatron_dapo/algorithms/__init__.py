"""The mathematics of a step, in plain torch: nothing here knows of processes, engines or configs.

    rewards  -> length_reward -> dynamic_sampling -> advantages (reinforce_pp)
    logprobs -> off_policy, policy_loss, kl        -> [P] token losses and metric SUMS
    mask     -> aggregation -> the weight of every token, from global denominators

Every function that could depend on how a batch is cut takes the global number it divides by as an argument.
"""
