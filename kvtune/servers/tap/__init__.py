"""The requests of a running vLLM server, as they are sent: a relay before it.

In: a server's URL; clients send their requests to the relay. Out: a line for each request (its hit, where its prompt
differs from an earlier one, why it missed), and a log that the other commands read.
"""
