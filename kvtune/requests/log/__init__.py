"""Requests as clients sent them, rendered as a server renders them: texts, token ids, conversations."""
