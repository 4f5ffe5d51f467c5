"""From a recipe to running processes: the local launcher and the worker that torchrun or srun starts."""
