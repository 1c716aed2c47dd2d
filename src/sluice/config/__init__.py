"""Typed settings: their sections, their sources and where each value came from."""
