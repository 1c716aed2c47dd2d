"""Ways to compute steps. Each module is the only importer of its library."""
