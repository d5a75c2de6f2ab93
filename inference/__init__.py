"""One replica: an unpatched vLLM, and the agent that starts it, gives it versions, proves them and guards its port."""
