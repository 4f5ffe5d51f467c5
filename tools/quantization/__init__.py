"""Deployable checkpoints of fewer bits from a trained Hugging Face folder: NVIDIA ModelOpt quantizes, this package
decides whether the result is accepted."""
