"""Files of a run: durable writes, the process that does them, checksums. Imports only the standard library."""
