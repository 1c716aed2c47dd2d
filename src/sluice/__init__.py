"""sluice keeps LLM serving inside its latency targets. See docs/ARCHITECTURE.md."""

__version__ = "0.1.0"
