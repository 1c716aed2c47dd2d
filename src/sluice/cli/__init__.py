"""The ``sluice`` command: one module per subcommand, each parsing, one call, printing."""
