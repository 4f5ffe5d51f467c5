"""The resharding core: slices, layouts, the plan between two layouts, and the executors that carry it out."""
