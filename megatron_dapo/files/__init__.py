"""Files of a run: durable writes, the process that does them, checksums. The standard library only."""
