"""One engine and its load as a value, and what its flags, its model and its platform make of it."""
