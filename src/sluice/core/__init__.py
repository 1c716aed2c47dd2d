"""What should happen, given what is known and the time: pure decisions over values."""
