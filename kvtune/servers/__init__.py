"""Running servers, seen from outside: their metrics, events and requests. Nothing of an engine of ours."""
