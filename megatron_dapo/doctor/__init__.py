"""Checks of a machine before a run: `gather` and `probes` collect facts, `machine` and `recipe` turn them into findings by pure
functions, `report` puts the findings in order."""
