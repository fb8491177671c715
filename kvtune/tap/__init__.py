"""The requests of a running vLLM server, as they are sent: a relay before it, or a middleware in it.

In: a server's URL; clients send their requests to the relay. Out: a line for each request (its hit, where its prompt
differs from an earlier one, why it missed), and a log that the other commands read. `kvtune.tap.Log` is the middleware
for `vllm serve --middleware kvtune.tap.Log`, which is why this package's name is all that vLLM has to import.
"""
