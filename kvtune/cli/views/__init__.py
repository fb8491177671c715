"""Progress on stderr, results on stdout."""
