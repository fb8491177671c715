"""What was asked of a server or an engine: logs, loads, and the text of prompts."""
