"""What every room may use: errors, units, files, children, clock. Nothing of vLLM, nothing of ours."""
