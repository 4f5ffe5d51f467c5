"""Telemetry of a run: one metric schema, writers, phase times, samples, progress, batch dumps, the summary."""
