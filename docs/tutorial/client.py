"""The tutorial's client: a shop's assistant that answers six questions, each in a prompt of its own.

python docs/tutorial/client.py URL             the time stands on top of the system text
python docs/tutorial/client.py URL --mended    the time stands after the question
"""

import sys
from datetime import datetime, timedelta

import httpx

TOPICS = (
    "prices orders returns shipping parcels refunds invoices taxes vouchers accounts passwords privacy cookies "
    "sizes colours repairs guarantees spare-parts opening-hours branches jobs complaints press wholesale"
)
RULES = "\n".join(
    f"Rule {number}: if a customer asks about {topic}, answer politely, in two short sentences, and name the page "
    f"of the handbook that says so."
    for number, topic in enumerate(TOPICS.split(), start=1)
)
QUESTIONS = ("Where is my parcel?", "How do I return shoes?", "Which sizes do you have?") * 2
OPENED = datetime(2026, 11, 28, 9, 0, 0)


def main(url: str, mended: bool) -> None:
    for number, question in enumerate(QUESTIONS):
        time = f"The time is {OPENED + timedelta(seconds=47 * number)}."
        system = f"You answer for a shop.\n{RULES}" if mended else f"You answer for a shop. {time}\n{RULES}"
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{question}\n{time}" if mended else question},
        ]
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "shop", "messages": messages, "max_tokens": 16},
            timeout=60,
        )
        if reply.status_code == 502:
            sys.exit(f"{url}: the server behind it does not answer yet")
        usage = reply.raise_for_status().json()["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        print(f"{question:<26}{usage['prompt_tokens']:>6} tokens{cached:>6} cached")


main(sys.argv[1], "--mended" in sys.argv)
