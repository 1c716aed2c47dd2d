"""The OpenAI API over HTTP. Knows the rest of sluice through ``ports.Gateway`` only."""
