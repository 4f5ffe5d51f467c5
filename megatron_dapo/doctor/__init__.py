"""What can be known about a machine before a run: facts are gathered apart (`gather`, `probes`), judged by small pure
functions (`machine`, `packages`, `recipe`) and put together (`report`)."""
