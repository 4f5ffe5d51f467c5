"""Chat clients as environments: an HTTP endpoint whose requests are turns of an episode."""

AGENTS = "megatron_dapo.engines.endpoint.agents"  # the program of a worker, with its settings as JSON
