"""Layouts as arithmetic, packing, global sums and the resharding core: knows torch.distributed, but no model."""
