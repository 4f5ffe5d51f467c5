"""Memory and time of a run before a GPU is booked, and the layouts that fit a number of GPUs.

    device     rates of GPUs and of the links between them, and the share of each that is reached
    rollout    response lengths, the engine's decoding rate, queues and the longest responses
    training   seconds of log-probs and train steps
    step       a step by phase: memory, seconds, bytes
    search     layouts that fit, ranked

Pure arithmetic, without torch; memory is computed by `plan.memory`.
"""
