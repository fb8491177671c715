"""The frame of every page: makes one self-contained HTML file from sections. Runs in the parent process.

The file contains its styles, data, charts and drawing library, and its content security policy forbids loading
anything else. Jinja2 escapes text from runs; in script elements, such text is escaped JSON.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune import __version__
from kvtune.data.run.signature import signature
from kvtune.data.show.charts import script_json, vega_bundle
from kvtune.data.show.parts import Document
from kvtune.data.show.terminal import printable

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent


def document_page(document: Document) -> str:
    """Return the page of an answer, as HTML. Its signature contains the document's identity."""
    from markupsafe import Markup

    sections = document.sections
    specs = {chart.id: chart.spec for section in sections for chart in section.charts}
    data = {name: columns for section in sections for name, columns in section.data.items()}
    script = _asset("page.js")
    vega = vega_bundle() if specs else ""
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(_hash(text) for text in (script, vega) if text)}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    html: str = _environment().get_template("base.html").render(
        version=__version__,
        signature=signature(document.identity),
        document=document,
        csp=policy,
        css=Markup(_asset("page.css")),
        specs=Markup(script_json(specs)),
        data=Markup(script_json(data)),
        vega=Markup(vega),
        script=Markup(script),
    )  # fmt: skip
    return html


def _visible(value: object) -> object:
    """Return a text of a run masked, with U+FFFD for what would reorder or hide it, in a command to be copied, too."""
    return printable(value) if type(value) is str else value  # Markup is kvtune's own


@lru_cache(maxsize=1)
def _environment() -> Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@lru_cache
def _asset(name: str) -> str:
    return (HERE / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
