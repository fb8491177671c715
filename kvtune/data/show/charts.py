"""How charts are drawn: their colours, their data as columns, their Vega-Lite specs.

Colours are CSS variables (`var(--c1)`), so that one drawing serves light, dark and print. A chart names the columns
that it draws, and several charts may use the same ones; the page's script turns columns into rows for Vega.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock, Thread
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtune.base.masking import masked_value
from kvtune.data.show.parts import Columns, Spec, Value
from kvtune.data.show.terminal import STEERING

if TYPE_CHECKING:
    import altair as alt

GENERATION_COLORS = ("var(--c-gen0)", "var(--c-gen1)", "var(--c-gen2)")
SERIES = (
    "var(--c1)",
    "var(--c2)",
    "var(--c3)",
    "var(--c4)",
    "var(--c5)",
    "var(--c6)",
    "var(--c7)",
    "var(--c8)",
)

# Addresses in Vega's code (an editor, a schema, an issue). They are removed: a page names no addresses.
OUTSIDE = ("https://vega.github.io/", "https://github.com/")


def extremes(value: NDArray[np.number], buckets: int) -> NDArray[np.int64]:
    """Return the numbers of the rows to draw: all, or the smallest and the largest value in each of `buckets` parts."""
    rows = len(value)
    if rows <= 2 * buckets:
        return np.arange(rows)
    bucket = np.arange(rows) * buckets // rows
    order = np.lexsort((value, bucket))
    edge = np.flatnonzero(np.diff(bucket[order])) + 1
    first = order[np.concatenate(([0], edge))]
    last = order[np.concatenate((edge - 1, [rows - 1]))]
    return np.unique(np.concatenate((first, last)))


def columns(**arrays: Iterable[object]) -> Columns:
    """Return columns as JSON lists, with six significant digits and null for NaN."""
    return {name: [_plain(v) for v in values] for name, values in arrays.items()}


def _plain(value: object) -> Value:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if not math.isfinite(number):
            return None
        rounded = float(f"{number:.6g}")
        return int(rounded) if rounded.is_integer() else rounded
    return str(value)


ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\u00[01][0-9a-f]")
"""A control character as JSON escapes it: not after an odd number of backslashes."""


def script_json(value: object) -> str:
    """Return JSON that is safe inside a <script> element, whatever its texts hold: they are masked, reorder no text."""
    text = json.dumps(masked_value(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = STEERING.sub("\ufffd", text)
    text = ESCAPED.sub(r"\1\\ufffd", text)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def warm_up() -> None:
    """Load the drawing libraries in a thread, for commands that first wait for another process."""
    Thread(target=_load).start()


def _load() -> None:
    import altair  # noqa: F401

    vega_bundle()


def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, without their links to other sites."""
    with _bundling:
        return _bundle()


_bundling = Lock()


@lru_cache(maxsize=1)
def _bundle() -> str:
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    for link in OUTSIDE:
        script = script.replace(link, "about:/")
    return script.replace("</script", "<\\/script")


def spec_of(chart: alt.TopLevelMixin) -> Spec:
    """Return an Altair chart's spec for a page: without the schema's address and without a theme."""
    spec: Spec = chart.to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return spec


def stacked(
    name: str,
    colors: Mapping[str, str],
    parts: Sequence[tuple[str, float, str]],
    axis: str,
    *,
    rows: Sequence[str] = (),
    of_rows: str = "",
    format: str = "~s",
) -> tuple[Spec, Columns]:
    """Draw one stacked bar, or one for each row; return its spec and data. `parts`: name, value and label of each.

    `colors`: the colour of each name, in the order of the stack. `rows`: the row of each part. `of_rows`: their title.
    """
    import altair as alt

    kinds = list(colors)
    data = columns(
        what=[what for what, _, _ in parts],
        value=[value for _, value, _ in parts],
        text=[text for _, _, text in parts],
        order=[kinds.index(what) for what, _, _ in parts],
        **({"row": rows} if rows else {}),
    )
    color = alt.Scale(domain=kinds, range=list(colors.values()))
    drawing = alt.Chart(alt.NamedData(name=name), height=27 * len(set(rows)) if rows else 46)
    drawing = drawing.mark_bar(stroke="var(--paper)", strokeWidth=1).encode(
        x=alt.X(
            "value:Q", title=axis, stack="zero", scale=alt.Scale(nice=False), axis=alt.Axis(format=format)
        ),
        color=alt.Color("what:N", title=None, scale=color, sort=None),
        order="order:Q",
        tooltip=[
            *([alt.Tooltip("row:N", title=of_rows)] if rows else []),
            alt.Tooltip("what:N", title=" "),
            alt.Tooltip("text:N", title=axis),
        ],
    )
    if rows:
        drawing = drawing.encode(y=alt.Y("row:N", sort=None, axis=alt.Axis(title=of_rows, labelLimit=110)))
    return spec_of(drawing), data
