"""The implementations behind `megatron_dapo.ops.logprob`: each gives this rank's sums and this rank's gradients."""
