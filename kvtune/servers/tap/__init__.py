"""The requests of a running vLLM server, as they are sent: a relay before it, or a middleware in it.

In: a server's URL; clients send their requests to the relay. Out: a line for each request (its hit, where its prompt
differs from an earlier one, why it missed), and a log that the other commands read. `vllm serve --middleware
kvtune.servers.tap.Log` writes the same log in the server: vLLM imports this package by that name.
"""

from kvtune.servers.tap.middleware import Log as Log
