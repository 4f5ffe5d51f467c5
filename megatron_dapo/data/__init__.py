"""Prompts: files in the DAPO-Math-17k schema, chat template, and the shuffled stream whose state is saved."""
