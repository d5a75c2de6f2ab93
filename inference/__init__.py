"""The replica side: one unpatched vLLM, and the agent that starts it, gives it versions, proves them, guards its port."""
