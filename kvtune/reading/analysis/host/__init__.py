"""What a run costs the host, apart from the device: Run -> results. Pure."""
