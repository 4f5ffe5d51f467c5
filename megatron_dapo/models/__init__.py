"""Decoder architectures: the only reader of config.json, model families, tensor shapes, and layers of pipeline
stages."""
