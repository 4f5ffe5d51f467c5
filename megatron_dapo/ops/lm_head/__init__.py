"""Implementations behind `megatron_dapo.ops.logprob`. A module of one has three functions:

room(inputs, most_bytes)
    memory in which `sums` keeps the logits for `gradients`; None where that is more than `most_bytes`
sums(inputs, kept)
    maxima [P] over this rank's columns, and [3, P]: sum exp and sum exp * logit, both of logits relative to that maximum,
    and the target's logit as it is (0 where another rank owns it); fills `kept` unless it is None
gradients(inputs, upstream)
    gradients of hidden [P, h] (this rank's partial sum) and weight [rows, h], in their types; None where not needed, and
    for a weight whose gradient was added to `upstream.main_grad`; may overwrite `upstream.kept`
"""
