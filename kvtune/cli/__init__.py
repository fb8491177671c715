"""The command line: one module per command, which parses, calls the other packages and prints."""
