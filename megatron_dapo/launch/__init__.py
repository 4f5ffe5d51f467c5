"""Start of a run's processes: the local launcher and the worker that torchrun or srun starts."""
