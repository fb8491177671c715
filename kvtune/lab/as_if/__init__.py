"""vLLM on a device that is not here: its platform forced, stand-ins for what only a GPU has."""
