"""The resharding core: boxes, layouts, the plan between two layouts, and the executors that carry it out."""
