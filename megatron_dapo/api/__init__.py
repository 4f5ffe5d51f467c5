"""The Python interface: recipes as objects, and calls that run them in the processes that the command starts."""
