"""One vLLM server in TRL's eyes, a fleet of replicas behind it."""
