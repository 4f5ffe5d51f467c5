"""The processes that verifiers run in: pool, dispatcher, worker, supervisor, and pools of several verifiers. Empty of imports: every verifier process passes through it."""
