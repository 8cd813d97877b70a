"""Plain records of what was found: sensitivities, latencies, trade-offs. They need neither torch nor the model."""
