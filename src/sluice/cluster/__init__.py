"""Where replicas live and how they are watched: child processes and the gateway to them."""
