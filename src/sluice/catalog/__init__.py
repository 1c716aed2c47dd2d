"""Models by name: where they are fetched from, how they are verified and kept."""
