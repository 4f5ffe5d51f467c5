"""Implementations behind `megatron_dapo.ops.logprob`. A module of one has two functions:

sums(inputs)
    maxima [P] over this rank's columns, and [3, P]: sum exp and sum exp * logit, both of logits relative to that maximum,
    and the target's logit as it is (0 where another rank owns it)
gradients(inputs, upstream)
    gradients of hidden [P, h] (this rank's partial sum) and weight [rows, h], in their types; None where not needed
"""
