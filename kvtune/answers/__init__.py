"""One question in each package: its answer as a struct, and the document that shows it."""
