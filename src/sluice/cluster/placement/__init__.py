"""Where replicas run: as child processes, on a Ray cluster, or where somebody else has put them."""
