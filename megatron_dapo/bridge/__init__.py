"""The weight sync: copies new policy versions from the actor's shards into the engines and verifies them.

`weight_sync` is the state machine, `sync_plan` plans the buckets, `transports/` carries them, and `protocol/` also runs
in engines.
"""
