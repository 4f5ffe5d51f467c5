"""The report of runs: one HTML file with verdict, anomalies, curves, samples and configuration. Needs no torch and no network."""
