"""Where models live: Hugging Face folders, Megatron layouts, and moving weights between them.

Imports neither megatron nor sglang nor transformers: names, shapes and boxes are arithmetic on a config.json.
"""
