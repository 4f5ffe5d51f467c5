"""Ablations: variants of a recipe, each trained with several seeds, compared with a baseline by paired differences.

grid       variants and seeds of a TOML file, as overrides of a recipe
runs       the settings of one run, its directory, and its record
run_queue  runs as subprocesses, in parallel, resumed where they stopped
report     means, intervals, paired differences; Markdown and one HTML file
pictures   curves of the variants (matplotlib, the extra `plots`)
"""
