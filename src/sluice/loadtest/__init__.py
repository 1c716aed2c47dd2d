"""Measures endpoints: plans of load, a client that keeps to them, what the answers mean."""
