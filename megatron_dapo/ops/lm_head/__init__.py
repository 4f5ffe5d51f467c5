"""Implementations of `megatron_dapo.ops.logprob`. The module of each has three functions:

room(inputs, most_bytes)
    memory in which `sums` keeps the logits for `gradients`; None if that is more than `most_bytes`
sums(inputs, kept)
    maxima [P] over this rank's columns, and [3, P]: sum exp and sum exp * logit, both of logits relative to that maximum,
    and the target's logit as it is (0 if another rank owns it); fills `kept` unless it is None
gradients(inputs, upstream)
    gradients of hidden [P, h] (this rank's partial sum) and weight [rows, h], in their types; None if not needed, and
    for a weight whose gradient was added to `upstream.main_grad`; may overwrite `upstream.kept`
"""
