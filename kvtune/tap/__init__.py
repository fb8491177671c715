"""The requests of a running vLLM server, as they are sent: a relay before it, or a middleware in it.

In: a server's URL; clients send their requests to the relay. Out: a line for each request (its hit, where its prompt
differs from an earlier one, why it missed), and a log that the other commands read.
`vllm serve --middleware kvtune.tap.Log` writes the same log in the server: vLLM imports this package by that name.
Imported by: cli.

    command.py    the command's process: listens, relays, keeps an analyst beside it
    relay.py      the relay's connections, on asyncio: bytes pass as they come
    http1.py      follows one direction of a connection: where messages begin and end
    exchange.py   one connection's requests and answers, and what is kept of each
    recorder.py   the command's end of the analyst: starts it, hands records over, never blocks
    messages.py   the messages between the relay and the analyst
    analyst.py    the analyst's process: renders, judges, writes the log, prints
    rendering.py  a request's body as token ids: the server, or a tokenizer, renders it
    answers.py    what an answer reports: token counts, hits, token ids
    judging.py    a request's hit, causes, session, and the earlier prompt that it differs from
    joining.py    requests joined with KV events while they run, by the session id
    lines.py      what the screen says of a request, as text and as JSON
    log.py        the log of requests, which the other commands read
    middleware.py the middleware: the engine's own token ids and hits
"""

from kvtune.tap.middleware import Log as Log
