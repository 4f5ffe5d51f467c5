"""Decoders as their config.json describes them: the one reader of it, families, shapes, layers of pipeline stages."""
