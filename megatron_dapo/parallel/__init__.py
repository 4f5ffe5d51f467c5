"""Layouts as arithmetic, packing, global sums and the resharding core; uses torch.distributed but knows no model."""
