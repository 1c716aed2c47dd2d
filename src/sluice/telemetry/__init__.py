"""What is recorded about serving: the journal, metrics and logs. Nothing here decides anything."""
