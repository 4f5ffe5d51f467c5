"""Exactness of the loss: gradients under every layout, cut and packing against a plain model, one sequence at a time."""
