"""The weight sync: new policy versions from the actor's shards into the engines, verified.

`weight_sync` is the state machine, `sync_plan` the buckets, `transports/` carry them, `protocol/` also runs in engines.
"""
